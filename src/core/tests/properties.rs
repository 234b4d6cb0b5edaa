//! What holds for every map, checked on many.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use shardmap_core::alloc::{balanced_tokens, random_tokens, vnode_count};
use shardmap_core::balance::{ring_balance, Spread};
use shardmap_core::hash::{md5_u128, vnode_token};
use shardmap_core::ids::{ShardName, ShardNumber, Token};
use shardmap_core::key::{CanonicalBuf, KeyValue};
use shardmap_core::map::{KeyspaceSpec, RangeOrder, RangeSpec, ShardSpec, ShardState, Strategy as Rule};

/// Names whose order is not that of their numbers.
fn shards() -> impl Strategy<Value = Vec<ShardSpec>> {
    let shard = (0..1024_u16, vec(prop_oneof![0..8_u32, any::<u32>()], 0..6));
    vec(shard, 1..12).prop_map(|shards| {
        let mut shards: Vec<ShardSpec> = shards
            .into_iter()
            .map(|(number, tokens)| ShardSpec {
                name: ShardName::from(format!("s{}", u32::from(number) * 7_919 % 1_024)),
                tokens,
                ..common::shard(number)
            })
            .collect();
        shards.sort_by_key(|shard| shard.number);
        shards.dedup_by_key(|shard| shard.number);
        shards
    })
}

fn keys() -> impl Strategy<Value = Vec<String>> {
    vec("[a-z0-9-]{0,12}", 1..40)
}

/// The definition, word by word: the first vnode at or after the token, else the first of all; of equal vnodes the one
/// of the lower name.
fn naive_owner(shards: &[ShardSpec], token: u32) -> Option<ShardNumber> {
    let vnodes = || shards.iter().flat_map(|s| s.tokens.iter().map(move |t| (*t, &s.name, s.number)));
    let first = vnodes().filter(|vnode| vnode.0 >= token).min().or_else(|| vnodes().min())?;
    Some(first.2)
}

