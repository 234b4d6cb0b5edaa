//! What moves when a map becomes another, part by part.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeMap;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use shardmap_core::diff::diff;
use shardmap_core::export::{from_json, to_json, Allocation, KeyspaceExport};
use shardmap_core::ids::{ShardName, ShardNumber, Token};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, ShardSpec, ShardState, Strategy as Rule};
use shardmap_core::parts::{parts, Keys, Part};
use shardmap_core::reassign::{reassign, wanted};
use shardmap_core::ring::random_tokens;
use shardmap_core::slots::shortened;

fn space(spec: KeyspaceSpec) -> KeyspaceExport {
    let (wanted_tokens, wanted_slots) = (BTreeMap::new(), None);
    let (vnodes, allocation, options) = (100, Allocation::Random, BTreeMap::new());
    KeyspaceExport { spec, vnodes, allocation, options, wanted_tokens, wanted_slots }
}

fn owner(map: &KeyspaceMap, key: &str) -> Option<ShardName> {
    map.owner(key.as_bytes()).ok().and_then(|number| map.shard(number)).map(|shard| shard.name.clone())
}

fn build(space: &KeyspaceExport) -> KeyspaceMap {
    common::build(space.spec.clone())
}

/// Tokens that collide, and edges of the ring.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    vec(prop_oneof![0..12_u32, any::<u32>(), Just(u32::MAX), Just(u32::MAX - 1)], 0..6)
}

fn rings() -> impl Strategy<Value = Vec<ShardSpec>> {
    vec(tokens(), 2..7).prop_map(|tokens| {
        let shard = |(number, tokens): (u16, Vec<u32>)| {
            // Names whose order is not that of their numbers.
            let name = ShardName::from(format!("s{}", u32::from(number) * 7_919 % 1_024));
            ShardSpec { name, tokens, ..common::shard(number) }
        };
        (0..).zip(tokens).map(shard).collect()
    })
}

fn slots(shards: u16) -> impl Strategy<Value = Option<Vec<ShardNumber>>> {
    proptest::option::of(vec((0..shards).prop_map(ShardNumber), 1..20))
}

fn keys() -> impl Strategy<Value = Vec<String>> {
    vec("[a-z0-9-]{0,12}", 60)
}

/// A key is in the part of its giver and gainer, and in no other; if it keeps its owner it is in none.
fn check_parts(parts: &[Part], keys: &[String], old: &KeyspaceMap, new: &KeyspaceMap) -> Result<(), TestCaseError> {
    for key in keys {
        let (giver, gainer) = (owner(old, key), owner(new, key));
        let found: Vec<&Part> = parts.iter().filter(|part| part.keys.contains(key.as_bytes())).collect();
        if giver == gainer || giver.is_none() || gainer.is_none() {
            prop_assert!(found.is_empty(), "key {}: {:?}", key, found);
        } else {
            prop_assert_eq!(found.len(), 1, "key {}", key);
            prop_assert_eq!(
                (Some(&found[0].giver), Some(&found[0].gainer)),
                (giver.as_ref(), gainer.as_ref()),
                "key {}",
                key
            );
        }
    }
    Ok(())
}

/// How much a part is, in the unit of the difference of the maps.
fn size(keys: &Keys, whole: u64) -> u64 {
    match keys {
        Keys::Arcs(arcs) => arcs.iter().map(|(from, to)| to - from).sum(),
        Keys::Remainders { modulus, remainders } => remainders.len() as u64 * (whole / u64::from(*modulus)),
        Keys::Range { .. } => 0,
    }
}

