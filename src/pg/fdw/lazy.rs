//! Shards asked at the last moment, and only those that can have rows.
//!
//! postgres_fdw connects and begins a transaction for every partition when the executor starts. Here a scan or a
//! modification begins when its first row is wanted; one whose keys are known late computes them then, and if its shard
//! owns none of them it yields nothing, and the shard never hears of the statement. So a dead shard fails only the
//! statements that need it. Fan-outs are still flagged at executor start, before any shard is asked.
//!
//! What always holds: nothing was asked of a shard while a node's state is [`Node::Waiting`] or [`Modify::Waiting`]; a state
//! lives in the statement's memory context and is dropped with it. Read next: [`super::rows`], [`super::direct`] and
//! [`super::write`] for what happens then.

use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::PgMemoryContexts;

use super::bulk::Bulk;
use super::direct::Direct;
use super::private::WritePlan;
use super::rows::Scan;
use super::scan::partition;
use super::together::Together;
use super::tuples::clear;
use super::write::Write;
use super::{modify, note, order, users};
use crate::pg::catalog::Partition;
use crate::pg::flag;
use crate::pg::keys::KeyType;
use crate::pg::raw;
use crate::pg::reads::fence;
use crate::pg::remote::failure::Result;
use crate::pg::remote::guard;

const OURS: unsafe extern "C-unwind" fn(*mut pg_sys::ForeignScanState, i32) = begin_foreign_scan;

/// Whether a foreign scan is of our wrapper.
///
/// # Safety
/// `node` must be an initialised foreign scan.
pub unsafe fn is_ours(node: *mut pg_sys::ForeignScanState) -> bool {
    (*(*node).fdwroutine).BeginForeignScan.is_some_and(|own| std::ptr::fn_addr_eq(own, OURS))
}

