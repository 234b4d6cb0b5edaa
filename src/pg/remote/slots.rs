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
use std::mem::size_of;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;

use super::pool;
use super::wait;

const NAME: &std::ffi::CStr = c"pg_shardmap_connections";
/// Shards that can have connections at the same time; a connection to one more is not counted.
const SHARDS: usize = 4096;
const RELAXED: Ordering = Ordering::Relaxed;

static PREVIOUS_REQUEST: OnceLock<pg_sys::shmem_request_hook_type> = OnceLock::new();
static PREVIOUS_STARTUP: OnceLock<pg_sys::shmem_startup_hook_type> = OnceLock::new();
static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());

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
struct Shared {
    lock: AtomicPtr<pg_sys::LWLock>,
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
    // SAFETY: set in `on_startup` only, to an area that lives as long as the process.
    unsafe { SHARED.load(RELAXED).as_ref() }
}

/// Whether connections are counted.
pub fn are_counted() -> bool {
    shared().is_some()
}

fn key(server: pg_sys::Oid) -> u64 {
    // SAFETY: a variable of the session.
    let database = unsafe { pg_sys::MyDatabaseId };
    u64::from(database.to_u32()) << 32 | u64::from(server.to_u32())
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
            // SAFETY: initialized in `on_startup`; takes a spinlock that nobody holds for long, and raises no error.
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
}

/// Asks for a place. `limit`: how many there are, 0: as many as are wanted. `place`: that in which this session waits.
pub fn ask(server: pg_sys::Oid, limit: u32, place: Option<&Waiting>) -> Asked {
    let Some(shared) = shared() else { return Asked::Uncounted };
    register();
    let guard = Lock::take(shared);
    let Some(at) = find(shared, key(server)) else { return Asked::Uncounted };
    let entry = &shared.entries[at];
    let held = entry.held.load(Ordering::SeqCst);
    // Who waits goes first.
    let ahead = if place.is_some() { 0 } else { entry.waiting.load(RELAXED) };
    if limit > 0 && held.saturating_add(ahead) >= limit {
        return Asked::Full(Full { held, mine: MINE[at].held.load(RELAXED) });
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
        let guard = Lock::take(shared);
        let at = find(shared, key(server));
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
        // SAFETY: initialized in `on_startup`; the process has a latch and a process slot.
        unsafe { pg_sys::ConditionVariableTimedSleep(condition, milliseconds, wait::wait_event()) };
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some((shared, at)) = shared().zip(self.0) else { return };
        // SAFETY: leaves the list of those who wait, if the process is on it.
        let _ = unsafe { pg_sys::ConditionVariableCancelSleep() };
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

/// The lock that is held while a place is taken.
struct Lock(&'static Shared);

impl Lock {
    fn take(shared: &'static Shared) -> Self {
        // SAFETY: one of the server's locks, assigned in `on_startup`.
        unsafe { pg_sys::LWLockAcquire(shared.lock.load(RELAXED), pg_sys::LWLockMode::LW_EXCLUSIVE) };
        Self(shared)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // SAFETY: taken in `take`; nothing raises an error in between.
        unsafe { pg_sys::LWLockRelease(self.0.lock.load(RELAXED)) };
    }
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
    let _lock = Lock::take(shared);
    let database = key(pg_sys::InvalidOid) >> 32;
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
    let _ = pg_sys::ConditionVariableCancelSleep();
    for (entry, mine) in shared.entries.iter().zip(&MINE).take(shared.used.load(RELAXED) as usize) {
        let (held, waiting) = (mine.held.swap(0, RELAXED), mine.waiting.swap(0, RELAXED));
        if held > 0 || waiting > 0 {
            entry.waiting.fetch_sub(waiting, Ordering::SeqCst);
            entry.held.fetch_sub(held, Ordering::SeqCst);
            entry.wake();
        }
    }
}

/// Asks for shared memory, if the library is being preloaded.
pub fn init() {
    // SAFETY: a flag of the server; hooks are set in the postmaster while it loads libraries.
    unsafe {
        if !pg_sys::process_shared_preload_libraries_in_progress {
            return;
        }
        PREVIOUS_REQUEST.get_or_init(|| pg_sys::shmem_request_hook);
        pg_sys::shmem_request_hook = Some(on_request);
        PREVIOUS_STARTUP.get_or_init(|| pg_sys::shmem_startup_hook);
        pg_sys::shmem_startup_hook = Some(on_startup);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_request() {
    if let Some(previous) = PREVIOUS_REQUEST.get().copied().flatten() {
        // SAFETY: the previous hook, called as Postgres would; its errors turn into panics at the boundary.
        pg_guard_ffi_boundary(|| previous());
    }
    pg_sys::RequestAddinShmemSpace(size_of::<Shared>());
    pg_sys::RequestNamedLWLockTranche(NAME.as_ptr(), 1);
}

/// At the start, and again when the server starts anew after a session has crashed.
#[pg_guard]
unsafe extern "C-unwind" fn on_startup() {
    if let Some(previous) = PREVIOUS_STARTUP.get().copied().flatten() {
        // SAFETY: as above.
        pg_guard_ffi_boundary(|| previous());
    }
    let mut found = false;
    // SAFETY: this is the hook for it; all bytes zero are a valid area but for the conditions.
    let area = pg_sys::ShmemInitStruct(NAME.as_ptr(), size_of::<Shared>(), &mut found).cast::<Shared>();
    if !found {
        std::ptr::write_bytes(area.cast::<u8>(), 0, size_of::<Shared>());
        let lock = std::ptr::addr_of_mut!((*pg_sys::GetNamedLWLockTranche(NAME.as_ptr())).lock);
        (*area).lock.store(lock, RELAXED);
        for entry in &mut (*area).entries {
            pg_sys::ConditionVariableInit(&mut entry.condition);
        }
    }
    SHARED.store(area, RELAXED);
}