proptest! {
    #[test]
    fn parts_of_a_ring_are_what_changes_owner(a in rings(), b in rings(), keys in keys(), edges in tokens()) {
        let (old, new) = (common::build(common::keyspace(Rule::Ring, a)), common::build(common::keyspace(Rule::Ring, b)));
        let found = parts(&old, &new).unwrap();
        check_parts(&found, &keys, &old, &new)?;
        // Token by token at the edges, and nothing beside what the difference counts.
        for token in edges.into_iter().chain(old.points().iter().map(|point| point.token.0)) {
            let name = |map: &KeyspaceMap| map.owner_of_token(Token(token)).and_then(|n| map.shard(n)).map(|s| s.name.clone());
            let within = |part: &&Part| matches!(&part.keys, Keys::Arcs(arcs) if arcs.iter().any(|(from, to)| (*from..*to).contains(&u64::from(token))));
            let found: Vec<_> = found.iter().filter(within).map(|part| (Some(part.giver.clone()), Some(part.gainer.clone()))).collect();
            let (giver, gainer) = (name(&old), name(&new));
            let moves = giver != gainer && giver.is_some() && gainer.is_some();
            prop_assert_eq!(found, if moves { vec![(giver, gainer)] } else { vec![] }, "token {}", token);
        }
        if !old.points().is_empty() && !new.points().is_empty() {
            let difference = diff(&old, &new).unwrap();
            prop_assert_eq!(found.len(), difference.flows.len());
            for (part, flow) in found.iter().zip(&difference.flows) {
                prop_assert_eq!((Some(&part.giver), Some(&part.gainer)), (flow.giver.as_ref(), flow.gainer.as_ref()));
                prop_assert_eq!(size(&part.keys, 1 << 32), flow.share.numerator);
            }
        }
    }

    #[test]
    fn parts_of_modulo_are_what_changes_owner(a in slots(6), b in slots(6), keys in keys()) {
        let map = |slots| common::build(KeyspaceSpec { slots, ..common::keyspace(Rule::Modulo, (0..6).map(common::shard).collect()) });
        let (old, new) = (map(a), map(b));
        let found = parts(&old, &new).unwrap();
        check_parts(&found, &keys, &old, &new)?;
        let difference = diff(&old, &new).unwrap();
        prop_assert_eq!(found.len(), difference.flows.len());
        for (part, flow) in found.iter().zip(&difference.flows) {
            prop_assert_eq!(size(&part.keys, flow.share.denominator), flow.share.numerator);
        }
    }

    #[test]
    fn arcs_change_hands_and_nothing_else_does(
        shards in rings(),
        target in 0..2_usize,
        cuts in btree_set(prop_oneof![0..12_u64, 0..=1_u64 << 32, Just(1_u64 << 32), Just((1_u64 << 32) - 1)], 2..8),
        keys in keys(),
        gone in 0..7_u16,
    ) {
        let before = space(common::keyspace(Rule::Ring, shards));
        let target = before.spec.shards[target].name.clone();
        let cuts: Vec<u64> = cuts.into_iter().collect();
        let arcs: Vec<(u64, u64)> = cuts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        let part = Keys::Arcs(arcs.clone());
        let old = build(&before);
        prop_assume!(!old.points().is_empty());
        // As the way there leaves it: what is wanted is elsewhere.
        let mut bound = before.clone();
        bound.wanted_tokens = before.spec.shards.iter().map(|s| (s.name.clone(), random_tokens(s.name.as_str(), 3))).collect();
        let after = reassign(&bound, &target, &part).unwrap();
        let new = build(&after);
        for key in &keys {
            let want = if part.contains(key.as_bytes()) { Some(target.clone()) } else { owner(&old, key) };
            prop_assert_eq!(owner(&new, key), want, "key {}", key);
        }
        let edges = arcs.iter().flat_map(|(from, to)| [*from, from.wrapping_sub(1), *to, to - 1]);
        let points = old.points().iter().chain(new.points()).flat_map(|p| [p.token.0, p.token.0.wrapping_add(1)]);
        for token in edges.map(|token| token as u32).chain(points) {
            let name = |map: &KeyspaceMap, token| map.owner_of_token(token).and_then(|n| map.shard(n)).map(|s| s.name.clone());
            let within = arcs.iter().any(|(from, to)| (*from..*to).contains(&u64::from(token)));
            let want = if within { Some(target.clone()) } else { name(&old, Token(token)) };
            prop_assert_eq!(name(&new, Token(token)), want, "token {}", token);
        }
        // A token that says nothing is not made: each new one ends an arc.
        let known = |token: u32| before.spec.shards.iter().any(|shard| shard.tokens.contains(&token));
        let points = new.points();
        for (at, point) in points.iter().enumerate().filter(|(_, point)| !known(point.token.0)) {
            prop_assert!(points.len() == 1 || points[(at + 1) % points.len()].shard != point.shard, "token {}", point.token);
        }
        // Tokens that were dropped or joined are missed by nobody who leaves later: what he had goes to the same shards
        // as if every arc had kept its token.
        let leaves = |space: &KeyspaceExport| {
            let mut spec = space.spec.clone();
            spec.shards.retain(|shard| shard.number != ShardNumber(gone));
            common::build(spec)
        };
        let mut all_kept = after.clone();
        for point in old.points() {
            let owner = new.owner_of_token(point.token).unwrap();
            all_kept.spec.shards.iter_mut().find(|s| s.number == owner).unwrap().tokens.push(point.token.0);
        }
        prop_assert!(diff(&build(&all_kept), &new).unwrap().flows.is_empty());
        let (short, long) = (leaves(&after), leaves(&all_kept));
        if !short.points().is_empty() {
            prop_assert!(diff(&long, &short).unwrap().flows.is_empty());
        }
    }

    #[test]
    fn remainders_change_hands_and_nothing_else_does(
        held in slots(5), target in 0..6_u16, modulus in 1..24_u32, keys in keys(), chosen in btree_set(0..24_u32, 1..10)
    ) {
        let mut before = space(KeyspaceSpec { slots: held, ..common::keyspace(Rule::Modulo, (0..6).map(common::shard).collect()) });
        before.spec.shards[5].state = ShardState::Joining;
        let remainders: Vec<u32> = chosen.into_iter().filter(|remainder| *remainder < modulus).collect();
        prop_assume!(!remainders.is_empty());
        let part = Keys::Remainders { modulus, remainders };
        let target = before.spec.shards[usize::from(target)].name.clone();
        let after = reassign(&before, &target, &part).unwrap();
        let (old, new) = (build(&before), build(&after));
        for key in &keys {
            let want = if part.contains(key.as_bytes()) { Some(target.clone()) } else { owner(&old, key) };
            prop_assert_eq!(owner(&new, key), want, "key {}", key);
        }
        prop_assert_eq!(new.shard_by_name(target.as_str()).unwrap().state, ShardState::Active);
    }

    /// However the parts follow each other, each step is a map, and the last one is the wanted one, to the token.
    #[test]
    fn a_rebalance_ends_where_it_is_wanted(
        shards in rings(), wishes in vec(tokens(), 7), states in vec(0..3_u8, 7), modulo: bool, order: u64, stop in 0..40_usize
    ) {
        let mut before = space(common::keyspace(if modulo { Rule::Modulo } else { Rule::Ring }, shards));
        for ((shard, wish), state) in before.spec.shards.iter_mut().zip(wishes).zip(&states) {
            match state {
                0 => {}
                1 => {
                    shard.tokens.clear();
                    shard.state = ShardState::Joining;
                    before.wanted_tokens.insert(shard.name.clone(), wish);
                }
                _ => shard.state = ShardState::Draining,
            }
        }
        // Bystanders' wishes are written down with the first.
        for shard in before.spec.shards.iter().filter(|shard| shard.state == ShardState::Active) {
            before.wanted_tokens.insert(shard.name.clone(), shard.tokens.clone());
        }
        let (wish, is_so) = wanted(&before).unwrap();
        let (old, new) = (build(&before), build(&wish));
        prop_assert_eq!(is_so, diff(&old, &new).unwrap().flows.is_empty());
        let mut moves = parts(&old, &new).unwrap();
        prop_assume!(diff(&old, &new).unwrap().flows.iter().all(|flow| flow.giver.is_some() && flow.gainer.is_some()));
        let mut random = common::random::Random(order);
        let mut now = before;
        let mut done = 0;
        while !moves.is_empty() {
            let part = moves.swap_remove(random.below(moves.len() as u64) as usize);
            now = reassign(&now, &part.gainer, &part.keys).unwrap();
            // What is written down is read again.
            now = from_json(&to_json(&[now]).unwrap()).unwrap().remove(0);
            done += 1;
            if done == stop {
                // Given up, and planned again.
                moves = parts(&build(&now), &build(&wanted(&now).unwrap().0)).unwrap();
            }
        }
        if done > 0 {
            let (again, is_so) = wanted(&now).unwrap();
            prop_assert!(is_so);
            prop_assert_eq!(&again.spec, &now.spec);
            prop_assert_eq!(&now.spec.slots, &wish.spec.slots);
            for (shard, wanted) in now.spec.shards.iter().zip(&wish.spec.shards) {
                prop_assert_eq!(&shard.tokens, &wanted.tokens);
                prop_assert_eq!(shard.state, wanted.state);
            }
        }
    }
}

