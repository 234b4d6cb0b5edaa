//! The coordinator's record of transactions that commit in two phases: the table `shardmap.transactions`.
//!
//! What always holds: a record becomes visible by the commit of the very transaction that it is about, and by nothing
//! else; it is read with the newest snapshot. It is written without a look at the user's privileges, who may not write
//! there himself.

use pgrx::prelude::*;
use pgrx::{pg_sys, IntoDatum, PgSqlErrorCode};
use shardmap_core::two_phase::TransactionId;

use super::failure::{Failure, Result};
use crate::pg::catalog::scan;

const DELETE: &str = "DELETE FROM shardmap.transactions WHERE id OPERATOR(pg_catalog.=) ANY ($1)";

/// A transaction that has committed, and whose parts may not all be.
pub struct Record {
    pub id: String,
    /// The foreign servers of its parts.
    pub servers: Vec<pg_sys::Oid>,
}

/// The table, if this database has the extension, in a version that has the table.
pub fn table() -> Option<pg_sys::Oid> {
    // SAFETY: catalog look-ups, inside a transaction. A name proves nothing: the table must be the extension's own.
    unsafe {
        let extension = pg_sys::get_extension_oid(c"pg_shardmap".as_ptr(), true);
        let schema = pg_sys::get_namespace_oid(c"shardmap".as_ptr(), true);
        if extension == pg_sys::InvalidOid || schema == pg_sys::InvalidOid {
            return None;
        }
        let table = pg_sys::get_relname_relid(c"transactions".as_ptr(), schema);
        let is_ours =
            table != pg_sys::InvalidOid && pg_sys::getExtensionOfObject(pg_sys::RelationRelationId, table) == extension;
        is_ours.then_some(table)
    }
}

/// Writes the record of the current transaction. Also right before its commit, where there is no snapshot.
pub fn write(id: &TransactionId, servers: Vec<pg_sys::Oid>) -> Result<()> {
    let table = table().ok_or_else(|| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            "cannot commit on several shards without the table shardmap.transactions",
        )
        .hint("Install the extension, or update it: ALTER EXTENSION pg_shardmap UPDATE.")
    })?;
    // SAFETY: the values are those of the table's columns, in their order: text, xid8, oid[], timestamptz.
    unsafe {
        let relation = pg_sys::table_open(table, pg_sys::RowExclusiveLock as _);
        let mut values = [
            id.to_string().into_datum().unwrap_or(pg_sys::Datum::from(0)),
            pg_sys::Datum::from(id.transaction),
            servers.into_datum().unwrap_or(pg_sys::Datum::from(0)),
            pg_sys::Datum::from(pg_sys::GetCurrentTimestamp()),
        ];
        let mut nulls = [false; 4];
        if (*(*relation).rd_att).natts != 4 {
            error!("table shardmap.transactions has {} columns, not 4", (*(*relation).rd_att).natts);
        }
        let tuple = pg_sys::heap_form_tuple((*relation).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::CatalogTupleInsert(relation, tuple);
        pg_sys::table_close(relation, pg_sys::NoLock as _);
    }
    Ok(())
}

/// All records whose transactions have committed by now.
pub fn all() -> Vec<Record> {
    let mut records = Vec::new();
    if let Some(table) = table() {
        scan::rows(table, |row| {
            // NULL: the server of a shard that this very transaction has dropped. Nobody can be asked for its part any more.
            let servers = row.get::<Vec<Option<pg_sys::Oid>>>("servers").unwrap_or_default();
            let servers = servers.into_iter().flatten().collect();
            records.extend(row.text("id").map(|id| Record { id, servers }));
        });
    }
    records
}

/// Deletes records. Inside a transaction, with or without a snapshot.
pub fn forget(ids: Vec<String>) {
    // SAFETY: the snapshot is popped as it was pushed; an error in between is the transaction's abort.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        if let Err(error) = Spi::run_with_args(DELETE, &[ids.into()]) {
            error!("could not delete from shardmap.transactions: {error}");
        }
        pg_sys::PopActiveSnapshot();
    }
}
