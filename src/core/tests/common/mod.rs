//! Maps for tests.
#![allow(dead_code)] // not every test file needs all

pub mod random;

use shardmap_core::alloc::{balanced_tokens, random_tokens};
use shardmap_core::ids::{KeyspaceName, ShardName, ShardNumber};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, ShardSpec, ShardState, Strategy};

/// An active shard of weight 1 without tokens.
pub fn shard(number: u16) -> ShardSpec {
    ShardSpec {
        name: ShardName::from(format!("shard-{number}")),
        number: ShardNumber(number),
        weight: 1.0,
        state: ShardState::Active,
        tokens: Vec::new(),
    }
}

/// A keyspace of the given shards.
pub fn keyspace(strategy: Strategy, shards: Vec<ShardSpec>) -> KeyspaceSpec {
    KeyspaceSpec {
        name: KeyspaceName::from("main"),
        strategy,
        version: 1,
        shards,
        pins: vec![],
        ranges: vec![],
        slots: None,
    }
}

/// A keyspace of `count` shards with the tokens of random allocation.
pub fn random(strategy: Strategy, count: u16, vnodes: u32) -> KeyspaceSpec {
    let shards = (0..count).map(|number| {
        let mut shard = shard(number);
        shard.tokens = random_tokens(shard.name.as_str(), vnodes);
        shard
    });
    keyspace(strategy, shards.collect())
}

/// Shards added one after the other with balanced allocation, one for each weight.
pub fn balanced(weights: &[f64], vnodes: u32) -> KeyspaceSpec {
    let mut existing: Vec<(ShardName, f64, Vec<u32>)> = Vec::new();
    for (number, weight) in weights.iter().enumerate() {
        let name = ShardName::from(format!("shard-{number}"));
        let tokens = balanced_tokens(&existing, &name, *weight, (weight * f64::from(vnodes)) as u32);
        existing.push((name, *weight, tokens));
    }
    let shards = existing.into_iter().zip(0..).map(|((_, weight, tokens), number)| {
        let shard = shard(number);
        ShardSpec { weight, tokens, ..shard }
    });
    keyspace(Strategy::Ring, shards.collect())
}

/// Builds a map that must be valid.
pub fn build(spec: KeyspaceSpec) -> KeyspaceMap {
    KeyspaceMap::build(spec).unwrap()
}