#[test]
fn modulo_goes_back_to_the_plain_rule() {
    let mut before = space(common::keyspace(Rule::Modulo, (0..4).map(common::shard).collect()));
    before.spec.shards[3].state = ShardState::Joining;
    let wish = wanted(&before).unwrap().0;
    assert_eq!(wish.spec.slots, None);
    let moves = parts(&build(&before), &build(&wish)).unwrap();
    assert!(moves.iter().all(|part| matches!(part.keys, Keys::Remainders { modulus: 12, .. })));
    let mut now = before;
    let mut lengths = Vec::new();
    for part in &moves {
        now = reassign(&now, &part.gainer, &part.keys).unwrap();
        lengths.push(now.spec.slots.as_ref().map_or(0, Vec::len));
    }
    assert_eq!((lengths.first(), lengths.last()), (Some(&12), Some(&0)));
    // Emptied, it has no slot, though it is there; gone, nothing is said of slots.
    now.spec.shards[1].state = ShardState::Draining;
    let wish = wanted(&now).unwrap().0;
    for part in parts(&build(&now), &build(&wish)).unwrap() {
        now = reassign(&now, &part.gainer, &part.keys).unwrap();
    }
    assert_eq!(now.spec.slots, Some([0, 2, 3].map(ShardNumber).to_vec()));
    now.spec.shards.remove(1);
    assert_eq!(shortened(now.spec.slots.unwrap(), &now.spec.shards), None);
}

