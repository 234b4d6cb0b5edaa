//! What a change of a map would move, and how even a map is.
//!
//! Decides nothing: takes keyspaces as exported JSON, which `sql/preview.sql` makes of the catalog and of the change, and
//! lets the core compare them. Refuses documents that hold no valid map. Read next: `shardmap_core::diff`.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::balance::ring_balance;
use shardmap_core::diff::diff;
use shardmap_core::map::KeyspaceMap;

use super::export::only;
use crate::pg::encoding;
use crate::pg::error::{sqlstate, Refusal};

/// A name as Postgres' text.
pub fn text(name: &str) -> Vec<u8> {
    encoding::server(name).into_owned()
}

/// The map of the document's only keyspace.
pub fn map(json: &[u8]) -> KeyspaceMap {
    KeyspaceMap::build(only(json).spec)
        .unwrap_or_else(|error| Refusal::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint()).raise())
}

/// Who gives which part of all keys to whom, from one map to another; the part is exact, as numerator over denominator.
#[pg_extern(sql = false)]
fn map_flows(
    before: &[u8],
    after: &[u8],
) -> TableIterator<
    'static,
    (name!(giver, Option<Vec<u8>>), name!(gainer, Option<Vec<u8>>), name!(numerator, i64), name!(denominator, i64)),
> {
    let found = diff(&map(before), &map(after))
        .unwrap_or_else(|error| Refusal::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, error.to_string()).raise());
    TableIterator::new(found.flows.into_iter().map(|flow| {
        let name = |shard: Option<shardmap_core::ids::ShardName>| shard.map(|shard| text(shard.as_str()));
        let part = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        (name(flow.giver), name(flow.gainer), part(flow.share.numerator), part(flow.share.denominator))
    }))
}

/// Share, vnodes, weight and load of each shard of a ring, with the spread of the loads.
#[pg_extern(sql = false)]
fn map_balance(
    json: &[u8],
) -> TableIterator<
    'static,
    (
        name!(shard, Vec<u8>),
        name!(share, f64),
        name!(vnodes, i32),
        name!(weight, f64),
        name!(load, f64),
        name!(max_over_mean, Option<f64>),
        name!(stdev, Option<f64>),
    ),
> {
    let balance = ring_balance(&map(json));
    let (max_over_mean, stdev) = (balance.load.map(|load| load.max_over_mean), balance.load.map(|load| load.stdev));
    TableIterator::new(balance.shards.into_iter().map(move |shard| {
        let vnodes = i32::try_from(shard.vnodes).unwrap_or(i32::MAX);
        (text(shard.shard.as_str()), shard.share.value(), vnodes, shard.weight, shard.load, max_over_mean, stdev)
    }))
}
