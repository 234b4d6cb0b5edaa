//! Which columns can be shard keys, and how a shard itself computes a key's text.
//!
//! Refuses types and collations that do not promise one text for equal values. Read next: `keys` for the types.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::keys::KeyType;

/// The key type of `oid`, or the refusal of a type that cannot be a key.
pub fn key_type(oid: pg_sys::Oid) -> KeyType {
    KeyType::of(oid).unwrap_or_else(|| {
        // SAFETY: format_type_be returns a palloc'd string for any OID.
        let name = unsafe { encoding::utf8_string(pg_sys::format_type_be(oid)) };
        Refusal::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("type {name} cannot be a shard key"))
            .detail("Equal values of the type may have different texts, or the type is not known to the shards.")
            .hint("Use an integer, text, varchar, char, uuid, numeric, date, timestamp, timestamptz or bytea column.")
            .raise()
    })
}

/// SQL, of built-in functions only, that computes the canonical text of `column_sql` on a shard.
#[pg_extern(sql = false)]
fn key_sql(key_type_oid: pg_sys::Oid, column_sql: &[u8]) -> Vec<u8> {
    encoding::server(&key_type(key_type_oid).kind.sql(&encoding::utf8(column_sql))).into_owned()
}

/// Refuses a column that cannot be a shard key: its type or its collation does not promise one text for equal values.
#[pg_extern(sql = false)]
fn check_key_column(relation: pg_sys::Oid, column: &[u8]) {
    let column = encoding::utf8(column);
    let name = encoding::server_string(&column);
    // SAFETY: system cache look-ups.
    let (number, type_oid) = unsafe {
        let number = pg_sys::get_attnum(relation, name.as_ptr());
        (number, pg_sys::get_atttype(relation, number))
    };
    if number <= 0 {
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN, format!("column \"{column}\" does not exist"))
            .hint("Name the column whose value decides the shard.")
            .raise()
    }
    key_type(type_oid);
    let (mut type_id, mut typmod, mut collation) = (pg_sys::InvalidOid, 0, pg_sys::InvalidOid);
    // SAFETY: the attribute exists.
    let deterministic = unsafe {
        pg_sys::get_atttypetypmodcoll(relation, number, &mut type_id, &mut typmod, &mut collation);
        collation == pg_sys::InvalidOid || pg_sys::get_collation_isdeterministic(collation)
    };
    if !deterministic {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("column \"{column}\" has a nondeterministic collation and cannot be a shard key"),
        )
        .detail("Keys that are equal in such a collation have different texts, and would go to different shards.")
        .hint("Give the column a deterministic collation, or distribute by another column.")
        .raise()
    }
}
