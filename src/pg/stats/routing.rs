//! Counters of statements: by step of the ladder, and by shard.
//!
//! Decides where a statement is counted: in its database's row, and in the row of its database and keyspace. What always
//! holds: to count is one atomic addition in a row found by a scan of a few words, without lock or allocation; only the
//! first statement of a database or keyspace takes the lock, to claim a row. A claimed row is never given back, so that
//! readers need no lock; when all are taken, the rest is counted as uncounted. Read next: `shared.rs`.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use shardmap_core::ids::ShardNumber;
use shardmap_core::statistics::{ShardCount, Step, StepCount};

use super::shared::{Shared, Text};

const RELAXED: Ordering = Ordering::Relaxed;
const SHARDS: usize = ShardNumber::MAX.0 as usize + 1;

/// Statements of one database by step. A row to a cache line, so that databases do not slow each other down.
#[repr(C, align(64))]
pub struct StepRow {
    database: AtomicU32,
    statements: [AtomicU64; Step::ALL.len()],
}

/// Statements of one database and keyspace by shard.
#[repr(C, align(64))]
pub struct KeyspaceRow {
    database: AtomicU32,
    name: Text<63>,
    statements: [AtomicU64; SHARDS],
}

/// What rows have in common: claimed in order, by a database.
trait Row {
    fn database(&self) -> &AtomicU32;
    fn is(&self, keyspace: &str) -> bool;
    fn claim(&self, keyspace: &str);
}

impl Row for StepRow {
    fn database(&self) -> &AtomicU32 {
        &self.database
    }
    fn is(&self, _: &str) -> bool {
        true
    }
    fn claim(&self, _: &str) {}
}

impl Row for KeyspaceRow {
    fn database(&self) -> &AtomicU32 {
        &self.database
    }
    fn is(&self, keyspace: &str) -> bool {
        self.name.is(keyspace)
    }
    fn claim(&self, keyspace: &str) {
        self.name.set(keyspace);
    }
}

enum Found<'a, R> {
    At(usize, &'a R),
    /// Not there; this row is the first free one.
    Free(&'a R, usize),
    Full,
}

fn scan<'a, R: Row>(rows: &'a [R], database: u32, keyspace: &str) -> Found<'a, R> {
    for (at, row) in rows.iter().enumerate() {
        // Pairs with the release in `find`: who sees the database sees the name.
        match row.database().load(Ordering::Acquire) {
            0 => return Found::Free(row, at),
            owner if owner == database && row.is(keyspace) => return Found::At(at, row),
            _ => {}
        }
    }
    Found::Full
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
        if row.database().load(Ordering::Acquire) == database && row.is(keyspace) {
            return Some(row);
        }
    }
    let found = match scan(rows, database, keyspace) {
        Found::Free(..) => {
            let _lock = shared.exclusive();
            claim(rows, database, keyspace)
        }
        found => found,
    };
    match found {
        Found::At(at, row) | Found::Free(row, at) => {
            last.store(at, RELAXED);
            Some(row)
        }
        Found::Full => {
            shared.uncounted.fetch_add(1, RELAXED);
            None
        }
    }
}

/// Scans once more and takes the first free row. The caller holds the exclusive lock, or is alone.
fn claim<'a, R: Row>(rows: &'a [R], database: u32, keyspace: &str) -> Found<'a, R> {
    let found = scan(rows, database, keyspace);
    if let Found::Free(row, _) = found {
        row.claim(keyspace);
        row.database().store(database, Ordering::Release);
    }
    found
}

pub fn count_step(shared: &Shared, database: u32, step: Step) {
    static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);
    if let Some(row) = find(shared, &shared.databases, &LAST, database, "") {
        row.statements[step as usize].fetch_add(1, RELAXED);
    }
}

pub fn count_shard(shared: &Shared, database: u32, keyspace: &str, shard: u16) {
    static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);
    if usize::from(shard) >= SHARDS {
        return;
    }
    if let Some(row) = find(shared, &shared.keyspaces, &LAST, database, keyspace) {
        row.statements[usize::from(shard)].fetch_add(1, RELAXED);
    }
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
        for (shard, statements) in (0_u16..).zip(&row.statements) {
            let statements = statements.load(RELAXED);
            if statements > 0 {
                let (database, keyspace) = (row.database.load(RELAXED), keyspace.clone());
                counts.push(ShardCount { database, keyspace, shard, statements });
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
    let by_shard = claimed(&shared.keyspaces, Some(database)).flat_map(|row| &row.statements);
    for statements in by_step.chain(by_shard) {
        statements.store(0, RELAXED);
    }
    shared.routing_since.store(now, RELAXED);
}

/// Adds what a file kept. The caller is alone.
pub fn restore(shared: &Shared, steps: &[StepCount], shards: &[ShardCount]) {
    for count in steps.iter().filter(|count| count.database != 0) {
        if let Found::At(_, row) | Found::Free(row, _) = claim(&shared.databases, count.database, "") {
            row.statements[count.step as usize].store(count.statements, RELAXED);
        }
    }
    for count in shards.iter().filter(|count| count.database != 0) {
        if let Found::At(_, row) | Found::Free(row, _) = claim(&shared.keyspaces, count.database, &count.keyspace) {
            if let Some(statements) = row.statements.get(usize::from(count.shard)) {
                statements.store(count.statements, RELAXED);
            }
        }
    }
}
