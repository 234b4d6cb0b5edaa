//! Whose key it is, by a keyspace's map; and the refusals of a map that is not there.
//!
//! Everything that asks for an owner comes through here: routing, tuple routing, partition pruning, SQL functions.

use std::rc::Rc;

use pgrx::prelude::*;
use shardmap_core::error::RouteError;
use shardmap_core::ids::ShardNumber;

use super::{Catalog, Keyspace};
use crate::pg::error::{sqlstate, Refusal};

impl From<RouteError> for Refusal {
    fn from(error: RouteError) -> Self {
        Self::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint())
    }
}

impl Keyspace {
    /// The shard that owns `canonical`; raises the core's refusal if none does.
    pub fn owner(&self, canonical: &[u8]) -> ShardNumber {
        let (key, owner) = &mut *self.last.borrow_mut();
        if let Some(owner) = owner.filter(|_| key == canonical) {
            return owner;
        }
        let found = self.map.owner(canonical).unwrap_or_else(|error| Refusal::from(error).raise());
        key.clear();
        key.extend_from_slice(canonical);
        *owner = Some(found);
        found
    }

    /// The shard on which rows with the key `canonical` are to be found; `None` if no row can have that key, which is
    /// no error for a reader: a fraction compared with keys that are integers.
    pub fn holder(&self, canonical: &[u8]) -> Option<ShardNumber> {
        match self.map.owner(canonical) {
            Err(RouteError::NotAnInteger { .. }) => None,
            Err(error) => Refusal::from(error).raise(),
            Ok(shard) => Some(shard),
        }
    }
}

/// Refuses what needs the extension in a database without it.
pub fn no_extension() -> ! {
    Refusal::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "extension \"pg_shardmap\" is not installed in this database",
    )
    .hint("CREATE EXTENSION pg_shardmap CASCADE.")
    .raise()
}

/// The keyspace of that name, or an error that says which there are.
pub fn keyspace(catalog: &Catalog, name: &str) -> Rc<Keyspace> {
    catalog.keyspaces.get(name).cloned().unwrap_or_else(|| {
        let mut names: Vec<_> = catalog.keyspaces.keys().map(|n| format!("\"{n}\"")).collect();
        names.sort_unstable();
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("keyspace \"{name}\" does not exist"))
            .detail(format!("Keyspaces of this database: {}.", names.join(", ")))
            .hint("Create it with shardmap.create_keyspace().")
            .raise()
    })
}
