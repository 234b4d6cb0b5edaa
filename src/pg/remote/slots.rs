//! How many connections all sessions of this server hold to each shard, counted in shared memory.
//!
//! Decides who may make one more: whoever finds fewer than the limit, but not before those who wait for it. What always
//! holds: a connection is counted before it is made and until it is closed; a session that ends gives its places back
//! in [`on_exit`], and one that crashes makes the server start anew with all counts at zero; giving back takes no lock, so
//! that it can be done while an error is on its way up, and by the handler of a signal. Nothing is counted unless the
//! library is preloaded. A shard is a foreign server of one database.
//!
//! Read next: `admit` for the wait, `idle` for who lets go.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::pool;
use super::wait;
use crate::pg::area::{key_of, Area, Held, Lock};

const NAME: &std::ffi::CStr = c"pg_shardmap_connections";
/// Shards that can have connections at the same time; a connection to one more is not counted.
const SHARDS: usize = 4096;
const RELAXED: Ordering = Ordering::Relaxed;

/// All bytes zero are a valid area but for the lock and the conditions.
pub static AREA: Area<Shared> = Area::with_lock(NAME, complete);

/// A shard. It can become another's when nobody holds or awaits a connection to it.
#[repr(C)]
struct Entry {
    /// Database and server; 0: never used.
    shard: AtomicU64,
    held: AtomicU32,
    waiting: AtomicU32,
    condition: pg_sys::ConditionVariable,
}

#[repr(C)]
pub struct Shared {
    lock: Lock,
    /// The entries after these were never used.
    used: AtomicU32,
    entries: [Entry; SHARDS],
}

/// What this process has added to the counts, for its end.
#[derive(Default)]
struct Mine {
    held: AtomicU32,
    waiting: AtomicU32,
}

static MINE: [Mine; SHARDS] = [const { Mine { held: AtomicU32::new(0), waiting: AtomicU32::new(0) } }; SHARDS];

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
}

fn shared() -> Option<&'static Shared> {
    AREA.get()
}

impl Shared {
    /// Holds the lock under which a place is taken.
    fn lock(&self) -> Held<'_> {
        self.lock.take(pg_sys::LWLockMode::LW_EXCLUSIVE)
    }
}

/// # Safety
/// As [`Lock::assign`].
unsafe fn complete(shared: &'static Shared) {
    shared.lock.assign(NAME);
    for entry in &shared.entries {
        pg_sys::ConditionVariableInit(std::ptr::addr_of!(entry.condition).cast_mut());
    }
}

/// Whether connections are counted.
pub fn are_counted() -> bool {
    shared().is_some()
}

/// The place of one connection, given back when dropped or before.
pub struct Slot {
    at: usize,
    held: AtomicBool,
}

impl Slot {
    /// May be called in the handler of a signal.
    pub fn give_back(&self) {
        let Some(shared) = shared() else { return };
        if self.held.swap(false, RELAXED) {
            MINE[self.at].held.fetch_sub(1, RELAXED);
            let entry = &shared.entries[self.at];
            entry.held.fetch_sub(1, Ordering::SeqCst);
            entry.wake();
        }
    }

    /// Somebody waits for it.
    pub fn is_wanted(&self) -> bool {
        shared().is_some_and(|shared| self.held.load(RELAXED) && shared.entries[self.at].waiting.load(RELAXED) > 0)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Entry {
    /// Wakes who has waited longest, if anybody.
    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // SAFETY: initialized in `complete`; takes a spinlock that nobody holds for long, and raises no error.
            unsafe { pg_sys::ConditionVariableSignal(std::ptr::addr_of!(self.condition).cast_mut()) }
        }
    }
}

/// What asking for a place has brought.
pub enum Asked {
    Slot(Slot),
    /// Connections are not counted.
    Uncounted,
    Full(Full),
}

/// There is no place.
#[derive(Clone, Copy)]
pub struct Full {
    pub held: u32,
    /// By this session.
    pub mine: u32,
    pub limit: u32,
}

impl Full {
    /// Whether this session has all that there are. Others may wait where nobody holds any.
    pub fn is_mine(&self) -> bool {
        self.mine >= self.limit
    }
}

/// Asks for a place. `limit`: how many there are, 0: as many as are wanted. `place`: that in which this session waits.
pub fn ask(server: pg_sys::Oid, limit: u32, place: Option<&Waiting>) -> Asked {
    let Some(shared) = shared() else { return Asked::Uncounted };
    register();
    let guard = shared.lock();
    let Some(at) = find(shared, key_of(server)) else { return Asked::Uncounted };
    let entry = &shared.entries[at];
    let held = entry.held.load(Ordering::SeqCst);
    // Who waits goes first.
    let ahead = if place.is_some() { 0 } else { entry.waiting.load(RELAXED) };
    if limit > 0 && held.saturating_add(ahead) >= limit {
        return Asked::Full(Full { held, mine: MINE[at].held.load(RELAXED), limit });
    }
    entry.held.fetch_add(1, RELAXED);
    MINE[at].held.fetch_add(1, RELAXED);
    drop(guard);
    Asked::Slot(Slot { at, held: AtomicBool::new(true) })
}

