//! The table of statements that asked every shard.
//!
//! Decides which statements are kept: all, until the table is full; then those of dropped databases go, and if there are
//! none, the twentieth part that ran least often, and among equals what was not seen for longest. What always holds: a statement's figures are added under the shared
//! lock by atomics, so that sessions do not wait for each other; a new or changed text takes the exclusive lock. The
//! figures of one row are therefore not of exactly the same moment. Texts are cut to their bounds, but the fingerprint is
//! that of the whole text. Read next: `shared.rs` for the lock.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use shardmap_core::statistics::FanoutQuery;

use super::shared::{Shared, Text};
use super::sweep;

const RELAXED: Ordering = Ordering::Relaxed;

/// What makes two calls the same statement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    pub database: u32,
    pub user: u32,
    pub fingerprint: u64,
}

impl Key {
    fn slot(self, slots: usize) -> usize {
        let mixed = self.fingerprint ^ (u64::from(self.database) << 32 | u64::from(self.user));
        // Fibonacci hashing: the highest bits are the mixed ones.
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (slots - 1)
    }
}

/// What one call adds.
pub struct Call<'a> {
    pub text: &'a str,
    pub tables: &'a str,
    pub reason: &'a str,
    pub shards: u32,
    pub rows: u64,
    pub ns: u64,
    pub now: i64,
}

/// A statement; free if it has no calls.
#[repr(C)]
pub struct Entry {
    fingerprint: AtomicU64,
    calls: AtomicU64,
    rows: AtomicU64,
    total_ns: AtomicU64,
    min_ns: AtomicU64,
    max_ns: AtomicU64,
    first_seen: AtomicI64,
    last_seen: AtomicI64,
    database: AtomicU32,
    user: AtomicU32,
    shards: AtomicU32,
    /// The next free entry, by its number plus 1.
    next: AtomicU32,
    text: Text<1024>,
    tables: Text<256>,
    reason: Text<256>,
}

impl Entry {
    fn key(&self) -> Key {
        Key {
            database: self.database.load(RELAXED),
            user: self.user.load(RELAXED),
            fingerprint: self.fingerprint.load(RELAXED),
        }
    }

    fn add(&self, call: &Call) {
        self.calls.fetch_add(1, RELAXED);
        self.rows.fetch_add(call.rows, RELAXED);
        self.total_ns.fetch_add(call.ns, RELAXED);
        self.min_ns.fetch_min(call.ns, RELAXED);
        self.max_ns.fetch_max(call.ns, RELAXED);
        self.shards.fetch_max(call.shards, RELAXED);
        self.last_seen.fetch_max(call.now, RELAXED);
    }

    fn described(&self, call: &Call) -> bool {
        self.tables.is(call.tables) && self.reason.is(call.reason)
    }

    fn describe(&self, call: &Call) {
        self.tables.set(call.tables);
        self.reason.set(call.reason);
    }

    fn store(&self, query: &FanoutQuery) {
        self.fingerprint.store(query.fingerprint, RELAXED);
        self.database.store(query.database, RELAXED);
        self.user.store(query.user, RELAXED);
        self.calls.store(query.calls, RELAXED);
        self.rows.store(query.rows, RELAXED);
        self.total_ns.store(query.total_ns, RELAXED);
        self.min_ns.store(query.min_ns, RELAXED);
        self.max_ns.store(query.max_ns, RELAXED);
        self.shards.store(query.shards, RELAXED);
        self.first_seen.store(query.first_seen, RELAXED);
        self.last_seen.store(query.last_seen, RELAXED);
        self.text.set(&query.text);
        self.tables.set(&query.tables);
        self.reason.set(&query.reason);
    }

    fn load(&self) -> FanoutQuery {
        FanoutQuery {
            database: self.database.load(RELAXED),
            user: self.user.load(RELAXED),
            fingerprint: self.fingerprint.load(RELAXED),
            text: self.text.get(),
            tables: self.tables.get(),
            reason: self.reason.get(),
            shards: self.shards.load(RELAXED),
            calls: self.calls.load(RELAXED),
            rows: self.rows.load(RELAXED),
            total_ns: self.total_ns.load(RELAXED),
            min_ns: self.min_ns.load(RELAXED),
            max_ns: self.max_ns.load(RELAXED),
            first_seen: self.first_seen.load(RELAXED),
            last_seen: self.last_seen.load(RELAXED),
        }
    }
}

/// Chains all entries as free.
pub fn init(shared: &Shared) {
    for at in (0..shared.entries().len()).rev() {
        release(shared, at);
    }
}