#[test]
fn what_is_refused() {
    let ring = space(common::random(Rule::Ring, 2, 4));
    let modulo = space(common::keyspace(Rule::Modulo, (0..257).map(common::shard).collect()));
    let target = ShardName::from("shard-1");
    let arcs = |from, to| Keys::Arcs(vec![(from, to)]);
    let remainders = |modulus, remainder| Keys::Remainders { modulus, remainders: vec![remainder] };
    for (space, target, keys, message) in [
        (&ring, "gone", arcs(0, 1), "keyspace \"main\" has no shard \"gone\""),
        (&ring, "shard-1", arcs(1, 1), "the part of keyspace \"main\" that is to move is not valid"),
        (&ring, "shard-1", arcs(0, (1 << 32) + 1), "the part of keyspace \"main\" that is to move is not valid"),
        (&ring, "shard-1", Keys::Arcs(vec![]), "the part of keyspace \"main\" that is to move is not valid"),
        (&ring, "shard-1", remainders(2, 1), "keyspace \"main\" of strategy \"ring\" is not divided in this way"),
        (&modulo, "shard-1", remainders(2, 2), "the part of keyspace \"main\" that is to move is not valid"),
        (
            &modulo,
            "shard-1",
            remainders(256, 0),
            "keyspace \"main\" would need more than 65536 slots: it has 257, and the part is one of modulus 256",
        ),
    ] {
        assert_eq!(reassign(space, &ShardName::from(target), &keys).unwrap_err().to_string(), message);
    }
    assert!(reassign(&modulo, &target, &remainders(257, 0)).is_ok());
    let more = space(common::keyspace(Rule::Modulo, (0..256).map(common::shard).collect()));
    let error = parts(&build(&modulo), &build(&more)).unwrap_err();
    assert_eq!(error.to_string(), "keyspace \"main\" would need more than 65536 slots to go from 257 to 256");
}
