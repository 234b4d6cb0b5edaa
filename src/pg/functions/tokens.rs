//! Ring positions of a shard that is added or weighted anew, for `sql/shards.sql`.
//!
//! Decides nothing: the core allocates. What always holds: the result depends on the catalog and the arguments only.
//! Refuses counts below 1. Read next: `shardmap_core::alloc`.

use pgrx::prelude::*;
use shardmap_core::alloc;
use shardmap_core::ids::ShardName;

use crate::pg::error::Refusal;

fn positive(count: i32) -> u32 {
    match u32::try_from(count) {
        Ok(count) if count > 0 => count,
        _ => Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, format!("cannot choose {count} ring positions"))
            .hint("A shard of a ring has at least one.")
            .raise(),
    }
}

fn positions(tokens: Vec<u32>) -> Vec<i64> {
    tokens.into_iter().map(i64::from).collect()
}

/// The positions of strategy `ring` by MD5 of the shard's name and a number.
#[pg_extern(sql = false)]
fn random_tokens(shard: &str, count: i32) -> Vec<i64> {
    positions(alloc::random_tokens(shard, positive(count)))
}

/// Positions that even out the load among the keyspace's other shards, as they stand in the catalog.
#[pg_extern(sql = false)]
fn balanced_tokens(keyspace: &str, shard: &str, weight: f64, count: i32) -> Vec<i64> {
    const OTHERS: &str = "SELECT s.name, s.weight, s.tokens FROM shardmap.shard s \
                          WHERE s.keyspace OPERATOR(pg_catalog.=) $1 AND s.name OPERATOR(pg_catalog.<>) $2";
    let others: Result<Vec<_>, pgrx::spi::Error> = Spi::connect(|client| {
        client
            .select(OTHERS, None, &[keyspace.into(), shard.into()])?
            .map(|row| {
                let name: String = row.get(1)?.unwrap_or_default();
                let tokens: Vec<i64> = row.get(3)?.unwrap_or_default();
                let tokens = tokens.into_iter().filter_map(|token| u32::try_from(token).ok()).collect();
                Ok((ShardName::from(name), row.get(2)?.unwrap_or(1.0), tokens))
            })
            .collect()
    });
    match others {
        Ok(others) => positions(alloc::balanced_tokens(&others, &ShardName::from(shard), weight, positive(count))),
        Err(error) => Refusal::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, format!("cannot read shardmap.shard: {error}")).raise(),
    }
}