/// The state of a foreign scan or a direct modification.
pub enum Node {
    /// It has not begun. `rewinds`: it may be rewound. `together`: those that are asked with it.
    Waiting {
        rewinds: bool,
        together: Option<Rc<Together>>,
    },
    Scan(Scan),
    Direct(Direct),
    Ended,
}

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
    let estate = (*node).ss.ps.state;
    flag::at_start(estate, (*plan).fdw_private, eflags);
    if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 == 0 {
        let waiting = Node::Waiting { rewinds: eflags & pg_sys::EXEC_FLAG_REWIND as i32 != 0, together: None };
        (*node).fdw_state = PgMemoryContexts::For((*estate).es_query_cxt).leak_and_drop_on_delete(waiting).cast();
    }
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn iterate_foreign_scan(
    node: *mut pg_sys::ForeignScanState,
) -> *mut pg_sys::TupleTableSlot {
    guard(|| {
        if let Some(Node::Waiting { together: Some(together), .. }) = (*node).fdw_state.cast::<Node>().as_ref() {
            Rc::clone(together).ask()?;
        }
        match begin_scan(node)? {
            Some(scan) => scan.next(node, !(*node).ss.ps.async_capable),
            None => Ok(clear((*node).ss.ss_ScanTupleSlot)),
        }
    })
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn iterate_direct_modify(
    node: *mut pg_sys::ForeignScanState,
) -> *mut pg_sys::TupleTableSlot {
    guard(|| match begin(node)? {
        Node::Direct(direct) => direct.next(node),
        _ => Ok(clear((*node).ss.ss_ScanTupleSlot)),
    })
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn rescan_foreign_scan(node: *mut pg_sys::ForeignScanState) {
    guard(|| {
        if let Some(Node::Scan(scan)) = (*node).fdw_state.cast::<Node>().as_mut() {
            // The statement may be sent anew, and would see what has been written since.
            order::check_scan(node, (*node).ss.ps.plan.cast());
            scan.rescan(!(*node).ss.ps.chgParam.is_null())?;
        }
        Ok(())
    });
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn end_foreign_scan(node: *mut pg_sys::ForeignScanState) {
    guard(|| end(node));
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn end_direct_modify(node: *mut pg_sys::ForeignScanState) {
    guard(|| end(node));
}

unsafe fn end(node: *mut pg_sys::ForeignScanState) -> Result<()> {
    let Some(state) = (*node).fdw_state.cast::<Node>().as_mut() else { return Ok(()) };
    match std::mem::replace(state, Node::Ended) {
        Node::Scan(scan) => scan.end(),
        Node::Direct(direct) => direct.end(),
        Node::Waiting { .. } | Node::Ended => Ok(()),
    }
}

/// The scan of `node`, begun now if it had not; `None`: its shard can have none of its rows.
///
/// # Safety
/// `node` must be an initialised foreign scan; one reference to its state at a time.
pub unsafe fn begin_scan<'a>(node: *mut pg_sys::ForeignScanState) -> Result<Option<&'a mut Scan>> {
    Ok(match begin(node)? {
        Node::Scan(scan) => Some(scan),
        _ => None,
    })
}

/// Begins `node` if it has not begun and its shard can have some of its rows.
unsafe fn begin<'a>(node: *mut pg_sys::ForeignScanState) -> Result<&'a mut Node> {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    // A subquery among the parameters may use the same connection: let it run before.
    // (What hangs on the scan itself is in allParam only.)
    if !(*plan).scan.plan.allParam.is_null() {
        raw::ExecSetParamPlanMulti((*plan).scan.plan.allParam, (*node).ss.ps.ps_ExprContext);
    }
    let state = &mut *(*node).fdw_state.cast::<Node>();
    let Node::Waiting { rewinds, together } = state else { return Ok(state) };
    let (rewinds, together) = (*rewinds, together.clone());
    if !may_have_rows(node, plan) {
        return Ok(state);
    }
    let estate = (*node).ss.ps.state;
    flag::count_shard(estate, (*plan).fs_server);
    let reads = (*plan).operation == pg_sys::CmdType::CMD_SELECT;
    let user = users::of_scan(node, plan);
    users::admit((*plan).fs_server, user, !reads);
    if !reads {
        fence::check((*plan).fs_server, user)?;
    }
    match reads {
        true => order::check_scan(node, plan),
        // A modification that joins has no relation of its own to scan.
        false => order::note_write(estate, (*(*(*node).resultRelInfo).ri_RelationDesc).rd_id),
    }
    // What is allocated here must live as long as the statement.
    let before = pg_sys::MemoryContextSwitchTo((*estate).es_query_cxt);
    *state = match reads {
        true => Node::Scan(Scan::begin(node, user, rewinds, together)?),
        false => Node::Direct(Direct::begin(node, user)?),
    };
    pg_sys::MemoryContextSwitchTo(before);
    Ok(state)
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

/// The state of a row modification.
pub enum Modify {
    /// It has not begun.
    Waiting {
        state: *mut pg_sys::ModifyTableState,
        private: *mut pg_sys::List,
    },
    Begun(Box<Write>),
    /// Rows are gathered.
    Bulk(Rc<Bulk>),
    Ended,
}

impl Modify {
    /// Makes it the state of `result`.
    unsafe fn attach(self, result: *mut pg_sys::ResultRelInfo, estate: *mut pg_sys::EState) {
        (*result).ri_FdwState = PgMemoryContexts::For((*estate).es_query_cxt).leak_and_drop_on_delete(self).cast();
    }
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn begin_foreign_modify(
    state: *mut pg_sys::ModifyTableState,
    result: *mut pg_sys::ResultRelInfo,
    private: *mut pg_sys::List,
    _subplan: i32,
    eflags: i32,
) {
    guard(|| {
        if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 == 0 {
            flag::at_start((*state).ps.state, private, eflags);
            Modify::Waiting { state, private }.attach(result, (*state).ps.state);
        }
        Ok(())
    });
}

/// Begins the modification of rows that tuple routing or COPY brings to a partition.
///
/// # Safety
/// As [`begin_modify`]; `state` must be the statement's.
pub unsafe fn begin_insert(
    state: *mut pg_sys::ModifyTableState,
    result: *mut pg_sys::ResultRelInfo,
    plan: WritePlan,
) -> Result<()> {
    let estate = (*state).ps.state;
    let write = begin_write(estate, result, plan, None)?;
    let modify = match Bulk::serves(state, result) {
        true => Modify::Bulk(Bulk::new(write, (*result).ri_RelationDesc, estate)),
        false => Modify::Begun(Box::new(write)),
    };
    modify.attach(result, estate);
    Ok(())
}

/// The rows gathered for `result`, if they are.
///
/// # Safety
/// As [`begin_modify`].
pub unsafe fn bulk<'a>(result: *mut pg_sys::ResultRelInfo) -> Option<&'a Rc<Bulk>> {
    match (*result).ri_FdwState.cast::<Modify>().as_ref() {
        Some(Modify::Bulk(bulk)) => Some(bulk),
        _ => None,
    }
}

/// Counts the shard that `result` is on, admits the user who writes there, and connects.
unsafe fn begin_write(
    estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    plan: WritePlan,
    ctid: Option<i16>,
) -> Result<Write> {
    let server = modify::table_server(result);
    let user = users::of_result(result, estate);
    flag::count_shard(estate, server);
    users::admit(server, user, true);
    fence::check(server, user)?;
    order::note_write(estate, (*(*result).ri_RelationDesc).rd_id);
    let before = pg_sys::MemoryContextSwitchTo((*estate).es_query_cxt);
    let write = Write::begin(result, server, user, plan, ctid)?;
    pg_sys::MemoryContextSwitchTo(before);
    Ok(write)
}

/// The modification of `result`, begun now if it had not.
///
/// # Safety
/// `result` must be a result relation of the running statement; one reference to its state at a time.
pub unsafe fn begin_modify<'a>(result: *mut pg_sys::ResultRelInfo) -> Result<&'a mut Write> {
    let modify = &mut *(*result).ri_FdwState.cast::<Modify>();
    if let Modify::Waiting { state, private } = *modify {
        let ctid = match (*state).operation {
            pg_sys::CmdType::CMD_INSERT => None,
            _ => {
                let rows = (*(*(*state).ps.lefttree).plan).targetlist;
                Some(pg_sys::ExecFindJunkAttributeInTlist(rows, c"ctid".as_ptr()))
            }
        };
        let write = begin_write((*state).ps.state, result, WritePlan::read(private), ctid)?;
        *modify = Modify::Begun(Box::new(write));
    }
    match modify {
        Modify::Begun(write) => Ok(write),
        _ => unreachable!("a modification that has ended gets no more rows"),
    }
}

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn end_foreign_modify(_estate: *mut pg_sys::EState, result: *mut pg_sys::ResultRelInfo) {
    if let Some(modify) = (*result).ri_FdwState.cast::<Modify>().as_mut() {
        *modify = Modify::Ended;
    }
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn end_foreign_insert(estate: *mut pg_sys::EState, result: *mut pg_sys::ResultRelInfo) {
    guard(|| {
        if bulk(result).is_some() {
            super::bulk::end_statement(estate)?;
        }
        Ok(())
    });
    end_foreign_modify(estate, result);
}
