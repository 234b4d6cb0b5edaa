//! One map for a transaction that has one snapshot.
//!
//! Under REPEATABLE READ and above, a shard's rows are seen as they were when the transaction first used it. When a key has
//! moved since, the shard that it moved to would be asked in a snapshot that may lack its rows, or has newer ones than were
//! read before: rows would be missing, or an update lost, in silence. So a transaction that has used a keyspace goes
//! on only while its map is the same; else it is one that could not be serialized.

use std::cell::RefCell;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::catalog;
use crate::pg::error::Refusal;

thread_local! {
    /// The keyspaces that the transaction has used, with the versions of their maps.
    static MAPS: RefCell<Vec<(String, u64)>> = const { RefCell::new(Vec::new()) };
}

/// Admits the transaction to `server`, a shard's.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn admit(server: pg_sys::Oid) {
    if (pg_sys::XactIsoLevel as u32) < pg_sys::XACT_REPEATABLE_READ {
        return;
    }
    let Some(catalog) = catalog::current() else { return };
    let Some((keyspace, _)) = catalog.servers.get(&server) else { return };
    let version = keyspace.map.version();
    let is_another = MAPS.with_borrow_mut(|maps| match maps.iter().find(|(name, _)| *name == keyspace.name) {
        Some((_, own)) => *own != version,
        None => {
            maps.push((keyspace.name.clone(), version));
            false
        }
    });
    if is_another {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
            format!("could not serialize access due to a change of the map of keyspace \"{}\"", keyspace.name),
        )
        .detail("Keys have another shard than when the transaction read first, and its snapshot there is another.")
        .hint("Repeat the transaction.")
        .raise()
    }
}

/// At the end of the transaction.
pub fn forget() {
    MAPS.with_borrow_mut(Vec::clear);
}
