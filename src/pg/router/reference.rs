//! Reference tables in a statement that goes whole to one shard: it reads the shard's copy of them.
//!
//! Refuses, for a lower step: a table without copies on the keyspace's shards, locks on its rows (all sessions must meet
//! at the same row, which is the one here), and one that is used as another user than the logical tables are.

use pgrx::pg_sys;

use super::whole::{user_of, Obstacle, OTHER_TABLES, USERS};
use crate::pg::catalog::{Catalog, ReferenceTable};
use crate::pg::query::tree::{items, rte, subqueries};

const LOCKS: Obstacle = "It locks rows of a reference table, which are locked here.";

/// The reference table behind `entry`, if the shards of `keyspace` have copies of it.
///
/// # Safety
/// `entry` must be valid.
pub unsafe fn copied<'a>(
    catalog: &'a Catalog,
    entry: *const pg_sys::RangeTblEntry,
    keyspace: &str,
) -> Option<&'a ReferenceTable> {
    let table = catalog.reference((*entry).relid)?;
    ((*entry).rtekind == pg_sys::RTEKind::RTE_RELATION && table.keyspaces.iter().any(|own| own == keyspace))
        .then_some(&**table)
}

/// Checks how the statement uses reference tables, `user` being who uses the others.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn check(catalog: &Catalog, query: *mut pg_sys::Query, user: pg_sys::Oid) -> Result<(), Obstacle> {
    if catalog.references.is_empty() {
        return Ok(());
    }
    for (entry, at) in items::<pg_sys::RangeTblEntry>((*query).rtable).zip(1..) {
        let is_table = (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION;
        if is_table && catalog.reference((*entry).relid).is_some() && user_of(query, at) != user {
            return Err(USERS);
        }
    }
    for mark in items::<pg_sys::RowMarkClause>((*query).rowMarks) {
        let entry = rte(query, (*mark).rti).ok_or(OTHER_TABLES)?;
        if catalog.reference((*entry).relid).is_some() {
            return Err(LOCKS);
        }
    }
    subqueries(query).into_iter().try_for_each(|inner| check(catalog, inner, user))
}
