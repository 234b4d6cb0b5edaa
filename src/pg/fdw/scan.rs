//! Foreign scans planned and explained: the note goes into the plan and is shown by EXPLAIN. Read next: [`super::lazy`].

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::route::Step;

use super::rows::reads_only;
use super::{call_original, note, owned, partial, security};
use crate::pg::error::Refusal;
use crate::pg::query::tree::{items, tag, walk_expression};
use crate::pg::raw::explain_text;
use crate::pg::reads::explain::server_or_raise;
use crate::pg::{catalog, flag};

/// Refuses a logical table in a statement that was planned without our hook: the library was loaded in the middle of it.
/// Neither policy nor the order of reads and writes would be kept.
///
/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn get_foreign_rel_size(
    root: *mut pg_sys::PlannerInfo,
    baserel: *mut pg_sys::RelOptInfo,
    relid: pg_sys::Oid,
) {
    let is_partition = (*baserel).reloptkind == pg_sys::RelOptKind::RELOPT_OTHER_MEMBER_REL;
    if is_partition && !note::is_planning() && partition(relid).is_some() {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "pg_shardmap was loaded in the middle of this statement",
        )
        .hint("Run it again; and add pg_shardmap to shared_preload_libraries or session_preload_libraries.")
        .raise()
    }
    security::keep_leaky_conditions(baserel);
    owned::hide_foreign_rows(root, baserel, relid);
    call_original!(GetForeignRelSize(root, baserel, relid));
}

/// Keeps some aggregates here. One whose results nobody reads, postgres_fdw would send without the aggregate, and get as
/// many rows as there are instead of one; one with GROUPING() in it, it would leave for a node that cannot compute it; one
/// with a column in GROUP BY that its results lack, it would fail to write.
///
/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn get_foreign_upper_paths(
    root: *mut pg_sys::PlannerInfo,
    stage: pg_sys::UpperRelationKind::Type,
    input: *mut pg_sys::RelOptInfo,
    output: *mut pg_sys::RelOptInfo,
    extra: *mut std::ffi::c_void,
) {
    if stage == pg_sys::UpperRelationKind::UPPERREL_PARTIAL_GROUP_AGG {
        return partial::add_paths(root, input, output, extra.cast());
    }
    let parse = (*root).parse;
    let is_lost = (*parse).groupClause.is_null()
        && (*parse).groupingSets.is_null()
        && !pg_sys::contain_agg_clause((*(*output).reltarget).exprs.cast())
        && !pg_sys::contain_agg_clause((*parse).havingQual);
    let mut has_grouping = false;
    for part in [(*(*output).reltarget).exprs.cast(), (*parse).havingQual] {
        walk_expression(part, &mut |node| {
            has_grouping |= tag(node) == pg_sys::NodeTag::T_GroupingFunc;
            !has_grouping
        });
    }
    let is_grouping = stage == pg_sys::UpperRelationKind::UPPERREL_GROUP_AGG;
    if !is_grouping || !(is_lost || has_grouping || lacks_group(parse, (*output).reltarget)) {
        call_original!(GetForeignUpperPaths(root, stage, input, output, extra));
    }
}

/// Whether GROUP BY names an expression that `target` does not mark as such. From 16 on, Postgres marks none below a window
/// function that can have one value only, as a key that is compared with a constant.
///
/// # Safety
/// Both must be valid.
unsafe fn lacks_group(parse: *const pg_sys::Query, target: *const pg_sys::PathTarget) -> bool {
    let marked = match (*target).sortgrouprefs.is_null() {
        true => &[],
        // SAFETY: as many as there are expressions.
        false => std::slice::from_raw_parts((*target).sortgrouprefs, pg_sys::list_length((*target).exprs) as usize),
    };
    items::<pg_sys::SortGroupClause>((*parse).groupClause).any(|group| !marked.contains(&(*group).tleSortGroupRef))
}

/// Keeps semi joins here, which postgres_fdw sends from 17 on: a condition that cannot be sent then asks for columns that
/// the remote join does not yield, and the statement fails.
///
/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn get_foreign_join_paths(
    root: *mut pg_sys::PlannerInfo,
    joined: *mut pg_sys::RelOptInfo,
    outer: *mut pg_sys::RelOptInfo,
    inner: *mut pg_sys::RelOptInfo,
    kind: pg_sys::JoinType::Type,
    extra: *mut pg_sys::JoinPathExtraData,
) {
    // Under row security a join's conditions must not see rows before the policies do.
    if kind != pg_sys::JoinType::JOIN_SEMI && (*root).qual_security_level == 0 {
        call_original!(GetForeignJoinPaths(root, joined, outer, inner, kind, extra));
    }
}