/// A session's place among those who wait for a connection to a shard.
pub struct Waiting(Option<usize>);

impl Waiting {
    pub fn begin(server: pg_sys::Oid) -> Self {
        let Some(shared) = shared() else { return Self(None) };
        register();
        let guard = shared.lock();
        let at = find(shared, key_of(server));
        if let Some(at) = at {
            shared.entries[at].waiting.fetch_add(1, RELAXED);
            MINE[at].waiting.fetch_add(1, RELAXED);
        }
        drop(guard);
        Self(at)
    }

    /// Waits until there may be a place, at most for `limit`. Acts on interrupts.
    pub fn wait(&self, limit: Duration) {
        let Some((shared, at)) = shared().zip(self.0) else { return wait::pause(limit) };
        let milliseconds = std::ffi::c_long::try_from(limit.as_millis()).unwrap_or(1).max(1);
        let condition = std::ptr::addr_of!(shared.entries[at].condition).cast_mut();
        // SAFETY: initialized in `complete`; the process has a latch and a process slot.
        unsafe { pg_sys::ConditionVariableTimedSleep(condition, milliseconds, wait::wait_event()) };
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some((shared, at)) = shared().zip(self.0) else { return };
        // SAFETY: leaves the list of those who wait, if the process is on it.
        unsafe { pg_sys::ConditionVariableCancelSleep() };
        MINE[at].waiting.fetch_sub(1, RELAXED);
        shared.entries[at].waiting.fetch_sub(1, Ordering::SeqCst);
        // It may have been woken, and have no use for it.
        shared.entries[at].wake();
    }
}

/// The entry of a shard, made if there is room. The caller holds the lock.
fn find(shared: &Shared, key: u64) -> Option<usize> {
    let used = shared.used.load(RELAXED) as usize;
    let is_free = |entry: &Entry| entry.held.load(Ordering::SeqCst) == 0 && entry.waiting.load(Ordering::SeqCst) == 0;
    let mut free = None;
    for (at, entry) in shared.entries.iter().enumerate().take(used) {
        if entry.shard.load(RELAXED) == key {
            return Some(at);
        }
        if free.is_none() && is_free(entry) {
            free = Some(at);
        }
    }
    let at = free.or((used < SHARDS).then_some(used))?;
    if at == used {
        shared.used.store(used as u32 + 1, RELAXED);
    }
    shared.entries[at].shard.store(key, RELAXED);
    Some(at)
}

/// A shard's figures: server, connections held by all sessions, sessions that wait for one.
pub struct Figures {
    pub server: pg_sys::Oid,
    pub held: u32,
    pub waiting: u32,
}

/// Those of this database's shards; `None`: nothing is counted.
pub fn figures() -> Option<Vec<Figures>> {
    let shared = shared()?;
    let _lock = shared.lock();
    let database = key_of(pg_sys::InvalidOid) >> 32;
    let used = shared.entries.iter().take(shared.used.load(RELAXED) as usize);
    let own = used.filter(|entry| entry.shard.load(RELAXED) >> 32 == database);
    let figures = own.map(|entry| Figures {
        server: pg_sys::Oid::from(entry.shard.load(RELAXED) as u32),
        held: entry.held.load(RELAXED),
        waiting: entry.waiting.load(RELAXED),
    });
    Some(figures.collect())
}

/// Sees to it that this process gives back what it holds when it ends.
fn register() {
    if !REGISTERED.replace(true) {
        // SAFETY: the callback has the declared type. It runs before the process' slot is given up, as the slot's own
        // callback was registered earlier.
        unsafe { pg_sys::on_shmem_exit(Some(on_exit), pg_sys::Datum::from(0)) }
    }
}

/// At the end of the process.
#[pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: c_int, _arg: pg_sys::Datum) {
    pool::close_all();
    let Some(shared) = shared() else { return };
    pg_sys::ConditionVariableCancelSleep();
    for (entry, mine) in shared.entries.iter().zip(&MINE).take(shared.used.load(RELAXED) as usize) {
        let (held, waiting) = (mine.held.swap(0, RELAXED), mine.waiting.swap(0, RELAXED));
        if held > 0 || waiting > 0 {
            entry.waiting.fetch_sub(waiting, Ordering::SeqCst);
            entry.held.fetch_sub(held, Ordering::SeqCst);
            entry.wake();
        }
    }
}
