//! Counters of statements by step of the ladder, and of statements, errors and time by shard.
//!
//! Decides where a statement is counted: in its database's row, and in the row of its database and keyspace. What always
//! holds: to count is one atomic addition in a row found by a scan of a few words, without lock or allocation; only the
//! first statement of a database or keyspace takes the lock, to claim a row. A row is given back only when its database
//! is gone; when all are taken, the rest is counted as uncounted. Read next: `shared.rs`, `sweep.rs`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use shardmap_core::ids::ShardNumber;
use shardmap_core::statistics::{ShardCount, Step, StepCount};

use super::shared::{Shared, Text};
use super::sweep;

const RELAXED: Ordering = Ordering::Relaxed;
const SHARDS: usize = ShardNumber::MAX.0 as usize + 1;

/// Statements of one database by step. A row to a cache line, so that databases do not slow each other down.
#[repr(C, align(64))]
pub struct StepRow {
    database: AtomicU32,
    statements: [AtomicU64; Step::ALL.len()],
}

/// What is counted of a shard, in the order of its counters.
#[derive(Clone, Copy)]
enum What {
    Statements,
    Errors,
    Waited,
}

const KINDS: usize = 3;

/// Counters of one database and keyspace, [`KINDS`] for each shard.
#[repr(C, align(64))]
pub struct KeyspaceRow {
    database: AtomicU32,
    name: Text<63>,
    counters: [AtomicU64; KINDS * SHARDS],
}

impl KeyspaceRow {
    fn of(&self, shard: u16, what: What) -> Option<&AtomicU64> {
        self.counters.get(place(shard, what))
    }
}

fn place(shard: u16, what: What) -> usize {
    usize::from(shard) * KINDS + what as usize
}

/// What rows have in common: they are free, or a database's.
trait Row {
    fn database(&self) -> &AtomicU32;
    fn is(&self, keyspace: &str) -> bool;
    fn name(&self, keyspace: &str);
    fn counters(&self) -> &[AtomicU64];
}

impl Row for StepRow {
    fn database(&self) -> &AtomicU32 {
        &self.database
    }
    fn is(&self, _: &str) -> bool {
        true
    }
    fn name(&self, _: &str) {}
    fn counters(&self) -> &[AtomicU64] {
        &self.statements
    }
}

impl Row for KeyspaceRow {
    fn database(&self) -> &AtomicU32 {
        &self.database
    }
    fn is(&self, keyspace: &str) -> bool {
        self.name.is(keyspace)
    }
    fn name(&self, keyspace: &str) {
        self.name.set(keyspace);
    }
    fn counters(&self) -> &[AtomicU64] {
        &self.counters
    }
}

/// Whether the row is that of a database and keyspace.
fn belongs<R: Row>(row: &R, database: u32, keyspace: &str) -> bool {
    // Pairs with the release in `claim`: who sees the database sees the name.
    row.database().load(Ordering::Acquire) == database && row.is(keyspace)
}

/// The row of a database and keyspace, claimed if it is new. `last` remembers where this process found its last one.
fn find<'a, R: Row>(
    shared: &Shared,
    rows: &'a [R],
    last: &AtomicUsize,
    database: u32,
    keyspace: &str,
) -> Option<&'a R> {
    if let Some(row) = rows.get(last.load(RELAXED)) {
        if belongs(row, database, keyspace) {
            return Some(row);
        }
    }
    let known = || rows.iter().position(|row| belongs(row, database, keyspace));
    let claimed = || {
        let _lock = shared.exclusive();
        known().or_else(|| claim(rows, database, keyspace))
    };
    let is_full = || rows.iter().all(|row| row.database().load(RELAXED) != 0);
    let found = match known() {
        Some(at) => Some(at),
        None if is_full() && !sweep::sweep(shared) => None,
        None => claimed(),
    };
    match found {
        Some(at) => last.store(at, RELAXED),
        None => _ = shared.uncounted.fetch_add(1, RELAXED),
    }
    found.and_then(|at| rows.get(at))
}

/// Takes a free row. The caller holds the exclusive lock, or is alone.
fn claim<R: Row>(rows: &[R], database: u32, keyspace: &str) -> Option<usize> {
    let at = rows.iter().position(|row| row.database().load(RELAXED) == 0)?;
    rows[at].name(keyspace);
    rows[at].database().store(database, Ordering::Release);
    Some(at)
}

pub fn count_step(shared: &Shared, database: u32, step: Step) {
    static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);
    if let Some(row) = find(shared, &shared.databases, &LAST, database, "") {
        row.statements[step as usize].fetch_add(1, RELAXED);
    }
}

pub fn count_shard(shared: &Shared, database: u32, keyspace: &str, shard: u16) {
    if let Some(counter) = keyspace_row(shared, database, keyspace).and_then(|row| row.of(shard, What::Statements)) {
        counter.fetch_add(1, RELAXED);
    }
}

