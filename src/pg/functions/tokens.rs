//! Ring positions of a shard that is added or weighted anew, for `sql/preview.sql`.
//!
//! Decides nothing: the core allocates. What always holds: the result depends on the arguments only. Refuses counts
//! below 1. Read next: `shardmap_core::alloc`.

use pgrx::prelude::*;
use shardmap_core::alloc;
use shardmap_core::ids::ShardName;

use super::export::keyspaces;
use crate::pg::encoding;
use crate::pg::error::Refusal;

/// As many as a shard can have; choosing them cannot be cancelled.
const MAX_TOKENS: u32 = 65_536;

fn positive(count: i32) -> u32 {
    match u32::try_from(count) {
        Ok(count) if (1..=MAX_TOKENS).contains(&count) => count,
        _ => Refusal::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("cannot choose {count} ring positions"),
        )
        .hint("A shard of a ring has 1 to 65536.")
        .raise(),
    }
}

fn positions(tokens: Vec<u32>) -> Vec<i64> {
    tokens.into_iter().map(i64::from).collect()
}

/// The positions of strategy `ring` by MD5 of the shard's name and a number.
#[pg_extern(sql = false)]
fn random_tokens(shard: &[u8], count: i32) -> Vec<i64> {
    positions(alloc::random_tokens(&encoding::utf8(shard), positive(count)))
}

/// Positions that even out the load among the other shards of an exported map of one keyspace.
#[pg_extern(sql = false)]
fn balanced_tokens(map: &[u8], shard: &[u8], weight: f64, count: i32) -> Vec<i64> {
    let shard = &*encoding::utf8(shard);
    let others: Vec<_> = keyspaces(map)
        .into_iter()
        .flat_map(|keyspace| keyspace.spec.shards)
        .filter(|other| other.name.as_str() != shard)
        .map(|other| (other.name, other.weight, other.tokens))
        .collect();
    positions(alloc::balanced_tokens(&others, &ShardName::from(shard), weight, positive(count)))
}