/// Whether a scan may run beside others. Not if a subquery stands in its conditions or results: Postgres keeps one state
/// of a hashed subquery for all partitions' scans, and refreshes it for the first one only when they run side by side. Nor
/// where subqueries nest: one that runs anew in the middle of a rescan ends requests that were meant for the last round.
///
/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn is_foreign_path_async_capable(path: *mut pg_sys::ForeignPath) -> bool {
    let rel = (*path).path.parent;
    let has_subplan = |clauses: *const pg_sys::List| {
        items::<pg_sys::RestrictInfo>(clauses).any(|info| pg_sys::contain_subplans((*info).clause.cast()))
    };
    let outer = (*path).path.param_info;
    let unsafe_to_share = has_subplan((*rel).baserestrictinfo)
        || (!outer.is_null() && has_subplan((*outer).ppi_clauses))
        || pg_sys::contain_subplans((*(*path).path.pathtarget).exprs.cast());
    note::side_by_side() && !unsafe_to_share && call_original!(IsForeignPathAsyncCapable(path))
}

/// # Safety
/// Called by the planner.
#[pg_guard]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C-unwind" fn get_foreign_plan(
    root: *mut pg_sys::PlannerInfo,
    baserel: *mut pg_sys::RelOptInfo,
    relid: pg_sys::Oid,
    path: *mut pg_sys::ForeignPath,
    tlist: *mut pg_sys::List,
    clauses: *mut pg_sys::List,
    outer: *mut pg_sys::Plan,
) -> *mut pg_sys::ForeignScan {
    let scan = call_original!(GetForeignPlan(root, baserel, relid, path, tlist, clauses, outer));
    partial::name_parts(scan, path);
    let entry = match (*baserel).relid {
        0 => std::ptr::null_mut(),
        rti => *(*root).simple_rte_array.add(rti as usize),
    };
    (*scan).fdw_private = note::append((*scan).fdw_private, entry);
    scan
}

/// # Safety
/// Called by EXPLAIN.
#[pg_guard]
pub unsafe extern "C-unwind" fn explain_foreign_scan(
    node: *mut pg_sys::ForeignScanState,
    es: *mut pg_sys::ExplainState,
) {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    // postgres_fdw tells a join by the length of its private list: show it the list without our note.
    let mut bare = *plan;
    bare.fdw_private = note::without((*plan).fdw_private);
    (*node).ss.ps.plan = std::ptr::addr_of_mut!(bare).cast();
    call_original!(ExplainForeignScan(node, es));
    (*node).ss.ps.plan = plan.cast();
    let used = match (*node).fdw_state.cast::<super::lazy::Node>().as_ref() {
        Some(super::lazy::Node::Scan(scan)) => Some(scan.reader()),
        _ => None,
    };
    explain((*plan).fdw_private, shard_of(plan), (*node).ss.ps.state, es);
    server_or_raise((*plan).fs_server, used, reads_only(plan), es);
    explain_traffic(node, es);
}

/// Adds to EXPLAIN ANALYZE what a node has cost on the way to its shard, if that was asked.
///
/// # Safety
/// Called inside EXPLAIN of the node.
pub unsafe fn explain_traffic(node: *mut pg_sys::ForeignScanState, es: *mut pg_sys::ExplainState) {
    let traffic = match (*node).fdw_state.cast::<super::lazy::Node>().as_ref() {
        Some(super::lazy::Node::Scan(scan)) => scan.traffic(),
        Some(super::lazy::Node::Direct(direct)) => direct.traffic(),
        _ => return,
    };
    if (*es).analyze {
        traffic.explain(es);
    }
}

/// Adds the shard, and once a statement the step and the reason, to EXPLAIN's output.
///
/// # Safety
/// Called inside EXPLAIN of the node that `private` belongs to.
pub unsafe fn explain(
    private: *const pg_sys::List,
    server: Option<String>,
    estate: *mut pg_sys::EState,
    es: *mut pg_sys::ExplainState,
) {
    let property = |label: &std::ffi::CStr, value: &str| explain_text(es, label, value.as_bytes());
    if let Some(server) = server {
        property(c"Shard", &server);
    }
    let Some(note) = note::read(private) else { return };
    if !flag::first_explained(estate) {
        return;
    }
    property(c"Routing", note.step.describe());
    match note.step {
        Step::Substituted if (*es).verbose => property(c"Not Routed Because", &note.reason),
        Step::FanOut => property(c"Not Narrowed Because", &note.reason),
        Step::Narrowed if (*es).verbose => property(c"Not One Shard Because", &note.reason),
        _ => {}
    }
}

/// The name of the server a scan goes to.
unsafe fn shard_of(plan: *mut pg_sys::ForeignScan) -> Option<String> {
    server_name((*plan).fs_server)
}

/// The name of foreign server `server`, which is the name of a shard.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn server_name(server: pg_sys::Oid) -> Option<String> {
    if server == pg_sys::InvalidOid {
        return None;
    }
    let name = std::ffi::CStr::from_ptr((*pg_sys::GetForeignServer(server)).servername);
    Some(name.to_string_lossy().into_owned())
}

/// The partition behind foreign table `relid`, if it is one of ours.
pub fn partition(relid: pg_sys::Oid) -> Option<catalog::Partition> {
    catalog::current()?.partitions.get(&relid).cloned()
}
