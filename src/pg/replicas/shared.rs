//! What was last heard of each server, in shared memory.
//!
//! Decides its layout: a table of entries, found by database and foreign server. What always holds: one process a database
//! writes, any reads; nobody waits for anybody, for a reader that meets a change under way looks again; an entry that is
//! read is of one moment. It is there only if the library is preloaded. Refuses servers beyond [`ENTRIES`]: they stay
//! unknown, and the writer says so.

use std::sync::atomic::{fence, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use pgrx::pg_sys;
use shardmap_core::lag::forks::{self, Forks};
use shardmap_core::lag::summary::{self, Summary};
use shardmap_core::replica::{Observation, WORDS};

use crate::pg::area::{key_of, Area};

const NAME: &std::ffi::CStr = c"pg_shardmap_replicas";
/// Primaries and replicas that can be watched, of all databases together.
const ENTRIES: usize = 4096;
/// Databases with replicas.
const DATABASES: usize = 64;
/// The keys of an entry that was given up, and of one that somebody is about to take. No database has OID 0.
const GIVEN_UP: u64 = 1;
const CLAIMED: u64 = 2;
/// Looks at an entry that keeps changing, before it is taken to be unknown.
const PATIENCE: usize = 10_000;

pub static AREA: Area<Shared> = Area::new(NAME, |_| {});

/// All zero at first.
#[repr(C)]
pub struct Shared {
    slots: [Slot; DATABASES],
    entries: [Entry; ENTRIES],
}

/// A database with replicas, and its writer.
#[repr(C)]
pub struct Slot {
    /// 0: free.
    pub database: AtomicU32,
    /// Not 0: it has replicas.
    pub wanted: AtomicU32,
    /// The writer's process; 0: none.
    pub pid: AtomicI32,
    /// The writer's; it stays in shared memory when that ends.
    pub latch: AtomicPtr<pg_sys::Latch>,
    /// Not 0: something has changed since the writer last looked.
    pub called: AtomicU32,
    /// When it was last started.
    pub started: AtomicI64,
}

/// Words that are read and written as one.
#[repr(C)]
struct Record<const N: usize> {
    /// Odd while they are being changed.
    turn: AtomicU32,
    words: [AtomicU64; N],
}

impl<const N: usize> Record<N> {
    fn write(&self, words: [u64; N]) {
        let turn = self.turn.load(Ordering::Relaxed) & !1;
        self.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (kept, word) in self.words.iter().zip(words) {
            kept.store(word, Ordering::Relaxed);
        }
        self.turn.store(turn.wrapping_add(2), Ordering::Release);
    }

    fn read(&self) -> Option<[u64; N]> {
        for _ in 0..PATIENCE {
            let before = self.turn.load(Ordering::Acquire);
            let words = std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before & 1 == 0 && self.turn.load(Ordering::Relaxed) == before {
                return Some(words);
            }
            std::hint::spin_loop();
        }
        None
    }
}

#[repr(C)]
struct Entry {
    /// Database and server; 0: never used.
    key: AtomicU64,
    observation: Record<WORDS>,
    summary: Record<{ summary::WORDS }>,
    /// A primary's.
    forks: Record<{ forks::WORDS }>,
    reads: Reads,
}

/// Counts of reads, by any session.
#[repr(C)]
pub struct Reads {
    /// When it was begun to count: Postgres' microseconds.
    pub since: AtomicI64,
    /// Reads that the server has answered, or has begun to.
    pub reads: AtomicU64,
    /// Those that have waited for it, and how many microseconds.
    pub waited: AtomicU64,
    pub waited_us: AtomicU64,
    /// Waits for it that were in vain.
    pub in_vain: AtomicU64,
    /// Reads that had to move away from it.
    pub lost: AtomicU64,
    /// Of a primary's: those that a replica should have answered.
    pub fallbacks: AtomicU64,
}

impl Reads {
    fn reset(&self) {
        for count in [&self.reads, &self.waited, &self.waited_us, &self.in_vain, &self.lost, &self.fallbacks] {
            count.store(0, Ordering::Relaxed);
        }
        self.since.store(crate::pg::clock::now(), Ordering::Relaxed);
    }
}

fn shared() -> Option<&'static Shared> {
    AREA.get()
}

/// Whether anything can be published.
pub fn is_there() -> bool {
    shared().is_some()
}

impl Shared {
    /// The entries in which a key may stand, in the order in which it is looked for.
    fn places(&self, key: u64) -> impl Iterator<Item = &Entry> {
        let start = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % ENTRIES;
        self.entries.iter().cycle().skip(start).take(ENTRIES)
    }

