//! Prints the core's figures, one a line: `name value`.
//!
//! `cargo run -p shardmap_core --release --example figures`. Times are the least of several runs, which is the figure
//! that a busy machine disturbs least. Everything but the times is exact and the same on every machine.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use shardmap_core::alloc::{balanced_tokens, random_tokens};
use shardmap_core::balance::ring_balance;
use shardmap_core::diff::diff;
use shardmap_core::hash::md5_u128;
use shardmap_core::ids::{ShardName, ShardNumber, Token};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, ShardSpec, ShardState, Strategy};

const RUNS: usize = 21;
const LOOKUPS: u32 = 200_000;

fn shard(number: u16, tokens: Vec<u32>) -> ShardSpec {
    let name = ShardName::from(format!("shard-{number}"));
    ShardSpec { name, number: ShardNumber(number), weight: 1.0, state: ShardState::Active, tokens }
}

fn spec(shards: Vec<ShardSpec>) -> KeyspaceSpec {
    KeyspaceSpec {
        name: "main".into(),
        strategy: Strategy::Ring,
        version: 1,
        shards,
        pins: vec![],
        ranges: vec![],
        slots: None,
    }
}

fn least(mut run: impl FnMut() -> Duration) -> Duration {
    (0..RUNS).map(|_| run()).min().unwrap()
}

fn each<T, R>(inputs: &[T], work: impl Fn(&T) -> R) -> f64 {
    let time = least(|| {
        let start = Instant::now();
        for input in inputs {
            black_box(work(input));
        }
        start.elapsed()
    });
    time.as_secs_f64() * 1e9 / f64::from(LOOKUPS)
}

/// Time of one lookup when each waits for the one before, as a statement's single lookup waits for its data.
fn chained(map: &KeyspaceMap, tokens: &[Token]) -> f64 {
    let time = least(|| {
        let start = Instant::now();
        let mut last = 0;
        for token in tokens {
            let owner = map.owner_of_token(Token(token.0 ^ last));
            last = u32::from(black_box(owner).unwrap().0);
        }
        start.elapsed()
    });
    time.as_secs_f64() * 1e9 / f64::from(LOOKUPS)
}

fn times() {
    let shards = || (0..1024).map(|number| shard(number, random_tokens(&format!("shard-{number}"), 256))).collect();
    let full = spec(shards());
    let build = least(|| {
        let spec = full.clone();
        let start = Instant::now();
        black_box(KeyspaceMap::build(spec).unwrap());
        start.elapsed()
    });
    let with_tokens = least(|| {
        let start = Instant::now();
        black_box(KeyspaceMap::build(spec(shards())).unwrap());
        start.elapsed()
    });
    let map = KeyspaceMap::build(full).unwrap();
    // Digests, so that the points are visited as keys visit them: in no order.
    let tokens: Vec<Token> = random_tokens("probe", LOOKUPS).into_iter().map(Token).collect();
    let keys: Vec<String> = (0..LOOKUPS).map(|key| format!("key-{key}")).collect();
    println!("lookup_ns_1024x256 {:.1}", chained(&map, &tokens));
    println!("lookup_overlapped_ns_1024x256 {:.1}", each(&tokens, |token| map.owner_of_token(*token)));
    println!("md5_of_key_ns {:.1}", each(&keys, |key| md5_u128(key.as_bytes())));
    println!("owner_of_key_ns_1024x256 {:.1}", each(&keys, |key| map.owner(key.as_bytes())));
    println!("map_build_ms_1024x256 {:.2}", build.as_secs_f64() * 1e3);
    println!("map_build_with_tokens_ms_1024x256 {:.2}", with_tokens.as_secs_f64() * 1e3);
}

/// Greatest over mean of ring ownership, and what the last addition moved times N, for each N.
fn balanced(vnodes: u32, most: usize) -> Vec<(f64, f64)> {
    let mut existing: Vec<(ShardName, f64, Vec<u32>)> = Vec::new();
    let mut before = KeyspaceMap::build(spec(vec![])).unwrap();
    let mut figures = Vec::new();
    for count in 1..=most {
        let name = ShardName::from(format!("shard-{}", count - 1));
        let tokens = balanced_tokens(&existing, &name, 1.0, vnodes);
        existing.push((name, 1.0, tokens));
        let shards = (0..).zip(&existing).map(|(number, (_, _, tokens))| shard(number, tokens.clone())).collect();
        let map = KeyspaceMap::build(spec(shards)).unwrap();
        let moved = diff(&before, &map).unwrap().moved.unwrap().value();
        figures.push((ring_balance(&map).load.unwrap().max_over_mean, moved * count as f64));
        before = map;
    }
    figures
}

fn main() {
    times();
    let figures = balanced(16, 64);
    for count in [6, 16, 64] {
        println!("balanced16_max_over_mean_{count} {:.4}", figures[count - 1].0);
    }
    let from_six = &figures[5..];
    println!("balanced16_max_over_mean_worst_6_to_64 {:.4}", from_six.iter().map(|f| f.0).fold(0.0, f64::max));
    println!("balanced16_moved_times_n_64 {:.4}", figures[63].1);
    println!("balanced16_moved_times_n_worst_6_to_64 {:.4}", from_six.iter().map(|f| f.1).fold(0.0, f64::max));
    for count in [6, 16, 64] {
        let shards = (0..count).map(|number| shard(number, random_tokens(&format!("shard-{number}"), 256)));
        let map = KeyspaceMap::build(spec(shards.collect())).unwrap();
        println!("random256_max_over_mean_{count} {:.4}", ring_balance(&map).load.unwrap().max_over_mean);
    }
}
