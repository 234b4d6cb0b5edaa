//! Statements that read the table they write: everything is read before anything is written.
//!
//! One server gives a statement one snapshot. Here each shard is asked on its own, and a scan that starts late would see
//! what the same statement has written. So a Sort, which reads all its input first, is put below the write. Where a part
//! of the statement would still read afterwards (a data-modifying CTE, a subquery in RETURNING), it is refused: a wrong
//! answer would be silent.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::catalog::LogicalTable;
use crate::pg::error::Refusal;
use crate::pg::query::read::{Reading, Reference, Usage};
use crate::pg::query::tree::{cast, items, walk_expression};

/// Whether `query`'s write must wait for its reads. Refuses statements whose reads cannot be kept apart.
///
/// # Safety
/// `reading` must have been read from `query`.
pub unsafe fn is_needed(query: *mut pg_sys::Query, reading: &Reading) -> Result<bool, Refusal> {
    let mut needed = false;
    for target in reading.tables.iter().filter(|r| is_written(r)) {
        let table = &target.table;
        let read_elsewhere = reading.tables.iter().any(|other| {
            let same = other.query == target.query && other.rti == target.rti;
            other.table.relid == table.relid && !same
        });
        if !read_elsewhere {
            continue;
        }
        if target.query != query {
            return Err(refusal(table, "A data-modifying CTE writes the table."));
        }
        if reads_after_writing(query) {
            return Err(refusal(table, "A subquery in RETURNING would be computed after the write."));
        }
        needed = true;
    }
    Ok(needed)
}

unsafe fn is_written(reference: &Reference) -> bool {
    let is_target = (*reference.query).resultRelation as u32 == reference.rti;
    is_target || matches!(reference.usage, Usage::Insert(_) | Usage::Merge)
}

unsafe fn reads_after_writing(query: *mut pg_sys::Query) -> bool {
    let mut found = false;
    walk_expression((*query).returningList.cast(), &mut |node| {
        found |= cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink).is_some();
        !found
    });
    found
}

fn refusal(table: &LogicalTable, detail: &str) -> Refusal {
    Refusal::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("a statement cannot write table {} and read it in another place", table.name),
    )
    .detail(detail)
    .hint("Use two statements in one transaction, the first of which may fill a temporary table.")
}

/// Puts a Sort below the plan's write.
///
/// # Safety
/// `planned` must be a finished plan.
pub unsafe fn put(planned: *mut pg_sys::PlannedStmt) {
    let top = (*planned).planTree.cast::<pg_sys::Node>();
    let Some(write) = cast::<pg_sys::ModifyTable>(top, pg_sys::NodeTag::T_ModifyTable) else { return };
    let input = (*write).plan.lefttree;
    // A direct modification reads and writes in one remote statement for each shard.
    if input.is_null() || !(*write).fdwDirectModifyPlans.is_null() {
        return;
    }
    if let Some(sort) = sort_above(input) {
        (*write).plan.lefttree = sort;
    }
}

/// A Sort above `input`, by the first of its columns that can be sorted; the order itself does not matter.
unsafe fn sort_above(input: *mut pg_sys::Plan) -> Option<*mut pg_sys::Plan> {
    let columns: Vec<_> = items::<pg_sys::TargetEntry>((*input).targetlist).collect();
    let (column, operator) =
        columns.iter().find_map(|c| Some((*c, less_than(pg_sys::exprType((**c).expr.cast()))?)))?;
    let sort = pgrx::PgBox::<pg_sys::Sort>::alloc_node(pg_sys::NodeTag::T_Sort).into_pg();
    let plan = std::ptr::addr_of_mut!((*sort).plan);
    (*plan).startup_cost = (*input).total_cost;
    (*plan).total_cost = (*input).total_cost;
    (*plan).plan_rows = (*input).plan_rows;
    (*plan).plan_width = (*input).plan_width;
    (*plan).plan_node_id = NODE_ID;
    (*plan).lefttree = input;
    (*plan).extParam = pg_sys::bms_copy((*input).extParam);
    (*plan).allParam = pg_sys::bms_copy((*input).allParam);
    for column in columns {
        // As the planner does: a write looks here for the NULL constants of generated and dropped columns.
        let expr = match cast::<pg_sys::Const>((*column).expr.cast(), pg_sys::NodeTag::T_Const) {
            Some(constant) => pg_sys::copyObjectImpl(constant.cast()).cast::<pg_sys::Expr>(),
            None => pg_sys::makeVarFromTargetEntry(pg_sys::OUTER_VAR, column).cast(),
        };
        let entry = pg_sys::makeTargetEntry(expr, (*column).resno, (*column).resname, (*column).resjunk);
        (*plan).targetlist = pg_sys::lappend((*plan).targetlist, entry.cast());
    }
    (*sort).numCols = 1;
    (*sort).sortColIdx = one((*column).resno);
    (*sort).sortOperators = one(operator);
    (*sort).collations = one(pg_sys::exprCollation((*column).expr.cast()));
    (*sort).nullsFirst = one(false);
    Some(plan)
}

/// Larger than any number that the planner gives a node; used by parallel workers only, which never run this node.
const NODE_ID: i32 = 1 << 24;

unsafe fn less_than(type_oid: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let (mut operator, mut equal, mut greater) = (pg_sys::InvalidOid, pg_sys::InvalidOid, pg_sys::InvalidOid);
    let mut hashable = false;
    pg_sys::get_sort_group_operators(
        type_oid,
        false,
        false,
        false,
        &mut operator,
        &mut equal,
        &mut greater,
        &mut hashable,
    );
    (operator != pg_sys::InvalidOid).then_some(operator)
}

/// An array of one element in the current memory context.
unsafe fn one<T>(value: T) -> *mut T {
    let array = pg_sys::palloc(std::mem::size_of::<T>()).cast::<T>();
    array.write(value);
    array
}
