//! Who is relieved by whom, and of which keys.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use shardmap_core::balance::ring_balance;
use shardmap_core::burden::{fold, relieve, Burden, Limits, Measures};
use shardmap_core::diff::diff;
use shardmap_core::export::{Allocation, KeyspaceExport};
use shardmap_core::ids::ShardName;
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, RangeOrder, RangeSpec, ShardState, Strategy as Rule};
use shardmap_core::parts::{parts, Keys};
use shardmap_core::reassign::wanted;
use shardmap_core::relief::{give_from, give_part};

fn burdens() -> impl Strategy<Value = Vec<Burden>> {
    let measures = prop_oneof![Just([0.0; 3]), [0.0..1e6, 0.0..1e9, 0.0..1e3], [0.0..1e2, 0.0..1e9, 0.0..1e1]];
    let state =
        prop_oneof![4 => Just(ShardState::Active), 1 => Just(ShardState::Joining), 1 => Just(ShardState::Draining)];
    vec((measures, state), 1..10).prop_map(|shards| {
        let burden = |(n, (measures, state))| Burden { shard: ShardName::from(format!("shard-{n}")), state, measures };
        shards.into_iter().enumerate().map(burden).collect()
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    (proptest::option::of(1.0..1e6), proptest::option::of(1.0..1e9), proptest::option::of(0.1..1e3))
        .prop_map(|(a, b, c)| [a, b, c])
}

/// The definition, word by word.
fn level(measures: &Measures, limits: &Limits) -> f64 {
    (0..3).filter_map(|n| limits[n].map(|limit| measures[n] / limit)).fold(0.0, f64::max)
}

fn space(spec: KeyspaceSpec) -> KeyspaceExport {
    let (wanted_tokens, wanted_slots) = (BTreeMap::new(), None);
    let (vnodes, allocation, options) = (100, Allocation::Random, BTreeMap::new());
    KeyspaceExport { spec, vnodes, allocation, options, wanted_tokens, wanted_slots }
}

fn build(space: &KeyspaceExport) -> KeyspaceMap {
    common::build(space.spec.clone())
}

fn share(map: &KeyspaceMap, name: &ShardName) -> f64 {
    ring_balance(map).shards.iter().find(|shard| shard.shard == *name).unwrap().share.value()
}

proptest! {
    #[test]
    fn the_hot_give_and_nobody_gets_worse_than_they_were(shards in burdens(), most in limits(), named in proptest::option::of(0..10_usize)) {
        let target = named.and_then(|n| shards.get(n)).map(|shard| shard.shard.clone());
        let reliefs = relieve(&shards, &most, target.as_ref());
        let mut after: BTreeMap<_, _> = shards.iter().map(|shard| (shard.shard.clone(), shard.measures)).collect();
        let state = |name: &ShardName| shards.iter().find(|shard| shard.shard == *name).unwrap().state;
        let worst = |now: &BTreeMap<ShardName, Measures>| now.values().map(|m| level(m, &most)).fold(0.0, f64::max);
        let (before, first) = (after.clone(), worst(&after));
        for relief in &reliefs {
            prop_assert!(level(&before[&relief.giver], &most) > 1.0 && state(&relief.giver) == ShardState::Active);
            prop_assert!(level(&before[&relief.gainer], &most) <= 1.0 && state(&relief.gainer) != ShardState::Draining);
            prop_assert!(target.is_none() || target.as_ref() == Some(&relief.gainer));
            prop_assert!(relief.part >= 0.01 && relief.part <= 0.5, "{}", relief.part);
            // Not relieved further than it takes.
            prop_assert!(level(&after[&relief.giver], &most) > 1.0);
            let given = after[&relief.giver].map(|value| value * relief.part);
            for (n, given) in given.iter().enumerate() {
                after.get_mut(&relief.giver).unwrap()[n] -= given;
                after.get_mut(&relief.gainer).unwrap()[n] += given;
            }
            prop_assert!(level(&after[&relief.gainer], &most) <= level(&after[&relief.giver], &most) * (1.0 + 1e-9));
        }
        prop_assert!(worst(&after) <= first * (1.0 + 1e-9));
        // Who was hot and still is has nobody to give to who would not come out as badly.
        let may_gain = |o: &&Burden| o.state != ShardState::Draining && level(&before[&o.shard], &most) <= 1.0
            && target.as_ref().is_none_or(|target| *target == o.shard);
        let was_hot = |s: &&Burden| s.state == ShardState::Active && level(&before[&s.shard], &most) > 1.0;
        for hot in shards.iter().filter(was_hot).map(|s| &after[&s.shard]).filter(|hot| level(hot, &most) > 1.0) {
            for cool in shards.iter().filter(may_gain).map(|o| &after[&o.shard]) {
                let moved: Measures = [0, 1, 2].map(|n| cool[n] + hot[n] * 0.2);
                let kept: Measures = hot.map(|value| value * 0.8);
                prop_assert!(level(&moved, &most) > level(&kept, &most), "{:?} to {:?}", hot, cool);
            }
        }
    }

    #[test]
    fn the_cold_are_folded_until_none_is(shards in burdens(), least in limits()) {
        let folded = fold(&shards, &least);
        let mut staying: Vec<Burden> = shards.iter().filter(|shard| shard.state == ShardState::Active).cloned().collect();
        for name in &folded {
            prop_assert!(staying.len() > 1);
            let at = staying.iter().position(|shard| shard.shard == *name).unwrap();
            let cold = staying.remove(at);
            prop_assert!((0..3).all(|n| least[n].is_none_or(|limit| cold.measures[n] < limit)));
            let others = staying.len() as f64;
            for shard in &mut staying {
                (0..3).for_each(|n| shard.measures[n] += cold.measures[n] / others);
            }
        }
        let is_cold = |shard: &Burden| (0..3).all(|n| least[n].is_none_or(|limit| shard.measures[n] < limit));
        let limited = least.iter().any(Option::is_some);
        prop_assert!(staying.len() <= 1 || !limited || !staying.iter().any(is_cold));
        prop_assert!(limited || folded.is_empty());
    }

    #[test]
    fn a_part_goes_to_the_gainer_and_nothing_else_moves(modulo: bool, shards in 2..9_u16, vnodes in 1..40_u32, part in 0.05..0.5_f64, joins: bool) {
        let mut before = space(common::random(if modulo { Rule::Modulo } else { Rule::Ring }, shards, vnodes));
        if joins {
            let last = before.spec.shards.last_mut().unwrap();
            (last.state, last.tokens) = (ShardState::Joining, Vec::new());
        }
        let (giver, gainer) = (before.spec.shards[0].name.clone(), before.spec.shards.last().unwrap().name.clone());
        let after = give_part(&before, &giver, &gainer, part).unwrap().unwrap();
        let (old, new) = (build(&before), build(&after));
        let flows = diff(&old, &new).unwrap().flows;
        prop_assert_eq!(flows.len(), 1);
        prop_assert_eq!((flows[0].giver.as_ref(), flows[0].gainer.as_ref()), (Some(&giver), Some(&gainer)));
        let given = flows[0].share.value() / share(&old, &giver);
        // A shard has one slot here, which is cut in 16 at most.
        prop_assert!((given - part).abs() <= if modulo { 0.051 } else { 1e-6 }, "{} for {}", given, part);
        prop_assert!(wanted(&after).unwrap().1);
    }

    #[test]
    fn keys_from_a_bound_on_change_hands(cut in -60..60_i64, keys in vec(-70..70_i64, 30)) {
        let range = |lower: Option<i64>, upper: Option<i64>, shard: &str| RangeSpec {
            lower: lower.map(|b| b.to_string()), upper: upper.map(|b| b.to_string()), shard: shard.into(), version: 1,
        };
        let mut before = space(common::keyspace(Rule::Range(RangeOrder::Integer), (0..3).map(common::shard).collect()));
        before.spec.ranges = vec![range(None, Some(-40), "shard-0"), range(Some(-40), Some(0), "shard-1"), range(Some(10), Some(50), "shard-0")];
        let (giver, gainer) = (ShardName::from("shard-0"), ShardName::from("shard-2"));
        let Some(after) = give_from(&before, &giver, &gainer, &cut.to_string()).unwrap() else {
            prop_assert!(cut >= 50);
            return Ok(());
        };
        let owner = |map: &KeyspaceMap, key: i64| {
            map.owner(key.to_string().as_bytes()).ok().and_then(|n| map.shard(n)).map(|s| s.name.clone())
        };
        for key in keys {
            let old = owner(&build(&before), key);
            let want = if old.as_ref() == Some(&giver) && key >= cut { Some(gainer.clone()) } else { old };
            prop_assert_eq!(owner(&build(&after), key), want, "key {}", key);
        }
    }
}

#[test]
fn examples() {
    let shard = |n: u16, state, rows| Burden {
        shard: ShardName::from(format!("shard-{n}")),
        state,
        measures: [rows, 0.0, 0.0],
    };
    let (active, joining) = (ShardState::Active, ShardState::Joining);
    let text = |shards: &[Burden], most: f64| {
        let reliefs = relieve(shards, &[Some(most), None, None], None);
        reliefs.iter().map(|r| format!("{} {} {:.3}", r.giver, r.gainer, r.part)).collect::<Vec<_>>().join(", ")
    };
    // Half to an empty one; less to one that has some; again while it is too much.
    assert_eq!(
        text(&[shard(0, active, 120.0), shard(1, active, 90.0), shard(2, joining, 0.0)], 100.0),
        "shard-0 shard-2 0.500"
    );
    assert_eq!(text(&[shard(0, active, 120.0), shard(1, active, 60.0)], 100.0), "shard-0 shard-1 0.250");
    assert_eq!(
        text(&[shard(0, active, 400.0), shard(1, active, 0.0), shard(2, active, 0.0)], 100.0),
        "shard-0 shard-1 0.333, shard-0 shard-2 0.500"
    );
    assert_eq!(text(&[shard(0, active, 100.0), shard(1, active, 0.0)], 100.0), "");
    assert_eq!(text(&[shard(0, active, 120.0), shard(1, active, 120.0)], 100.0), "");
    let folded = |rows: &[f64], least: f64| {
        let shards: Vec<_> = (0..).zip(rows).map(|(n, rows)| shard(n, active, *rows)).collect();
        fold(&shards, &[Some(least), None, None]).iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(folded(&[900.0; 10], 1000.0), "shard-0");
    assert_eq!(folded(&[5.0, 2000.0, 1.0], 1000.0), "shard-2, shard-0");
    assert_eq!(folded(&[0.0; 3], 1000.0), "shard-0, shard-1");
}

/// Ranges of shards that are to be emptied go to the neighbour's owner, in one piece where they touch.
#[test]
fn ranges_go_to_the_neighbours() {
    let range = |lower: Option<&str>, upper: Option<&str>, shard: &str| RangeSpec {
        lower: lower.map(Into::into),
        upper: upper.map(Into::into),
        shard: shard.into(),
        version: 1,
    };
    for (draining, ranges, want) in [
        (
            vec![1],
            vec![
                range(Some("0"), Some("10"), "shard-0"),
                range(Some("10"), Some("20"), "shard-1"),
                range(Some("20"), Some("30"), "shard-2"),
            ],
            "[10, 20) shard-1 shard-0",
        ),
        (
            vec![0],
            vec![
                range(Some("20"), Some("30"), "shard-2"),
                range(Some("10"), Some("20"), "shard-0"),
                range(None, Some("5"), "shard-1"),
            ],
            "[10, 20) shard-0 shard-2",
        ),
        (
            vec![0, 1],
            vec![
                range(None, Some("10"), "shard-0"),
                range(Some("10"), Some("20"), "shard-1"),
                range(Some("20"), None, "shard-2"),
            ],
            "[-, 10) shard-0 shard-2, [10, 20) shard-1 shard-2",
        ),
        (
            vec![0],
            vec![range(None, Some("10"), "shard-0"), range(Some("10"), None, "shard-0")],
            "[-, -) shard-0 shard-1",
        ),
    ] {
        let mut space = space(common::keyspace(Rule::Range(RangeOrder::Integer), (0..3).map(common::shard).collect()));
        space.spec.ranges = ranges;
        for n in draining {
            space.spec.shards[n].state = ShardState::Draining;
        }
        let (wish, is_so) = wanted(&space).unwrap();
        assert!(!is_so);
        let found = parts(&build(&space), &build(&wish)).unwrap();
        let bound = |bound: &Option<String>| bound.clone().unwrap_or_else(|| "-".into());
        let text = |keys: &Keys| match keys {
            Keys::Range { lower, upper } => format!("[{}, {})", bound(lower), bound(upper)),
            other => format!("{other:?}"),
        };
        let found: Vec<_> =
            found.iter().map(|part| format!("{} {} {}", text(&part.keys), part.giver, part.gainer)).collect();
        assert_eq!(found.join(", "), want);
        assert!(wanted(&wish).unwrap().1);
    }
}
