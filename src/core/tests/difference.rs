//! What a change of the map would move.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use shardmap_core::diff::{diff, ArcMove, MapDiff};
use shardmap_core::ids::{ShardName, ShardNumber, Token};
use shardmap_core::map::{KeyspaceSpec, RangeOrder, RangeSpec, ShardState, Strategy};

fn ring(tokens: &[&[u32]]) -> KeyspaceSpec {
    let mut spec =
        common::keyspace(Strategy::Ring, (0..).zip(tokens).map(|(number, _)| common::shard(number)).collect());
    for (shard, tokens) in spec.shards.iter_mut().zip(tokens) {
        shard.tokens = tokens.to_vec();
    }
    spec
}

fn of(old: KeyspaceSpec, new: KeyspaceSpec) -> MapDiff {
    diff(&common::build(old), &common::build(new)).unwrap()
}

fn name(number: u16) -> Option<ShardName> {
    Some(ShardName::from(format!("shard-{number}")))
}

#[test]
fn arcs_are_joined_and_wrap() {
    let found = of(ring(&[&[10, 20, 30], &[40]]), ring(&[&[10, 20, 30], &[40], &[5, 15]]));
    let arc = |after, through, giver| ArcMove { after: Token(after), through: Token(through), giver, gainer: name(2) };
    assert_eq!(found.arcs, [arc(40, 5, name(0)), arc(10, 15, name(0))]);
    assert_eq!(found.moved.unwrap().to_string(), format!("{}/4294967296", (1_u64 << 32) - 35 + 5));
    // All of it, over the ring's end, in one piece.
    let found = of(ring(&[&[10, 20, 30]]), ring(&[&[], &[10, 15]]));
    assert_eq!(found.arcs.len(), 1);
    assert_eq!((found.arcs[0].length(), found.moved.unwrap().value()), (1 << 32, 1.0));
    assert_eq!((&found.flows[0].giver, &found.flows[0].gainer), (&name(0), &name(1)));
    // From nothing, and to nothing.
    let found = of(ring(&[&[]]), ring(&[&[7]]));
    assert_eq!((found.flows[0].giver.clone(), found.moved.unwrap().value()), (None, 1.0));
    let found = of(ring(&[&[]]), ring(&[&[]]));
    assert_eq!((found.arcs.len(), found.moved.unwrap().value()), (0, 0.0));
}

#[test]
fn a_renumbered_shard_moves_nothing() {
    let mut renumbered = ring(&[&[10], &[20]]);
    renumbered.shards[0].number = ShardNumber(900);
    assert_eq!(of(ring(&[&[10], &[20]]), renumbered).moved.unwrap().numerator, 0);
}

#[test]
fn modulo_is_exact() {
    let spec = |count| common::keyspace(Strategy::Modulo, (0..count).map(common::shard).collect());
    for (old, new) in [(6_u16, 7_u16), (4, 8), (8, 4), (6, 9), (5, 5), (1, 3)] {
        let found = of(spec(old), spec(new));
        let moved = found.moved.unwrap();
        let differ = (0..moved.denominator).filter(|r| r % u64::from(old) != r % u64::from(new)).count();
        assert_eq!(moved.numerator, differ as u64, "{old} to {new}");
        assert_eq!(moved.denominator % u64::from(old) + moved.denominator % u64::from(new), 0, "{old} to {new}");
        assert_eq!(found.flows.iter().map(|flow| flow.share.numerator).sum::<u64>(), moved.numerator);
    }
    assert_eq!(of(spec(6), spec(7)).moved.unwrap().to_string(), "36/42");
    let found = of(spec(0), spec(3));
    assert_eq!((found.moved.unwrap().to_string().as_str(), found.flows.len()), ("3/3", 3));
    assert_eq!(of(spec(0), spec(0)).moved.unwrap().numerator, 0);
    let mut joining = spec(7);
    joining.shards[6].state = ShardState::Joining;
    assert_eq!(of(spec(6), joining).moved.unwrap().numerator, 0);
}

#[test]
fn ranges_are_joined() {
    let spec = |ranges: &[(Option<&str>, Option<&str>, u16)]| {
        let mut spec = common::keyspace(Strategy::Range(RangeOrder::Integer), (0..3).map(common::shard).collect());
        let range = |(lower, upper, shard): &(Option<&str>, Option<&str>, u16)| RangeSpec {
            lower: lower.map(Into::into),
            upper: upper.map(Into::into),
            shard: name(*shard).unwrap(),
            version: 1,
        };
        spec.ranges = ranges.iter().map(range).collect();
        spec
    };
    let old = spec(&[(None, Some("0"), 0), (Some("0"), Some("100"), 1)]);
    let new = spec(&[(None, Some("-5"), 0), (Some("-5"), Some("50"), 2), (Some("50"), None, 1)]);
    let found = of(old, new);
    let text = |range: &shardmap_core::diff::RangeMove| {
        let side = |name: &Option<ShardName>| name.as_ref().map_or("nobody".into(), ToString::to_string);
        let bound = |bound: &Option<String>| bound.clone().unwrap_or_default();
        format!("[{}, {}) {} to {}", bound(&range.lower), bound(&range.upper), side(&range.giver), side(&range.gainer))
    };
    assert_eq!(
        found.ranges.iter().map(text).collect::<Vec<_>>(),
        ["[-5, 0) shard-0 to shard-2", "[0, 50) shard-1 to shard-2", "[100, ) nobody to shard-1"]
    );
    assert_eq!((found.moved, found.flows.len()), (None, 0));
    // A boundary that changes no owner is no change.
    let split = spec(&[(None, Some("5"), 0), (Some("5"), None, 0)]);
    assert!(of(spec(&[(None, None, 0)]), split.clone()).ranges.is_empty());
    let found = of(split, spec(&[(None, None, 2)]));
    assert_eq!(found.ranges.iter().map(text).collect::<Vec<_>>(), ["[, ) shard-0 to shard-2"]);
}

#[test]
fn pinned_keys_are_listed() {
    let pinned = |shard: u16| {
        let mut spec = ring(&[&[10], &[20], &[]]);
        spec.pins = vec![("k".into(), name(shard).unwrap())];
        spec
    };
    let found = of(pinned(2), pinned(1));
    assert_eq!((found.pins.len(), found.pins[0].key.as_str()), (1, "k"));
    assert_eq!((&found.pins[0].giver, &found.pins[0].gainer), (&name(2), &name(1)));
    assert_eq!(of(pinned(2), ring(&[&[10], &[20]])).pins.len(), 1);
    assert!(of(pinned(2), pinned(2)).pins.is_empty());
}

#[test]
fn strategies_must_be_the_same() {
    let modulo = common::build(common::keyspace(Strategy::Modulo, vec![]));
    let ring = common::build(common::keyspace(Strategy::Ring, vec![]));
    assert_eq!(
        diff(&modulo, &ring).unwrap_err().to_string(),
        r#"cannot compare a map of strategy "modulo" with one of strategy "ring""#
    );
}
