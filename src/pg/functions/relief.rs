//! Hot and cold shards, for `sql/hot_cold.sql`.
//!
//! Decides nothing: the core chooses who gives what to whom. Read next: `shardmap_core::burden`, `shardmap_core::relief`.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::burden::{fold, relieve, Burden, Limits, Measures};
use shardmap_core::ids::ShardName;
use shardmap_core::map::ShardState;
use shardmap_core::relief::{give_from, give_part};

use super::export::only;
use super::parts::json;
use super::preview::text;
use crate::pg::encoding;
use crate::pg::error::Refusal;

/// Three numbers from `at` on: of rows, bytes, load; what is missing or no number is 0.
fn measures(all: &[Option<f64>], at: usize) -> Measures {
    let value = |n: usize| all.get(3 * at + n).copied().flatten().filter(|value| value.is_finite()).unwrap_or(0.0);
    [value(0), value(1), value(2)]
}

fn limits(given: &[Option<f64>]) -> Limits {
    let limit = |n: usize| given.get(n).copied().flatten();
    [limit(0), limit(1), limit(2)]
}

fn burdens(shards: Vec<String>, states: &[String], all: &[Option<f64>]) -> Vec<Burden> {
    let burden = |(at, shard): (usize, String)| Burden {
        shard: ShardName::from(shard),
        state: match states.get(at).map(String::as_str) {
            Some("joining") => ShardState::Joining,
            Some("draining") => ShardState::Draining,
            _ => ShardState::Active,
        },
        measures: measures(all, at),
    };
    shards.into_iter().enumerate().map(burden).collect()
}

/// Who gives which part of what he owns to whom, so that nobody is above the limits.
#[pg_extern(sql = false)]
fn relieve_shards(
    shards: Vec<String>,
    states: Vec<String>,
    measures: Vec<Option<f64>>,
    most: Vec<Option<f64>>,
    target: Option<&[u8]>,
) -> TableIterator<'static, (name!(giver, Vec<u8>), name!(gainer, Vec<u8>), name!(part, f64))> {
    let target = target.map(|target| ShardName::from(&*encoding::utf8(target)));
    let reliefs = relieve(&burdens(shards, &states, &measures), &limits(&most), target.as_ref());
    TableIterator::new(reliefs.into_iter().map(|relief| {
        let name = |name: &ShardName| text(name.as_str());
        (name(&relief.giver), name(&relief.gainer), relief.part)
    }))
}

/// The shards that are to be emptied, for they are below all limits.
#[pg_extern(sql = false)]
fn fold_shards(
    shards: Vec<String>,
    states: Vec<String>,
    measures: Vec<Option<f64>>,
    least: Vec<Option<f64>>,
) -> Vec<String> {
    fold(&burdens(shards, &states, &measures), &limits(&least)).into_iter().map(String::from).collect()
}

/// The map with a part of what `giver` owns, or all from a bound on, given to `gainer`; nothing if that is nothing.
#[pg_extern(sql = false)]
fn given_map(map: &[u8], giver: &[u8], gainer: &[u8], part: Option<f64>, bound: Option<&[u8]>) -> Option<Vec<u8>> {
    let space = only(map);
    let (giver, gainer) = (ShardName::from(&*encoding::utf8(giver)), ShardName::from(&*encoding::utf8(gainer)));
    let given = match (part, bound) {
        (_, Some(bound)) => give_from(&space, &giver, &gainer, &encoding::utf8(bound)),
        (Some(part), None) => give_part(&space, &giver, &gainer, part),
        (None, None) => Ok(None),
    };
    given.unwrap_or_else(|error| Refusal::from(error).raise()).map(json)
}
