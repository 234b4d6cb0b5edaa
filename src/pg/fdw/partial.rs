//! Aggregates over all shards, of which each shard computes its part.
//!
//! Postgres splits an aggregate over partitions into parts that it combines; postgres_fdw sends whole aggregates only, so
//! that the parts were computed here, from all the rows. Where a part is the value of an aggregate that any Postgres has, the
//! shard computes it: postgres_fdw is shown that aggregate, and the scan's column is made the part again.
//!
//! What always holds: what stands in the plan above and in the scan's list of columns is Postgres' own part, so that both
//! match; the value which the shard sends is that part's state, in its type. Leaves to Postgres what has a state of another
//! kind (deviations), and grouping sets. Read next: `query::sums`, which has put sums for averages.

use pgrx::pg_sys;

use super::call_original;
use crate::pg::query::sums;
use crate::pg::query::tree::{cast, items};

/// Adds the path on which the shard of `input` computes its part of an aggregate.
///
/// # Safety
/// Called by the planner with what belongs to its stage UPPERREL_PARTIAL_GROUP_AGG.
pub unsafe fn add_paths(
    root: *mut pg_sys::PlannerInfo,
    input: *mut pg_sys::RelOptInfo,
    output: *mut pg_sys::RelOptInfo,
    extra: *const pg_sys::GroupPathExtraData,
) {
    let is_own = (*extra).patype == pg_sys::PartitionwiseAggregateType::PARTITIONWISE_AGGREGATE_PARTIAL;
    if !is_own || !(*output).fdw_private.is_null() {
        return;
    }
    let Some(target) = whole_target((*root).parse, (*output).reltarget) else { return };
    let mut whole = *extra;
    whole.patype = pg_sys::PartitionwiseAggregateType::PARTITIONWISE_AGGREGATE_FULL;
    whole.havingQual = std::ptr::null_mut();
    // As postgres_fdw knows it: the result of one partition, not of the statement.
    (*output).reloptkind = pg_sys::RelOptKind::RELOPT_OTHER_UPPER_REL;
    let mut stand_in = *output;
    stand_in.reltarget = target;
    stand_in.pathlist = std::ptr::null_mut();
    let stage = pg_sys::UpperRelationKind::UPPERREL_GROUP_AGG;
    let (shown, extra) = (std::ptr::addr_of_mut!(stand_in), std::ptr::addr_of_mut!(whole));
    call_original!(GetForeignUpperPaths(root, stage, input, shown, extra.cast()));
    (*output).fdw_private = stand_in.fdw_private;
    for path in items::<pg_sys::Path>(stand_in.pathlist) {
        (*path).parent = output;
        (*path).pathtarget = (*output).reltarget;
        cheapen(path, output);
        pg_sys::add_path(output, path);
    }
}

/// Makes a path the cheapest: rows that are aggregated here come over the network, which Postgres counts for next to nothing.
unsafe fn cheapen(path: *mut pg_sys::Path, output: *const pg_sys::RelOptInfo) {
    for other in items::<pg_sys::Path>((*output).pathlist) {
        (*path).total_cost = (*path).total_cost.min((*other).total_cost * 0.9);
        (*path).startup_cost = (*path).startup_cost.min((*path).total_cost).min((*other).startup_cost);
    }
}

/// `target` with whole aggregates in the place of parts; `None`: there is something else in it.
unsafe fn whole_target(
    parse: *const pg_sys::Query,
    target: *mut pg_sys::PathTarget,
) -> Option<*mut pg_sys::PathTarget> {
    if !(*parse).groupingSets.is_null() {
        return None;
    }
    let whole = pg_sys::copy_pathtarget(target);
    let (mut grouped, mut exprs) = (Vec::new(), std::ptr::null_mut());
    for (at, expr) in items::<pg_sys::Node>((*target).exprs).enumerate() {
        let number = if (*target).sortgrouprefs.is_null() { 0 } else { *(*target).sortgrouprefs.add(at) };
        let is_grouped = number != 0 && !pg_sys::get_sortgroupref_clause_noerr(number, (*parse).groupClause).is_null();
        let shown = match is_grouped {
            true => {
                grouped.push(number);
                expr
            }
            false => whole_of(expr)?,
        };
        exprs = pg_sys::lappend(exprs, shown.cast());
    }
    // Postgres 16 and later leave out groups that are the same as others; postgres_fdw looks for each.
    let all_there = items::<pg_sys::SortGroupClause>((*parse).groupClause)
        .all(|clause| grouped.contains(&(*clause).tleSortGroupRef));
    (*whole).exprs = exprs;
    (all_there && !exprs.is_null()).then_some(whole)
}

/// The expression of whole aggregates whose value is the state of `part`, an aggregate's first part.
unsafe fn whole_of(part: *mut pg_sys::Node) -> Option<*mut pg_sys::Node> {
    let part = cast::<pg_sys::Aggref>(part, pg_sys::NodeTag::T_Aggref)?;
    let plain = (*part).aggkind as u8 == b'n' && (*part).aggorder.is_null() && (*part).aggdistinct.is_null();
    if !plain || (*part).aggsplit == pg_sys::AggSplit::AGGSPLIT_SIMPLE {
        return None;
    }
    let is_numeric_sum = sums::is_numeric_sum((*part).aggfnoid);
    if !is_numeric_sum && sums::has_final_function((*part).aggfnoid) {
        return None;
    }
    let whole = pg_sys::copyObjectImpl(part.cast()).cast::<pg_sys::Aggref>();
    (*whole).aggsplit = pg_sys::AggSplit::AGGSPLIT_SIMPLE;
    (*whole).aggtype = (*whole).aggtranstype;
    if is_numeric_sum {
        sums::name_built_in(whole);
    }
    Some(whole.cast())
}

/// Makes the columns of a scan that was planned on such a path the parts that the plan above it combines.
///
/// # Safety
/// `scan` must be the plan of `path`, as postgres_fdw has made it.
pub unsafe fn name_parts(scan: *mut pg_sys::ForeignScan, path: *const pg_sys::ForeignPath) {
    let is_part = |expr: &*mut pg_sys::Node| {
        cast::<pg_sys::Aggref>(*expr, pg_sys::NodeTag::T_Aggref)
            .is_some_and(|part| (*part).aggsplit != pg_sys::AggSplit::AGGSPLIT_SIMPLE)
    };
    let parts = || items::<pg_sys::Node>((*(*path).path.pathtarget).exprs).filter(is_part);
    if (*scan).fdw_scan_tlist.is_null() || parts().next().is_none() {
        return;
    }
    (*scan).fdw_scan_tlist = pg_sys::copyObjectImpl((*scan).fdw_scan_tlist.cast()).cast();
    for column in items::<pg_sys::TargetEntry>((*scan).fdw_scan_tlist) {
        let own = |part: &*mut pg_sys::Node| {
            whole_of(*part).is_some_and(|whole| pg_sys::equal(whole.cast(), (*column).expr.cast()))
        };
        if let Some(part) = parts().find(own) {
            (*column).expr = pg_sys::copyObjectImpl(part.cast()).cast();
        }
    }
}
