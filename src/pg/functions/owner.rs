//! SQL functions that say who owns a key, and the hash functions by which Postgres' partitioning follows the map.
//!
//! What always holds: a key's owner here, in partition pruning and in tuple routing is the same, for all go through
//! [`Keyspace::owner`]. Read next: `sql/routing.sql` for the SQL side, `catalog` for the cache.

use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::ids::Token;

use super::call::{c_function, text, Arguments};
use super::key_column::key_type;
use crate::pg::catalog::{self, Keyspace};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::keys::{KeyType, Varlena};

/// What Postgres adds to a partition key's only hash value before it takes the remainder (`hash_combine64` with the
/// seed of an empty row); the same in every version.
const HASH_COMBINE: u64 = 0x49a0_f4dd_15e5_a8e3;

impl Arguments {
    /// Calls `then` with the keyspace named by argument 1 and the canonical text of argument 0, whose type is
    /// `known` or else the one the call was made with. NULL in either gives NULL.
    ///
    /// # Safety
    /// Called from a function declared with (key, keyspace text).
    unsafe fn routed(
        &self,
        known: Option<KeyType>,
        then: impl FnOnce(&Keyspace, &[u8]) -> pg_sys::Datum,
    ) -> pg_sys::Datum {
        let (Some(key), Some(name)) = (self.get(0), self.get(1)) else { return self.null() };
        let catalog = catalog::current().unwrap_or_else(|| catalog::no_extension());
        let name = Varlena::of(name);
        let name = encoding::utf8(name.bytes());
        let found = match catalog.keyspaces.get(&*name) {
            Some(found) => Rc::clone(found),
            None => catalog::keyspace(&catalog, &name),
        };
        let key_type = known.unwrap_or_else(|| key_type(self.type_of(0)));
        key_type.with_canonical(key, |canonical| then(&found, canonical))
    }

    /// # Safety
    /// Called from a function declared with (key).
    unsafe fn token(&self, known: Option<KeyType>) -> pg_sys::Datum {
        let Some(key) = self.get(0) else { return self.null() };
        let key_type = known.unwrap_or_else(|| key_type(self.type_of(0)));
        key_type.with_canonical(key, |canonical| pg_sys::Datum::from(i64::from(Token::of(canonical).0)))
    }
}

unsafe fn name_of_owner(keyspace: &Keyspace, canonical: &[u8]) -> pg_sys::Datum {
    let number = keyspace.owner(canonical);
    match keyspace.map.shard(number) {
        Some(shard) => text(shard.name.as_str().as_bytes()),
        None => text(keyspace.shard_name(number).as_bytes()),
    }
}

c_function! {
    /// `shard_for(key text, keyspace text)`: the name of the shard that owns `key`.
    shardmap_shard_for_text, pg_finfo_shardmap_shard_for_text,
    |args| args.routed(Some(KeyType::TEXT), |keyspace, canonical| name_of_owner(keyspace, canonical))
}

c_function! {
    /// `shard_for(key anyelement, keyspace text)`.
    shardmap_shard_for_any, pg_finfo_shardmap_shard_for_any,
    |args| args.routed(None, |keyspace, canonical| name_of_owner(keyspace, canonical))
}

c_function! {
    /// `token_for(key text)`: the key's position on the ring, 0 to 2^32 - 1.
    shardmap_token_for_text, pg_finfo_shardmap_token_for_text,
    |args| args.token(Some(KeyType::TEXT))
}

c_function! {
    /// `token_for(key anyelement)`.
    shardmap_token_for_any, pg_finfo_shardmap_token_for_any,
    |args| args.token(None)
}

c_function! {
    /// `shardmap.canonical_key(key anyelement)`: the text that is hashed.
    shardmap_canonical_key, pg_finfo_shardmap_canonical_key,
    |args| {
        let Some(key) = args.get(0) else { return args.null() };
        key_type(args.type_of(0)).with_canonical(key, |canonical| text(canonical))
    }
}

c_function! {
    /// The extended hash function of every key class: from its result Postgres computes exactly the number of the
    /// shard that owns the key, as the remainder modulo 1024. It finds keyspace and type by the OID it was called as.
    shardmap_partition_hash, pg_finfo_shardmap_partition_hash,
    |args| {
        let Some(key) = args.get(0) else { return args.null() };
        let function = (*(*args.0).flinfo).fn_oid;
        let catalog = catalog::current().unwrap_or_else(|| catalog::no_extension());
        let Some((keyspace, key_type)) = catalog.hashes.get(&function) else {
            Refusal::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("function with OID {function} is not a registered key hash function"),
            )
            .hint("Key classes are made by shardmap.distribute_table(); do not create or rename them by hand.")
            .raise()
        };
        let number = key_type.with_canonical(key, |canonical| keyspace.owner(canonical));
        pg_sys::Datum::from(u64::from(number.0).wrapping_sub(HASH_COMBINE))
    }
}
