//! The ownership filter: a shard shows the rows that it owns, and no others, while a move has them on two shards.
//!
//! What is hidden stands in `shardmap.hidden_rows`, by logical table and shard. Every scan of the shard's foreign table,
//! for whatever statement, gets a condition that leaves those rows out; it is made of built-in operators, so that it is
//! sent to the shard with all that is. It stands at the lowest level of security, as a policy does, and does not count
//! in the planner's estimates. TRUNCATE has no conditions: it is refused. Read next: `sql/moves_steps.sql`.

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::scan::partition;
use crate::pg::catalog::Partition;
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::raw::name_list;

/// Adds the conditions to a scan of foreign table `relid`.
///
/// # Safety
/// Called by the planner, before the relation's conditions are looked at.
pub unsafe fn hide_foreign_rows(root: *mut pg_sys::PlannerInfo, rel: *mut pg_sys::RelOptInfo, relid: pg_sys::Oid) {
    let Some(partition) = partition(relid).filter(|partition| !partition.hidden.is_empty()) else { return };
    for key in partition.hidden.iter() {
        let clause = differs((*rel).relid as i32, relid, &partition, key);
        let info = restriction(root, rel, clause);
        (*info).norm_selec = 1.0;
        (*info).outer_selec = 1.0;
        (*rel).baserestrictinfo = pg_sys::lappend((*rel).baserestrictinfo, info.cast());
    }
    (*rel).baserestrict_min_security = 0;
}

/// `key_column <> key`.
unsafe fn differs(rti: i32, relid: pg_sys::Oid, partition: &Partition, key: &str) -> *mut pg_sys::Expr {
    let (mut kind, mut typmod, mut collation) = (pg_sys::InvalidOid, -1, pg_sys::InvalidOid);
    pg_sys::get_atttypetypmodcoll(relid, partition.key, &mut kind, &mut typmod, &mut collation);
    let column = pg_sys::makeVar(rti, partition.key, kind, typmod, collation, 0);
    let base = pg_sys::getBaseType(kind);
    let (mut input, mut parameter) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
    pg_sys::getTypeInputInfo(base, &mut input, &mut parameter);
    let value = pg_sys::OidInputFunctionCall(input, encoding::server_string(key).as_ptr().cast_mut(), parameter, -1);
    let (mut length, mut by_value) = (0, false);
    pg_sys::get_typlenbyval(base, &mut length, &mut by_value);
    let constant = pg_sys::makeConst(base, -1, collation, i32::from(length), value, false, by_value);
    let operator = name_list(c"pg_catalog", c"<>");
    let parse = pg_sys::make_parsestate(std::ptr::null_mut());
    let clause = pg_sys::make_op(parse, operator, column.cast(), constant.cast(), std::ptr::null_mut(), -1);
    pg_sys::assign_expr_collations(parse, clause.cast());
    pg_sys::free_parsestate(parse);
    clause
}

/// A condition of the relation alone, at the lowest level of security.
unsafe fn restriction(
    root: *mut pg_sys::PlannerInfo,
    rel: *mut pg_sys::RelOptInfo,
    clause: *mut pg_sys::Expr,
) -> *mut pg_sys::RestrictInfo {
    let (relids, none) = ((*rel).relids, std::ptr::null_mut());
    #[cfg(feature = "pg15")]
    return pg_sys::make_restrictinfo(root, clause, true, false, false, 0, relids, none, none);
    #[cfg(not(feature = "pg15"))]
    return pg_sys::make_restrictinfo(root, clause, true, false, false, false, 0, relids, none, none);
}

/// Refuses to truncate foreign tables of which some rows are hidden.
pub fn check_truncate(relids: impl Iterator<Item = pg_sys::Oid>) {
    if let Some(partition) = relids.filter_map(partition).find(|partition| partition.table.is_moving) {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("cannot truncate table {} while rows of it are moved", partition.table.name),
        )
        .hint("Use DELETE, or wait for the moves in shardmap.moves to end.")
        .raise()
    }
}
