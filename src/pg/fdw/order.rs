//! A scan that starts after a write must be younger than the write.
//!
//! A scan's remote cursor is opened when its first row is wanted, and sees what its transaction has written on the shard
//! by then. A cursor of the client's that was declared before the write must not see it: it is refused, for the answer
//! would be wrong in silence. Parts of one statement are kept in order elsewhere (`barrier`).

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::scan::partition;
use crate::pg::catalog;
use crate::pg::error::Refusal;
use crate::pg::query::tree::nth;
use crate::pg::savepoint;

/// The last statement of a depth of subtransactions that wrote a table.
#[derive(Clone, Copy)]
struct Write {
    command: pg_sys::CommandId,
    estate: *mut pg_sys::EState,
    depth: i32,
}

thread_local! {
    /// By the foreign table written: one of each depth, the deepest last, which is the youngest too.
    static WRITES: RefCell<HashMap<pg_sys::Oid, Vec<Write>>> = RefCell::new(HashMap::new());
}

/// Notes that `estate`'s statement writes foreign table `relid`.
///
/// # Safety
/// `estate` must be running.
pub unsafe fn note_write(estate: *mut pg_sys::EState, relid: pg_sys::Oid) {
    // A function that was called before the first write may have gone on to another command. COPY has no plan.
    let command = match (*estate).es_plannedstmt.is_null() {
        true => pg_sys::GetCurrentCommandId(false),
        false => (*estate).es_output_cid,
    };
    let write = Write { command, estate, depth: savepoint::depth() };
    WRITES.with_borrow_mut(|writes| add(writes.entry(relid).or_default(), write));
}

/// As [`note_write`], for all partitions of logical table `relid`.
///
/// # Safety
/// As [`note_write`].
pub unsafe fn note_write_to(estate: *mut pg_sys::EState, relid: pg_sys::Oid) {
    let Some(table) = catalog::current().and_then(|catalog| catalog.table(relid).cloned()) else { return };
    table.partitions.values().for_each(|partition| note_write(estate, *partition));
}

/// Adds the youngest write, in the place of one of its depth.
fn add(writes: &mut Vec<Write>, write: Write) {
    writes.retain(|older| older.depth < write.depth);
    writes.push(write);
}

/// Refuses a scan that would see writes younger than its snapshot.
///
/// # Safety
/// `plan` must be `node`'s.
pub unsafe fn check_scan(node: *mut pg_sys::ForeignScanState, plan: *const pg_sys::ForeignScan) {
    if WRITES.with_borrow(HashMap::is_empty) {
        return;
    }
    let estate = (*node).ss.ps.state;
    if (*estate).es_snapshot.is_null() {
        return;
    }
    let mut rti = -1;
    loop {
        rti = pg_sys::bms_next_member((*plan).fs_relids, rti);
        if rti < 0 {
            return;
        }
        let Some(entry) = nth::<pg_sys::RangeTblEntry>((*estate).es_range_table, rti as usize - 1) else { continue };
        if is_older(estate, (*entry).relid) {
            stale((*entry).relid).raise()
        }
    }
}

/// Refuses a statement that goes whole to a shard and would see writes younger than its snapshot there: one in a stable
/// function, which sees what the statement that calls it saw at its start, while that one writes row by row.
///
/// # Safety
/// `estate` must be running.
pub unsafe fn check_statement(estate: *mut pg_sys::EState) {
    if WRITES.with_borrow(HashMap::is_empty) || (*estate).es_snapshot.is_null() {
        return;
    }
    let Some(catalog) = catalog::current() else { return };
    let relations = (*(*estate).es_plannedstmt).relationOids;
    for at in 0..pg_sys::list_length(relations) {
        let Some(table) = catalog.table(pg_sys::list_nth_oid(relations, at)) else { continue };
        if let Some(partition) = table.partitions.values().find(|partition| is_older(estate, **partition)) {
            stale(*partition).raise()
        }
    }
}

/// Whether another statement has written foreign table `relid` that `estate`'s must not see.
unsafe fn is_older(estate: *mut pg_sys::EState, relid: pg_sys::Oid) -> bool {
    let write = WRITES.with_borrow(|writes| writes.get(&relid)?.last().copied());
    write.is_some_and(|write| write.estate != estate && (*(*estate).es_snapshot).curcid <= write.command)
}

fn stale(relid: pg_sys::Oid) -> Refusal {
    let table = partition(relid).map_or_else(String::new, |partition| partition.table.name.clone());
    Refusal::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot begin to read table {table} by a cursor that is older than a write to it"),
    )
    .detail("The cursor would see what this transaction has written after it was opened.")
    .hint("Fetch from the cursor before writing, or open it afterwards.")
}

/// Forgets the writes of a savepoint that is rolled back.
pub fn at_savepoint_end(end: savepoint::End) {
    WRITES.with_borrow_mut(|all| {
        all.retain(|_, writes| {
            writes.retain_mut(|write| end.keeps(&mut write.depth));
            let youngest = writes.pop();
            youngest.map(|youngest| add(writes, youngest)).is_some()
        });
    });
}

/// Forgets all writes, at the end of a transaction.
pub fn forget() {
    WRITES.with_borrow_mut(HashMap::clear);
}