proptest! {
    #[test]
    fn a_ring_lookup_agrees_with_the_definition(
        shards in shards(),
        tokens in vec(prop_oneof![0..10_u32, any::<u32>(), Just(u32::MAX)], 1..50),
        keys in keys(),
    ) {
        let map = common::build(common::keyspace(Rule::Ring, shards.clone()));
        for token in tokens {
            prop_assert_eq!(map.owner_of_token(Token(token)), naive_owner(&shards, token), "token={}", token);
        }
        for key in keys {
            let owner = naive_owner(&shards, Token::of(key.as_bytes()).0);
            prop_assert_eq!(map.owner(key.as_bytes()).ok(), owner, "key={}", key);
        }
    }

    #[test]
    fn modulo_agrees_with_the_definition(shards in shards(), joining in 0..12_usize, keys in keys()) {
        let mut shards = shards;
        if let Some(shard) = shards.get_mut(joining) {
            shard.state = ShardState::Joining;
        }
        let map = common::build(common::keyspace(Rule::Modulo, shards.clone()));
        shards.retain(|shard| shard.state != ShardState::Joining);
        for key in keys {
            let at = md5_u128(key.as_bytes()).checked_rem(shards.len() as u128);
            let owner = at.map(|at| shards[at as usize].number);
            prop_assert_eq!(map.owner(key.as_bytes()).ok(), owner, "key={}", key);
        }
    }

    #[test]
    fn slots_agree_with_the_definition(slots in vec(0..5_u16, 1..200), keys in keys()) {
        let shards = (0..5).map(common::shard).collect();
        let slots: Vec<ShardNumber> = slots.into_iter().map(ShardNumber).collect();
        let map = common::build(KeyspaceSpec { slots: Some(slots.clone()), ..common::keyspace(Rule::Modulo, shards) });
        for key in keys {
            let owner = slots[(md5_u128(key.as_bytes()) % slots.len() as u128) as usize];
            prop_assert_eq!(map.owner(key.as_bytes()), Ok(owner), "key={}", key);
        }
    }

    #[test]
    fn ranges_agree_with_the_definition(cuts in btree_set(-50..50_i64, 2..8), skip in 0..7_usize, keys in vec(-60..60_i64, 1..40)) {
        let cuts: Vec<i64> = cuts.into_iter().collect();
        let shards: Vec<ShardSpec> = (0..8).map(common::shard).collect();
        let mut ranges: Vec<(i64, i64, ShardName)> =
            cuts.windows(2).zip(&shards).map(|(cut, shard)| (cut[0], cut[1], shard.name.clone())).collect();
        ranges.remove(skip % ranges.len());
        let spec = |(lower, upper, shard): &(i64, i64, ShardName)| RangeSpec {
            lower: Some(lower.to_string()),
            upper: Some(upper.to_string()),
            shard: shard.clone(),
            version: 1,
        };
        let mut spec = KeyspaceSpec {
            ranges: ranges.iter().rev().map(spec).collect(),
            ..common::keyspace(Rule::Range(RangeOrder::Integer), shards)
        };
        spec.pins = vec![("7".into(), ShardName::from("shard-7"))];
        let map = common::build(spec);
        for key in keys {
            let holds = ranges.iter().find(|(lower, upper, _)| *lower <= key && key < *upper);
            let owner = holds.map(|(_, _, shard)| shard.clone());
            let owner = if key == 7 { Some(ShardName::from("shard-7")) } else { owner };
            let found = map.owner(key.to_string().as_bytes()).ok();
            prop_assert_eq!(found.and_then(|number| map.shard(number)).map(|shard| shard.name.clone()), owner, "key={}", key);
        }
    }

    #[test]
    fn the_order_of_registration_does_not_matter(
        (shards, shuffled) in shards().prop_flat_map(|shards| (Just(shards.clone()), Just(shards).prop_shuffle())),
        keys in keys(),
        tokens in vec(0..10_u32, 10),
    ) {
        for rule in [Rule::Ring, Rule::Modulo] {
            let map = common::build(common::keyspace(rule, shards.clone()));
            let other = common::build(common::keyspace(rule, shuffled.clone()));
            for key in &keys {
                prop_assert_eq!(map.owner(key.as_bytes()), other.owner(key.as_bytes()));
            }
            for token in &tokens {
                prop_assert_eq!(map.owner_of_token(Token(*token)), other.owner_of_token(Token(*token)));
            }
        }
    }

    #[test]
    fn a_new_shard_takes_keys_only_to_itself(shards in shards(), count in 1..20_u32, balanced: bool, keys in keys()) {
        let before = common::build(common::keyspace(Rule::Ring, shards.clone()));
        let name = ShardName::from("new");
        let existing: Vec<_> = shards.iter().map(|s| (s.name.clone(), s.weight, s.tokens.clone())).collect();
        let tokens = if balanced { balanced_tokens(&existing, &name, 1.0, count) } else { random_tokens("new", count) };
        prop_assert_eq!(tokens.len(), count as usize);
        let number = (0..).map(ShardNumber).find(|number| shards.iter().all(|s| s.number != *number)).unwrap();
        let mut shards = shards;
        shards.push(ShardSpec { name, tokens, ..common::shard(number.0) });
        shards.last_mut().unwrap().number = number;
        let after = common::build(common::keyspace(Rule::Ring, shards));
        for key in keys {
            let (old, new) = (before.owner(key.as_bytes()).ok(), after.owner(key.as_bytes()).ok());
            prop_assert!(new == Some(number) || old == new, "key {} moved from {:?} to {:?}", key, old, new);
        }
        // Nothing is taken from one bystander to give to another; removing it is the same, read backwards.
        let difference = shardmap_core::diff::diff(&before, &after).unwrap();
        prop_assert!(difference.flows.iter().all(|flow| flow.gainer.as_ref().is_some_and(|g| g.as_str() == "new")));
        let difference = shardmap_core::diff::diff(&after, &before).unwrap();
        prop_assert!(difference.flows.iter().all(|flow| flow.giver.as_ref().is_some_and(|g| g.as_str() == "new")));
    }

    #[test]
    fn the_difference_is_what_lookups_see(a in shards(), b in shards(), tokens in vec(prop_oneof![0..10_u32, any::<u32>()], 50)) {
        let (old, new) = (common::build(common::keyspace(Rule::Ring, a)), common::build(common::keyspace(Rule::Ring, b)));
        let difference = shardmap_core::diff::diff(&old, &new).unwrap();
        let total: u64 = difference.arcs.iter().map(shardmap_core::diff::ArcMove::length).sum();
        prop_assert_eq!(difference.moved.unwrap().numerator, total);
        prop_assert_eq!(difference.flows.iter().map(|flow| flow.share.numerator).sum::<u64>(), total);
        for token in tokens {
            let name = |map: &shardmap_core::map::KeyspaceMap| {
                map.owner_of_token(Token(token)).and_then(|n| map.shard(n)).map(|s| s.name.clone())
            };
            let within = |arc: &&shardmap_core::diff::ArcMove| {
                u64::from(token.wrapping_sub(arc.after.0).wrapping_sub(1)) < arc.length()
            };
            let found: Vec<_> = difference.arcs.iter().filter(within).collect();
            if name(&old) == name(&new) {
                prop_assert!(found.is_empty(), "token={}", token);
            } else {
                prop_assert_eq!(found.len(), 1, "token={}", token);
                prop_assert_eq!((&found[0].giver, &found[0].gainer), (&name(&old), &name(&new)));
            }
        }
    }

    #[test]
    fn shares_add_up_to_the_ring(shards in shards()) {
        let map = common::build(common::keyspace(Rule::Ring, shards));
        let whole: u64 = ring_balance(&map).shards.iter().map(|shard| shard.share.numerator).sum();
        prop_assert_eq!(whole, if map.points().is_empty() { 0 } else { 1 << 32 });
    }

    #[test]
    fn vnode_tokens_are_the_definition(name in "[a-z#0-9]{1,20}", index: u32) {
        prop_assert_eq!(vnode_token(&name, index), Token::of(format!("{name}#{index}").as_bytes()));
    }

    #[test]
    fn canonical_text_of_times_and_numbers_is_exact(micros: i64, seconds in -200_000_000_000..9_000_000_000_000_i64, digits in "-?[1-9][0-9]{0,9}(\\.[0-9]{1,9})?") {
        let mut buf = CanonicalBuf::new();
        let text = String::from_utf8(KeyValue::Timestamp(micros).canonical(&mut buf).to_vec()).unwrap();
        if (i64::MIN + 1..i64::MAX - 946_684_800_000_000).contains(&micros) {
            // Back again: sign, seconds, micros.
            let (sign, plain) = text.strip_prefix('-').map_or((1, &*text), |plain| (-1, plain));
            let (whole, fraction) = plain.split_once('.').unwrap_or((plain, ""));
            prop_assert!(!fraction.ends_with('0') && fraction.len() <= 6);
            let value: i128 = format!("{whole}{fraction:0<6}").parse().unwrap();
            prop_assert_eq!(sign * value, i128::from(micros) + 946_684_800_000_000);
        }
        let whole = seconds * 1_000_000 - 946_684_800_000_000;
        let want = seconds.to_string();
        prop_assert_eq!(KeyValue::Timestamptz(whole).canonical(&mut buf), want.as_bytes());
        // Trailing zeros of the fraction change nothing.
        let padded = if digits.contains('.') { format!("{digits}00") } else { format!("{digits}.000") };
        let (mut one, mut other) = (CanonicalBuf::new(), CanonicalBuf::new());
        prop_assert_eq!(KeyValue::Numeric(&digits).canonical(&mut one), KeyValue::Numeric(&padded).canonical(&mut other));
    }
}

