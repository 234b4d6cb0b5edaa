//! The catalog of replicas: the table `shardmap.replica`.
//!
//! What always holds: it is read with the newest snapshot, and is the extension's own table, not just one of that name.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::pg::catalog::scan;

/// A registered replica.
pub struct Replica {
    /// Its name, which is its foreign server's.
    pub name: String,
    pub shard: String,
    /// Its share of its shard's reads; 0: none.
    pub weight: f64,
    /// Where it stands; empty: nowhere in particular.
    pub zone: String,
    /// An administrator has taken it out.
    pub drained: bool,
}

/// A table of the extension, if this database has it.
pub fn table(name: &CStr) -> Option<pg_sys::Oid> {
    // SAFETY: catalog look-ups, inside a transaction.
    unsafe {
        let extension = pg_sys::get_extension_oid(c"pg_shardmap".as_ptr(), true);
        let schema = pg_sys::get_namespace_oid(c"shardmap".as_ptr(), true);
        if extension == pg_sys::InvalidOid || schema == pg_sys::InvalidOid {
            return None;
        }
        let table = pg_sys::get_relname_relid(name.as_ptr(), schema);
        let is_ours =
            table != pg_sys::InvalidOid && pg_sys::getExtensionOfObject(pg_sys::RelationRelationId, table) == extension;
        is_ours.then_some(table)
    }
}

/// All replicas, in the order of their names.
pub fn all() -> Vec<Replica> {
    let mut replicas = Vec::new();
    if let Some(table) = table(c"replica") {
        scan::rows(table, |row| {
            replicas.extend(row.text("name").zip(row.text("shard")).map(|(name, shard)| Replica {
                name,
                shard,
                weight: row.get("weight").unwrap_or(0.0),
                zone: row.text("zone").unwrap_or_default(),
                drained: row.get("drained").unwrap_or(false),
            }));
        });
    }
    replicas.sort_by(|a, b| a.name.cmp(&b.name));
    replicas
}

/// Names of further coordinators: the table `shardmap.coordinator`.
pub fn coordinators() -> Vec<String> {
    let mut names = Vec::new();
    if let Some(table) = table(c"coordinator") {
        scan::rows(table, |row| names.extend(row.text("name")));
    }
    names
}

/// The shard whose replica this server is.
pub fn shard_of(server: &str) -> Option<String> {
    all().into_iter().find(|replica| replica.name == server).map(|replica| replica.shard)
}