pub fn add_to_shard(shared: &Shared, database: u32, keyspace: &str, shard: u16, errors: u64, waited_ns: u64) {
    let Some(row) = keyspace_row(shared, database, keyspace) else { return };
    for (what, amount) in [(What::Errors, errors), (What::Waited, waited_ns)] {
        if let Some(counter) = row.of(shard, what).filter(|_| amount > 0) {
            counter.fetch_add(amount, RELAXED);
        }
    }
}

fn keyspace_row<'a>(shared: &'a Shared, database: u32, keyspace: &str) -> Option<&'a KeyspaceRow> {
    static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);
    find(shared, &shared.keyspaces, &LAST, database, keyspace)
}

/// The counts by step, of one database (zeros too) or of all (without).
pub fn steps(shared: &Shared, database: Option<u32>) -> Vec<StepCount> {
    let mut counts = Vec::new();
    for row in claimed(&shared.databases, database) {
        for step in Step::ALL {
            let statements = row.statements[step as usize].load(RELAXED);
            counts.push(StepCount { database: row.database.load(RELAXED), step, statements });
        }
    }
    match database {
        Some(database) if counts.is_empty() => {
            counts.extend(Step::ALL.map(|step| StepCount { database, step, statements: 0 }));
        }
        Some(_) => {}
        None => counts.retain(|count| count.statements > 0),
    }
    counts
}

/// The counts by shard that are not 0, of one database or of all.
pub fn shards(shared: &Shared, database: Option<u32>) -> Vec<ShardCount> {
    let mut counts = Vec::new();
    for row in claimed(&shared.keyspaces, database) {
        let keyspace = row.name.get();
        for (shard, counters) in (0_u16..).zip(row.counters.chunks_exact(KINDS)) {
            let [statements, errors, waited_ns] =
                [0, 1, 2].map(|at: usize| counters.get(at).map_or(0, |c| c.load(RELAXED)));
            if statements > 0 || errors > 0 || waited_ns > 0 {
                let (database, keyspace) = (row.database.load(RELAXED), keyspace.clone());
                counts.push(ShardCount { database, keyspace, shard, statements, errors, waited_ns });
            }
        }
    }
    counts
}

fn claimed<R: Row>(rows: &[R], database: Option<u32>) -> impl Iterator<Item = &R> {
    rows.iter().filter(move |row| match row.database().load(Ordering::Acquire) {
        0 => false,
        owner => database.is_none_or(|database| owner == database),
    })
}

/// Sets the counters of one database to 0. A statement that counts meanwhile may be counted before or after.
pub fn reset(shared: &Shared, database: u32, now: i64) {
    let by_step = claimed(&shared.databases, Some(database)).flat_map(|row| &row.statements);
    let by_shard = claimed(&shared.keyspaces, Some(database)).flat_map(|row| &row.counters);
    for counter in by_step.chain(by_shard) {
        counter.store(0, RELAXED);
    }
    shared.routing_since.store(now, RELAXED);
}

/// Adds what a file kept. The caller is alone.
pub fn restore(shared: &Shared, steps: &[StepCount], shards: &[ShardCount]) {
    for count in steps {
        set(&shared.databases, count.database, "", count.step as usize, count.statements);
    }
    for count in shards {
        let counts =
            [(What::Statements, count.statements), (What::Errors, count.errors), (What::Waited, count.waited_ns)];
        for (what, amount) in counts {
            set(&shared.keyspaces, count.database, &count.keyspace, place(count.shard, what), amount);
        }
    }
}

fn set<R: Row>(rows: &[R], database: u32, keyspace: &str, at: usize, amount: u64) {
    if database == 0 {
        return;
    }
    let known = rows.iter().position(|row| belongs(row, database, keyspace));
    let row = known.or_else(|| claim(rows, database, keyspace)).and_then(|at| rows.get(at));
    if let Some(counter) = row.and_then(|row| row.counters().get(at)) {
        counter.store(amount, RELAXED);
    }
}

/// The databases that have rows.
pub fn databases(shared: &Shared) -> impl Iterator<Item = u32> + '_ {
    let by_step = claimed(&shared.databases, None).map(|row| row.database.load(RELAXED));
    by_step.chain(claimed(&shared.keyspaces, None).map(|row| row.database.load(RELAXED)))
}

/// Gives back the rows of some databases. The caller holds the exclusive lock.
pub fn forget(shared: &Shared, databases: &BTreeSet<u32>) {
    fn free<R: Row>(rows: &[R], databases: &BTreeSet<u32>) {
        for row in rows.iter().filter(|row| databases.contains(&row.database().load(RELAXED))) {
            row.database().store(0, RELAXED);
            for counter in row.counters() {
                counter.store(0, RELAXED);
            }
        }
    }
    free(&shared.databases, databases);
    free(&shared.keyspaces, databases);
}