/// Shares of random vnodes are gaps between uniform positions: of n points in all, a shard of v has mean v/n and
/// variance v (n - v) / (n^2 (n + 1)) of the ring. Source: order statistics of the uniform distribution.
#[test]
fn twice_the_weight_owns_twice_as_much() {
    let rings = 200_u16;
    let deviations = (0..rings).map(|ring| {
        let mut spec = common::keyspace(Rule::Ring, (0..8).map(common::shard).collect());
        spec.shards[0].weight = 2.0;
        for shard in &mut spec.shards {
            shard.name = ShardName::from(format!("ring-{ring}-{}", shard.name));
            shard.tokens = random_tokens(shard.name.as_str(), vnode_count(shard.weight, 100).unwrap());
        }
        let balance = ring_balance(&common::build(spec));
        let (v, n) = (200.0, 900.0_f64);
        let deviation = (v * (n - v) / (n * n * (n + 1.0))).sqrt();
        assert_eq!(balance.shards[0].vnodes, 200);
        (balance.shards[0].share.value() - v / n) / deviation
    });
    let found = Spread::of(&deviations.collect::<Vec<f64>>()).unwrap();
    // Three standard errors of a mean and of a standard deviation of so many.
    let error = f64::from(rings).sqrt().recip();
    assert!(found.mean.abs() < 3.0 * error, "in standard deviations: {found:?}");
    assert!((found.stdev - 1.0).abs() < 3.0 * error / 2.0_f64.sqrt(), "in standard deviations: {found:?}");
}