/// Adds a call, in the lock that it needs.
pub fn record(shared: &Shared, key: Key, call: &Call) {
    {
        let _lock = shared.shared();
        if let Some(entry) = find(shared, key) {
            if entry.described(call) {
                entry.add(call);
                return;
            }
        }
    }
    if shared.free.load(RELAXED) == 0 {
        sweep::sweep(shared);
    }
    let _lock = shared.exclusive();
    if let Some(entry) = find(shared, key) {
        entry.describe(call);
        entry.add(call);
        return;
    }
    insert(
        shared,
        &FanoutQuery {
            database: key.database,
            user: key.user,
            fingerprint: key.fingerprint,
            text: call.text.into(),
            tables: call.tables.into(),
            reason: call.reason.into(),
            shards: call.shards,
            calls: 1,
            rows: call.rows,
            total_ns: call.ns,
            min_ns: call.ns,
            max_ns: call.ns,
            first_seen: call.now,
            last_seen: call.now,
        },
    );
}

/// Adds what a file kept, the most often called first, up to the table's size.
pub fn restore(shared: &Shared, mut queries: Vec<FanoutQuery>) {
    queries.retain(|query| query.calls > 0);
    queries.sort_by_key(|query| std::cmp::Reverse((query.calls, query.last_seen)));
    for query in queries.iter().take(shared.entries().len()) {
        let key = Key { database: query.database, user: query.user, fingerprint: query.fingerprint };
        if find(shared, key).is_none() {
            insert(shared, query);
        }
    }
}

/// All statements, or those of one database. The caller holds the lock, or is alone.
pub fn all(shared: &Shared, database: Option<u32>) -> Vec<FanoutQuery> {
    let wanted = |entry: &&Entry| database.is_none_or(|database| entry.database.load(RELAXED) == database);
    shared.entries().iter().filter(|entry| entry.calls.load(RELAXED) > 0).filter(wanted).map(Entry::load).collect()
}

/// The databases that have statements. The caller holds the lock.
pub fn databases(shared: &Shared) -> impl Iterator<Item = u32> + '_ {
    shared.entries().iter().filter(|entry| entry.calls.load(RELAXED) > 0).map(|entry| entry.database.load(RELAXED))
}

/// Forgets the statements of some databases. The caller holds the exclusive lock.
pub fn forget(shared: &Shared, databases: &BTreeSet<u32>) {
    for (at, entry) in shared.entries().iter().enumerate() {
        if entry.calls.load(RELAXED) > 0 && databases.contains(&entry.database.load(RELAXED)) {
            release(shared, at);
        }
    }
    reindex(shared);
}

/// Forgets the statements of one database.
pub fn reset(shared: &Shared, database: u32, now: i64) {
    let _lock = shared.exclusive();
    forget(shared, &BTreeSet::from([database]));
    shared.fanout_since.store(now, RELAXED);
}

/// Looks the key up. The caller holds the lock.
fn find(shared: &Shared, key: Key) -> Option<&Entry> {
    let (index, entries) = (shared.index(), shared.entries());
    let mut slot = key.slot(index.len());
    // The index has more slots than there are entries: a free one ends the search.
    loop {
        let entry = match index[slot].load(RELAXED) {
            0 => return None,
            number => &entries[number as usize - 1],
        };
        if entry.key() == key {
            return Some(entry);
        }
        slot = (slot + 1) & (index.len() - 1);
    }
}

/// Adds a statement that is not there. The caller holds the exclusive lock, or is alone.
fn insert(shared: &Shared, query: &FanoutQuery) {
    if shared.free.load(RELAXED) == 0 {
        evict(shared);
    }
    let number = shared.free.load(RELAXED);
    let entry = &shared.entries()[number as usize - 1];
    shared.free.store(entry.next.load(RELAXED), RELAXED);
    shared.used.fetch_add(1, RELAXED);
    entry.store(query);
    link(shared.index(), entry, number);
}

fn link(index: &[AtomicU32], entry: &Entry, number: u32) {
    let mut slot = entry.key().slot(index.len());
    while index[slot].load(RELAXED) != 0 {
        slot = (slot + 1) & (index.len() - 1);
    }
    index[slot].store(number, RELAXED);
}

/// Frees an entry. The index is to be made anew after.
fn release(shared: &Shared, at: usize) {
    let entry = &shared.entries()[at];
    if entry.calls.swap(0, RELAXED) > 0 {
        shared.used.fetch_sub(1, RELAXED);
    }
    entry.next.store(shared.free.swap(at as u32 + 1, RELAXED), RELAXED);
}

fn reindex(shared: &Shared) {
    let index = shared.index();
    for slot in index {
        slot.store(0, RELAXED);
    }
    for (at, entry) in shared.entries().iter().enumerate() {
        if entry.calls.load(RELAXED) > 0 {
            link(index, entry, at as u32 + 1);
        }
    }
}

/// Makes room in a full table.
fn evict(shared: &Shared) {
    let entries = shared.entries();
    let mut order: Vec<_> = entries
        .iter()
        .enumerate()
        .map(|(at, entry)| (entry.calls.load(RELAXED), entry.last_seen.load(RELAXED), at))
        .collect();
    let victims = (order.len() / 20).max(1);
    order.sort_unstable();
    for (_, _, at) in order.into_iter().take(victims) {
        release(shared, at);
    }
    shared.evicted.fetch_add(victims as u64, RELAXED);
    reindex(shared);
}
