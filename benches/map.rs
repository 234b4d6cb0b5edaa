//! Micro-benchmarks of the core: what a lookup and a build of a large map cost.
//!
//! `cargo bench -p shardmap_core`. The figures that are recorded come from the example `figures`.

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, BatchSize, Criterion};
use shardmap_core::hash::md5_u128;
use shardmap_core::ids::{KeyspaceName, ShardName, ShardNumber, Token};
use shardmap_core::key::{CanonicalBuf, KeyValue};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, ShardSpec, ShardState, Strategy};
use shardmap_core::ring::random_tokens;

fn spec(strategy: Strategy) -> KeyspaceSpec {
    let shard = |number: u16| {
        let name = format!("shard-{number}");
        let tokens = random_tokens(&name, 256);
        let (number, state) = (ShardNumber(number), ShardState::Active);
        ShardSpec { name: ShardName::from(name), number, weight: 1.0, state, tokens }
    };
    let shards = (0..1024).map(shard).collect();
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

fn lookups(c: &mut Criterion) {
    let Ok(map) = KeyspaceMap::build(spec(Strategy::Ring)) else {
        return;
    };
    // Digests, so that the points are visited as keys visit them: in no order.
    let tokens = random_tokens("probe", 1 << 16);
    let mut probe = tokens.iter().cycle();
    c.bench_function("token to shard, 1024 x 256", |b| {
        b.iter(|| probe.next().map(|token| map.owner_of_token(black_box(Token(*token)))));
    });
    let keys: Vec<String> = (0..4096).map(|i| format!("key-{i}")).collect();
    let mut next = keys.iter().cycle();
    c.bench_function("key to shard, 1024 x 256", |b| {
        b.iter(|| next.next().map(|key| map.owner(black_box(key.as_bytes()))));
    });
    let modulo = spec(Strategy::Modulo);
    let slots = (0..1024).map(ShardNumber).cycle().skip(1).take(1 << 16).collect();
    let slots = KeyspaceSpec { slots: Some(slots), ..modulo.clone() };
    for (name, spec) in [("modulo 1024", modulo), ("65536 slots", slots)] {
        let Ok(map) = KeyspaceMap::build(spec) else {
            continue;
        };
        c.bench_function(&format!("key to shard, {name}"), |b| {
            b.iter(|| next.next().map(|key| map.owner(black_box(key.as_bytes()))));
        });
    }
    c.bench_function("MD5 of a key", |b| b.iter(|| next.next().map(|key| md5_u128(black_box(key.as_bytes())))));
    let mut buf = CanonicalBuf::new();
    c.bench_function("canonical text of an integer", |b| {
        b.iter(|| KeyValue::Integer(black_box(123_456_789)).canonical(&mut buf).len());
    });
}

fn builds(c: &mut Criterion) {
    let spec = spec(Strategy::Ring);
    c.bench_function("map build, 1024 x 256", |b| {
        b.iter_batched(|| spec.clone(), KeyspaceMap::build, BatchSize::PerIteration);
    });
}

criterion_group!(benches, lookups, builds);
criterion_main!(benches);
