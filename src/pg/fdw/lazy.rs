//! Shards asked at the last moment, and only those that can have rows.
//!
//! postgres_fdw connects and begins a transaction for every partition when the executor starts. Here a scan or a
//! modification begins when its first row is wanted; one whose keys are known late computes them then, and if its shard
//! owns none of them it yields nothing, and the shard never hears of the statement. So a dead shard fails only the
//! statements that need it. Fan-outs are still flagged at executor start, before any shard is asked.
//!
//! What always holds: the private state of a node (`fdw_state`, `ri_FdwState`) is NULL until postgres_fdw's own Begin has
//! run, and its End does nothing then.

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::scan::partition;
use super::{call_original, modify, note, order, users};
use crate::pg::catalog::Partition;
use crate::pg::flag;
use crate::pg::keys::KeyType;
use crate::pg::raw;
use crate::pg::savepoint;

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn begin_foreign_scan(node: *mut pg_sys::ForeignScanState, eflags: i32) {
    at_start(node, eflags);
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn begin_direct_modify(node: *mut pg_sys::ForeignScanState, eflags: i32) {
    at_start(node, eflags);
}

unsafe fn at_start(node: *mut pg_sys::ForeignScanState, eflags: i32) {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    flag::at_start((*node).ss.ps.state, (*plan).fdw_private, eflags);
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn iterate_foreign_scan(
    node: *mut pg_sys::ForeignScanState,
) -> *mut pg_sys::TupleTableSlot {
    if !begin(node) {
        return empty((*node).ss.ss_ScanTupleSlot);
    }
    call_original!(IterateForeignScan(node))
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn iterate_direct_modify(
    node: *mut pg_sys::ForeignScanState,
) -> *mut pg_sys::TupleTableSlot {
    if !begin(node) {
        return empty((*node).ss.ss_ScanTupleSlot);
    }
    call_original!(IterateDirectModify(node))
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn rescan_foreign_scan(node: *mut pg_sys::ForeignScanState) {
    if !(*node).fdw_state.is_null() {
        // The remote cursor may be opened anew, and would see what has been written since.
        order::check_scan(node, (*node).ss.ps.plan.cast());
        call_original!(ReScanForeignScan(node));
    }
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn foreign_async_request(request: *mut pg_sys::AsyncRequest) {
    let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
    if begin(node) {
        call_original!(ForeignAsyncRequest(request));
    } else {
        raw::ExecAsyncRequestDone(request, std::ptr::null_mut());
    }
}

/// Lets postgres_fdw begin `node` if it has not; false if the node's shard can have none of its rows.
unsafe fn begin(node: *mut pg_sys::ForeignScanState) -> bool {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    // postgres_fdw computes its parameters after it has made sure that the connection is idle; a subquery among them may
    // use the same connection, and leave a request pending on it.
    // (What hangs on the scan itself is in allParam only.)
    if !(*plan).scan.plan.allParam.is_null() {
        raw::ExecSetParamPlanMulti((*plan).scan.plan.allParam, (*node).ss.ps.ps_ExprContext);
    }
    if !(*node).fdw_state.is_null() {
        return true;
    }
    if !may_have_rows(node, plan) {
        return false;
    }
    let state = (*node).ss.ps.state;
    flag::count_shard(state, (*plan).fs_server);
    let reads = (*plan).operation == pg_sys::CmdType::CMD_SELECT;
    users::admit((*plan).fs_server, users::of_scan(node, plan), !reads);
    order::check_administration((*plan).fs_server);
    match reads {
        true => order::check_scan(node, plan),
        // A modification that joins has no relation of its own to scan.
        false => order::note_write(state, (*(*(*node).resultRelInfo).ri_RelationDesc).rd_id),
    }
    // What postgres_fdw allocates when it begins must live as long as the statement.
    let before = pg_sys::MemoryContextSwitchTo((*state).es_query_cxt);
    if reads {
        call_original!(BeginForeignScan(node, 0));
    } else {
        call_original!(BeginDirectModify(node, 0));
    }
    pg_sys::MemoryContextSwitchTo(before);
    true
}

/// Whether the node's shard owns one of the keys that its rows can have, as they are now known.
unsafe fn may_have_rows(node: *mut pg_sys::ForeignScanState, plan: *const pg_sys::ForeignScan) -> bool {
    let Some(late) = note::read_late((*plan).fdw_private) else { return true };
    let relation = (*node).ss.ss_currentRelation;
    if relation.is_null() {
        return true;
    }
    let Some(partition) = partition((*relation).rd_id) else { return true };
    if late.keys.iter().any(|key| owns(&partition, key)) {
        return true;
    }
    let context = (*node).ss.ps.ps_ExprContext;
    late.values.iter().any(|value| has_own_key(&partition, *value, std::ptr::addr_of_mut!((*node).ss.ps), context))
}

fn owns(partition: &Partition, canonical: &[u8]) -> bool {
    partition.table.keyspace.holder(canonical) == Some(partition.shard)
}

/// Computes `value`, a key or an array of keys, and tells whether the partition's shard owns one.
unsafe fn has_own_key(
    partition: &Partition,
    value: *mut pg_sys::Node,
    parent: *mut pg_sys::PlanState,
    context: *mut pg_sys::ExprContext,
) -> bool {
    let before = pg_sys::MemoryContextSwitchTo((*context).ecxt_per_tuple_memory);
    let copy = pg_sys::copyObjectImpl(value.cast()).cast::<pg_sys::Node>();
    pg_sys::fix_opfuncids(copy);
    let expression = pg_sys::ExecInitExpr(copy.cast(), parent);
    let mut is_null = false;
    let datum = raw::evaluate(expression, context, &mut is_null);
    let own = !is_null
        && match KeyType::of(pg_sys::exprType(value)) {
            Some(key_type) => key_type.with_canonical(datum, |canonical| owns(partition, canonical)),
            None => array_has_own_key(partition, pg_sys::exprType(value), datum),
        };
    pg_sys::MemoryContextSwitchTo(before);
    own
}

unsafe fn array_has_own_key(partition: &Partition, array_type: pg_sys::Oid, array: pg_sys::Datum) -> bool {
    let Some(elements) = crate::pg::keys::array_elements(array_type, array) else { return true };
    elements.iter().flatten().any(|key| owns(partition, key))
}

unsafe fn empty(slot: *mut pg_sys::TupleTableSlot) -> *mut pg_sys::TupleTableSlot {
    if let Some(clear) = (*(*slot).tts_ops).clear {
        pgrx::pg_sys::ffi::pg_guard_ffi_boundary(|| clear(slot));
    }
    slot
}

/// A modification that has not begun.
#[derive(Clone, Copy)]
struct Pending {
    state: *mut pg_sys::ModifyTableState,
    private: *mut pg_sys::List,
    subplan: i32,
    depth: i32,
}

thread_local! {
    static PENDING: RefCell<HashMap<usize, Pending>> = RefCell::new(HashMap::new());
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn begin_foreign_modify(
    state: *mut pg_sys::ModifyTableState,
    result: *mut pg_sys::ResultRelInfo,
    private: *mut pg_sys::List,
    subplan: i32,
    eflags: i32,
) {
    if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 != 0 {
        return;
    }
    flag::at_start((*state).ps.state, private, eflags);
    if (*state).operation == pg_sys::CmdType::CMD_INSERT {
        // One target, and its batch size is worked out from postgres_fdw's state.
        begin_write((*state).ps.state, result);
        call_original!(BeginForeignModify(state, result, private, subplan, eflags));
        return;
    }
    let waiting = Pending { state, private, subplan, depth: savepoint::depth() };
    PENDING.with_borrow_mut(|pending| pending.insert(result as usize, waiting));
}

/// Counts the shard that `result` is on, and admits the user who writes there.
///
/// # Safety
/// `result` must be a result relation of `estate`'s statement.
pub unsafe fn begin_write(estate: *mut pg_sys::EState, result: *mut pg_sys::ResultRelInfo) {
    let server = modify::table_server(result);
    flag::count_shard(estate, server);
    users::admit(server, users::of_result(result, estate), true);
    order::check_administration(server);
    order::note_write(estate, (*(*result).ri_RelationDesc).rd_id);
}

/// Lets postgres_fdw begin the modification of `result` if it has not.
///
/// # Safety
/// `result` must be a result relation of the running statement.
pub unsafe fn begin_modify(result: *mut pg_sys::ResultRelInfo) {
    if !(*result).ri_FdwState.is_null() {
        return;
    }
    let Some(Pending { state, private, subplan, .. }) = PENDING.with_borrow_mut(|p| p.remove(&(result as usize)))
    else {
        return;
    };
    begin_write((*state).ps.state, result);
    let before = pg_sys::MemoryContextSwitchTo((*(*state).ps.state).es_query_cxt);
    call_original!(BeginForeignModify(state, result, private, subplan, 0));
    pg_sys::MemoryContextSwitchTo(before);
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn exec_foreign_delete(
    estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    plan_slot: *mut pg_sys::TupleTableSlot,
) -> *mut pg_sys::TupleTableSlot {
    begin_modify(result);
    call_original!(ExecForeignDelete(estate, result, slot, plan_slot))
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn end_foreign_modify(estate: *mut pg_sys::EState, result: *mut pg_sys::ResultRelInfo) {
    PENDING.with_borrow_mut(|pending| pending.remove(&(result as usize)));
    call_original!(EndForeignModify(estate, result));
}

/// Forgets modifications that had not begun when a savepoint of theirs was rolled back.
pub fn at_savepoint_end(end: savepoint::End) {
    PENDING.with_borrow_mut(|pending| pending.retain(|_, modification| end.keeps(&mut modification.depth)));
}

/// Forgets modifications that an error has ended.
pub fn forget() {
    PENDING.with_borrow_mut(HashMap::clear);
}