    fn find(&self, key: u64) -> Option<&Entry> {
        for entry in self.places(key) {
            match entry.key.load(Ordering::Acquire) {
                0 => return None,
                found if found == key => return Some(entry),
                _ => {}
            }
        }
        None
    }

    /// Only the one writer of a database makes entries of it, so that no key stands twice.
    fn make(&self, key: u64) -> Option<&Entry> {
        for entry in self.places(key) {
            let found = entry.key.load(Ordering::Acquire);
            if found != 0 && found != GIVEN_UP {
                continue;
            }
            // What the entry said of another server must not be taken for this one's: it is emptied before it gets its key.
            if entry.key.compare_exchange(found, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                entry.observation.write([0; WORDS]);
                entry.summary.write([0; summary::WORDS]);
                entry.forks.write([0; forks::WORDS]);
                entry.reads.reset();
                entry.key.store(key, Ordering::Release);
                return Some(entry);
            }
        }
        None
    }
}

/// What was last heard of a foreign server of this database, a primary or a replica. `None`: it is not watched.
///
/// Look at [`Observation::taken_at`]: an old observation says what was, not what is.
pub fn observation(server: pg_sys::Oid) -> Option<Observation> {
    let words = shared()?.find(key_of(server))?.observation.read()?;
    Observation::of_words(&words)
}

/// What a replica's lag has been lately, and what follows from it. `None`: it is not watched.
pub fn summary(server: pg_sys::Oid) -> Option<Summary> {
    let words = shared()?.find(key_of(server))?.summary.read()?;
    Summary::of_words(&words)
}

/// Where the timelines of a shard's log parted, by its primary. `None`: it is not known.
pub fn forks(server: pg_sys::Oid) -> Option<Forks> {
    Forks::of_words(&shared()?.find(key_of(server))?.forks.read()?)
}

/// Publishes that. For the one writer of this database.
pub fn publish_forks(server: pg_sys::Oid, forks: &Forks) {
    if let Some(entry) = shared().and_then(|shared| shared.find(key_of(server))) {
        entry.forks.write(forks.words());
    }
}

/// The counts of reads of a server; `None`: it is not watched.
pub fn reads(server: pg_sys::Oid) -> Option<&'static Reads> {
    Some(&shared()?.find(key_of(server))?.reads)
}

/// Sets all counts of reads of this database to 0.
pub fn reset_reads() {
    let Some(shared) = shared() else { return };
    let database = key_of(pg_sys::InvalidOid) >> 32;
    let own = |entry: &&Entry| entry.key.load(Ordering::Acquire) >> 32 == database;
    shared.entries.iter().filter(own).for_each(|entry| entry.reads.reset());
}

/// Publishes what was heard. For the one writer of this database. `false`: there is no room.
pub fn publish(server: pg_sys::Oid, observation: &Observation, summary: Option<&Summary>) -> bool {
    let Some(shared) = shared() else { return false };
    let key = key_of(server);
    let Some(entry) = shared.find(key).or_else(|| shared.make(key)) else { return false };
    entry.observation.write(observation.words());
    if let Some(summary) = summary {
        entry.summary.write(summary.words());
    }
    true
}

/// The databases with replicas.
pub fn slots() -> &'static [Slot] {
    shared().map_or(&[], |shared| &shared.slots)
}

/// The slot of a database. `claim`: takes a free one. `None`: there is none, or none is free.
pub fn slot(database: u32, claim: bool) -> Option<&'static Slot> {
    let own = || slots().iter().find(|slot| slot.database.load(Ordering::Acquire) == database);
    let take = |slot: &&Slot| slot.database.compare_exchange(0, database, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    own().or_else(|| if claim { slots().iter().find(take).and_then(|_| own()) } else { None })
}

/// Gives up the entries of all servers of this database but `kept`. For its one writer, or when there is none.
pub fn keep_only(kept: &[pg_sys::Oid]) {
    let Some(shared) = shared() else { return };
    let kept: Vec<u64> = kept.iter().map(|server| key_of(*server)).collect();
    let database = key_of(pg_sys::InvalidOid) >> 32;
    for entry in &shared.entries {
        let found = entry.key.load(Ordering::Acquire);
        if found >> 32 == database && !kept.contains(&found) {
            entry.key.store(GIVEN_UP, Ordering::Release);
        }
    }
}

/// Gives up the entries of a database that is gone.
pub fn forget_database(database: pg_sys::Oid) {
    let Some(shared) = shared() else { return };
    for entry in &shared.entries {
        if entry.key.load(Ordering::Acquire) >> 32 == u64::from(database.to_u32()) {
            entry.key.store(GIVEN_UP, Ordering::Release);
        }
    }
}
