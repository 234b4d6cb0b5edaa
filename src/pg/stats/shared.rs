//! The statistics' place in shared memory, and the lock on it.
//!
//! Decides its layout: [`Shared`], then the fan-out entries, then their index. What always holds: everything in it is
//! an atomic, so that no read is torn and no process needs trust another; what takes several steps is done under the
//! one lock, exclusively. It is there only if the library is preloaded; [`get`] says whether.
//! Read next: `fanout.rs` and `routing.rs` for the two parts, `mod.rs` for when this is called.

use std::mem::{align_of, size_of};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};

use pgrx::pg_sys;

use super::fanout::Entry;
use super::routing::{KeyspaceRow, StepRow};
use crate::pg::area::{self, Held, Lock};
use crate::pg::clock::now;

/// Name of the lock as wait event, and of the area.
const NAME: &std::ffi::CStr = c"pg_shardmap_stats";

/// Databases and pairs of database and keyspace that are counted: about 550 kB in all.
const DATABASES: usize = 256;
const KEYSPACES: usize = 64;

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());

/// The head of the area.
#[repr(C)]
pub struct Shared {
    lock: Lock,
    capacity: AtomicU32,
    /// Whether somebody who holds the lock exclusively is at work.
    changing: AtomicBool,
    /// First free entry, by its number plus 1; 0: none.
    pub free: AtomicU32,
    pub used: AtomicU32,
    /// Fan-out queries that made room for others.
    pub evicted: AtomicU64,
    /// Statements that were not counted because all rows are taken.
    pub uncounted: AtomicU64,
    /// When the server began to count, or the last reset of any database: Postgres' microseconds.
    pub fanout_since: AtomicI64,
    pub routing_since: AtomicI64,
    /// When dropped databases were last looked for.
    pub swept: AtomicI64,
    pub databases: [StepRow; DATABASES],
    pub keyspaces: [KeyspaceRow; KEYSPACES],
}

impl Shared {
    pub fn entries(&self) -> &[Entry] {
        let capacity = self.capacity.load(Ordering::Relaxed) as usize;
        // SAFETY: `attach` made the area of `size(capacity)` bytes, with the entries at this place, all bytes zero or
        // written through atomics since; it lives as long as the process.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>().add(entries_at()).cast(), capacity) }
    }

    /// Slots that hold an entry's number plus 1, or 0. Their count is a power of 2 and more than the entries'.
    pub fn index(&self) -> &[AtomicU32] {
        let capacity = self.capacity.load(Ordering::Relaxed) as usize;
        // SAFETY: as for `entries`; the index stands behind them.
        unsafe {
            let start = std::ptr::from_ref(self).cast::<u8>().add(index_at(capacity));
            std::slice::from_raw_parts(start.cast(), slots(capacity))
        }
    }

    /// Whether a process died in the middle of a change.
    pub fn is_torn(&self) -> bool {
        self.changing.load(Ordering::Relaxed)
    }

    /// Waits for the lock and holds it until the guard is dropped.
    fn lock(&self, mode: pg_sys::LWLockMode::Type) -> Guard<'_> {
        let held = self.lock.take(mode);
        let exclusive = mode == pg_sys::LWLockMode::LW_EXCLUSIVE;
        if exclusive {
            self.changing.store(true, Ordering::Relaxed);
        }
        Guard { shared: self, exclusive, _held: held }
    }

    pub fn exclusive(&self) -> Guard<'_> {
        self.lock(pg_sys::LWLockMode::LW_EXCLUSIVE)
    }

    pub fn shared(&self) -> Guard<'_> {
        self.lock(pg_sys::LWLockMode::LW_SHARED)
    }
}

/// The lock, held.
pub struct Guard<'a> {
    shared: &'a Shared,
    exclusive: bool,
    /// Released after the change is marked as done.
    _held: Held<'a>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.exclusive {
            self.shared.changing.store(false, Ordering::Relaxed);
        }
    }
}

fn slots(capacity: usize) -> usize {
    (capacity * 2).next_power_of_two()
}

fn entries_at() -> usize {
    size_of::<Shared>().next_multiple_of(align_of::<Entry>())
}

fn index_at(capacity: usize) -> usize {
    entries_at() + capacity * size_of::<Entry>()
}

fn size(capacity: usize) -> usize {
    index_at(capacity) + slots(capacity) * size_of::<AtomicU32>()
}

/// The area, or `None` if the library was not preloaded.
pub fn get() -> Option<&'static Shared> {
    // SAFETY: set in `attach` only, to the area that lives as long as the process.
    unsafe { SHARED.load(Ordering::Relaxed).as_ref() }
}

/// Asks the server for the area and its lock.
///
/// # Safety
/// From a shmem_request_hook.
pub unsafe fn request(capacity: usize) {
    area::request(NAME, size(capacity), true);
}

/// Makes the area, empty, and returns it.
///
/// # Safety
/// From a shmem_startup_hook, after [`request`] with the same capacity.
pub unsafe fn attach(capacity: usize) -> &'static Shared {
    let (area, is_new) = area::attach::<Shared>(NAME, size(capacity));
    if is_new {
        let shared = &*area;
        shared.lock.assign(NAME);
        shared.capacity.store(capacity as u32, Ordering::Relaxed);
        super::fanout::init(shared);
        let now = now();
        shared.fanout_since.store(now, Ordering::Relaxed);
        shared.routing_since.store(now, Ordering::Relaxed);
    }
    SHARED.store(area, Ordering::Relaxed);
    &*area
}

/// A bounded text. Written under the exclusive lock, read under either.
#[repr(C)]
pub struct Text<const N: usize> {
    length: AtomicU32,
    bytes: [AtomicU8; N],
}

impl<const N: usize> Text<N> {
    /// Keeps as much of `text` as fits and cuts no character.
    pub fn set(&self, text: &str) {
        let text = shardmap_core::fingerprint::bounded(text, N);
        for (kept, byte) in self.bytes.iter().zip(text.bytes()) {
            kept.store(byte, Ordering::Relaxed);
        }
        self.length.store(text.len() as u32, Ordering::Relaxed);
    }

    fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        let length = self.length.load(Ordering::Relaxed) as usize;
        self.bytes.iter().take(length).map(|byte| byte.load(Ordering::Relaxed))
    }

    /// Whether `set(text)` would change nothing.
    pub fn is(&self, text: &str) -> bool {
        self.bytes().eq(shardmap_core::fingerprint::bounded(text, N).bytes())
    }

    pub fn get(&self) -> String {
        let bytes: Vec<u8> = self.bytes().collect();
        String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}
