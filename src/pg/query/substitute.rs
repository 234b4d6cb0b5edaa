//! The query tree rewritten: one shard's foreign table in place of a logical table.
//!
//! What always holds: permissions stay those of the logical table (its entry is kept, outside the join tree, with the
//! privileges to check), and so do lock and plan invalidation. Refuses, by leaving the table as it is: a foreign table
//! whose columns differ, a whole-row reference (its row type would differ), triggers on the table that is written.

use pgrx::pg_sys;
use shardmap_core::route::Spread;

use super::read::Reference;
use super::tree::{cast, rte, subqueries, walk_level};

/// Puts foreign table `child` in the place of the logical table, or says why it cannot.
///
/// # Safety
/// `reference` must have been read from a query that has not been changed since, except by this function.
pub unsafe fn substitute(reference: &Reference, child: pg_sys::Oid) -> Result<(), Spread> {
    let query = reference.query;
    let Some(entry) = rte(query, reference.rti) else { return Err(Spread::Layout) };
    let is_target = (*query).resultRelation as u32 == reference.rti;
    if !(*entry).tablesample.is_null() {
        return Err(Spread::Sample);
    }
    if has_whole_row(reference) {
        return Err(Spread::WholeRow);
    }
    pg_sys::LockRelationOid(child, (*entry).rellockmode);
    same_layout((*entry).relid, child, is_target)?;
    let kept = pg_sys::copyObjectImpl(entry.cast()).cast::<pg_sys::RangeTblEntry>();
    (*kept).securityQuals = std::ptr::null_mut();
    (*query).rtable = pg_sys::lappend((*query).rtable, kept.cast());
    (*entry).relid = child;
    (*entry).relkind = pg_sys::RELKIND_FOREIGN_TABLE as _;
    // An INSERT's target has inh unset anyway.
    (*entry).inh = false;
    waive_privileges(query, entry, child);
    Ok(())
}

/// Makes `entry` ask for no privileges of its own: those of the logical table are checked through the kept entry.
#[cfg(not(feature = "pg15"))]
unsafe fn waive_privileges(query: *mut pg_sys::Query, entry: *mut pg_sys::RangeTblEntry, child: pg_sys::Oid) {
    let Some(own) =
        super::tree::nth::<pg_sys::RTEPermissionInfo>((*query).rteperminfos, (*entry).perminfoindex as usize - 1)
    else {
        return;
    };
    // Columns and checkAsUser stay: the executor asks them of the table that it writes, postgres_fdw for whom to log in.
    let waived = pg_sys::copyObjectImpl(own.cast()).cast::<pg_sys::RTEPermissionInfo>();
    (*waived).relid = child;
    (*waived).inh = false;
    (*waived).requiredPerms = 0;
    (*query).rteperminfos = pg_sys::lappend((*query).rteperminfos, waived.cast());
    (*entry).perminfoindex = (*(*query).rteperminfos).length as _;
}

#[cfg(feature = "pg15")]
unsafe fn waive_privileges(_query: *mut pg_sys::Query, entry: *mut pg_sys::RangeTblEntry, _child: pg_sys::Oid) {
    (*entry).requiredPerms = 0;
}

/// ON CONFLICT DO NOTHING without a conflict target: what postgres_fdw can send.
pub unsafe fn is_plain_do_nothing(clause: *const pg_sys::OnConflictExpr) -> bool {
    (*clause).action == pg_sys::OnConflictAction::ONCONFLICT_NOTHING
        && (*clause).arbiterElems.is_null()
        && (*clause).constraint == pg_sys::InvalidOid
}

/// Whether the statement reads the table's rows as values of its row type, at any level.
unsafe fn has_whole_row(reference: &Reference) -> bool {
    let mut found = false;
    find_whole_row(reference.query, reference.rti, 0, &mut found);
    found
}

unsafe fn find_whole_row(query: *mut pg_sys::Query, rti: u32, depth: u32, found: &mut bool) {
    walk_level(query, &mut |node| {
        if let Some(var) = cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var) {
            *found |= (*var).varno as u32 == rti && (*var).varlevelsup == depth && (*var).varattno == 0;
        }
        true
    });
    for inner in subqueries(query) {
        if !*found {
            find_whole_row(inner, rti, depth + 1, found);
        }
    }
}

/// Makes casts to char(n) that Postgres put in itself explicit, at every level: postgres_fdw looks through an implicit one
/// and leaves the type off the constant beside it, which the shard then compares as text, trailing blanks and all.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn spell_out_bpchar(query: *mut pg_sys::Query) {
    walk_level(query, &mut |node| {
        if let Some(relabel) = cast::<pg_sys::RelabelType>(node, pg_sys::NodeTag::T_RelabelType) {
            if (*relabel).resulttype == pg_sys::BPCHAROID {
                (*relabel).relabelformat = pg_sys::CoercionForm::COERCE_EXPLICIT_CAST;
            }
        }
        true
    });
    subqueries(query).into_iter().for_each(|inner| spell_out_bpchar(inner));
}

/// Takes WITH TIES off queries that yield one row, at every level: for `min` and `max` over an order that postgres_fdw
/// offers, the planner makes a subquery of LIMIT 1, which takes over the ties and then yields more than one row.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn drop_idle_ties(query: *mut pg_sys::Query) {
    let yields_one = (*query).limitOption == pg_sys::LimitOption::LIMIT_OPTION_WITH_TIES
        && (*query).hasAggs
        && (*query).groupClause.is_null()
        && (*query).groupingSets.is_null()
        && !(*query).hasTargetSRFs;
    if yields_one {
        (*query).limitOption = pg_sys::LimitOption::LIMIT_OPTION_COUNT;
    }
    subqueries(query).into_iter().for_each(|inner| drop_idle_ties(inner));
}

/// Refuses tables that differ in a column, and (for a target) a logical table on which something hangs.
unsafe fn same_layout(parent: pg_sys::Oid, child: pg_sys::Oid, is_target: bool) -> Result<(), Spread> {
    let parent = pg_sys::table_open(parent, pg_sys::NoLock as _);
    let child = pg_sys::table_open(child, pg_sys::NoLock as _);
    let (a, b) = ((*parent).rd_att, (*child).rd_att);
    let same = (*a).natts == (*b).natts
        && (0..(*a).natts as usize).all(|at| {
            let (a, b) = (crate::pg::raw::attribute(a, at), crate::pg::raw::attribute(b, at));
            a.attisdropped == b.attisdropped
                && (a.attisdropped
                    || (a.attname.data == b.attname.data
                        && a.atttypid == b.atttypid
                        && a.atttypmod == b.atttypmod
                        && a.attcollation == b.attcollation
                        && a.attgenerated == b.attgenerated))
        });
    let triggers = is_target && !(*parent).trigdesc.is_null();
    pg_sys::table_close(child, pg_sys::NoLock as _);
    pg_sys::table_close(parent, pg_sys::NoLock as _);
    match (same, triggers) {
        (true, false) => Ok(()),
        (true, true) => Err(Spread::Triggers),
        (false, _) => Err(Spread::Layout),
    }
}
