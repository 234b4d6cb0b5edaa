//! The golden figures: frozen, because a changed figure moves live data.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use shardmap_core::balance::simulate;
use shardmap_core::capacity::{
    compare_topologies, fanout_sampling_error, fanout_tail, plan_capacity, InstanceClass, TopologyInputs,
};
use shardmap_core::map::Strategy;

#[test]
fn keys_moved_when_six_shards_become_seven() {
    for (vnodes, ring) in [(1, 1_924), (100, 2_595)] {
        let simulation = simulate(20_000, 6, vnodes).unwrap();
        assert_eq!(simulation.moved_ring, ring, "vnodes={vnodes}");
        assert_eq!(simulation.moved_modulo, 17_098);
    }
}

#[test]
fn balance_by_number_of_vnodes() {
    for (vnodes, min, max, stdev, max_over_mean) in [
        (1, 1_028.0, 5_885.0, "1663", "1.77"),
        (8, 2_170.0, 4_218.0, "713", "1.27"),
        (32, 2_634.0, 4_290.0, "538", "1.29"),
        (100, 3_187.0, 3_574.0, "136", "1.07"),
        (256, 3_140.0, 3_696.0, "213", "1.11"),
    ] {
        let spread = simulate(20_000, 6, vnodes).unwrap().spread;
        assert_eq!((spread.min, spread.max), (min, max), "vnodes={vnodes}");
        assert_eq!(format!("{:.0}", spread.mean), "3333", "vnodes={vnodes}");
        assert_eq!(format!("{:.0}", spread.stdev), stdev, "vnodes={vnodes}");
        assert_eq!(format!("{:.2}", spread.max_over_mean), max_over_mean, "vnodes={vnodes}");
    }
}

/// The maps give the same counts as the experiment, which builds rings of its own.
#[test]
fn maps_agree_with_the_experiment() {
    let owners = |strategy, count| {
        let map = common::build(common::random(strategy, count, 100));
        let owner = move |key: u32| map.owner(format!("key-{key}").as_bytes()).unwrap();
        (0..20_000).map(owner).collect::<Vec<_>>()
    };
    for (strategy, want) in [(Strategy::Ring, 2_595), (Strategy::Modulo, 17_098)] {
        let (six, seven) = (owners(strategy, 6), owners(strategy, 7));
        assert_eq!(six.iter().zip(&seven).filter(|(a, b)| a != b).count(), want, "{strategy}");
    }
}

/// Owners of a few keys, from Python's hashlib.
#[test]
fn owners_of_keys() {
    let ring = common::build(common::random(Strategy::Ring, 8, 100));
    let modulo = common::build(common::random(Strategy::Modulo, 8, 100));
    for (key, by_ring, by_modulo) in include!("golden_owners.in") {
        assert_eq!(ring.owner(key.as_bytes()).unwrap().0, by_ring, "ring, {key}");
        assert_eq!(modulo.owner(key.as_bytes()).unwrap().0, by_modulo, "modulo, {key}");
    }
}

#[test]
fn capacity() {
    let plan = plan_capacity(500_000.0, 20_000.0, 0.30).unwrap();
    assert_eq!((plan.minimum, plan.with_headroom), (25, 33));
    let plan = plan_capacity(10.0, 1.0, 0.1).unwrap();
    assert_eq!((plan.minimum, plan.with_headroom), (10, 11), "10 * 1.1 is above 11 in binary");
    let plan = plan_capacity(1.1, 0.1, 0.0).unwrap();
    assert_eq!((plan.minimum, plan.with_headroom), (11, 11), "1.1 / 0.1 is above 11 in binary");
    for (target, each, headroom) in [
        (0.0, 1.0, 0.0),
        (1.0, 0.0, 0.0),
        (1.0, 1.0, -0.1),
        (f64::NAN, 1.0, 0.0),
        (f64::INFINITY, 1.0, 0.0),
        (1e15, 1e-3, 0.0),
    ] {
        assert!(plan_capacity(target, each, headroom).is_err(), "{target} / {each} + {headroom}");
    }
}

fn inputs() -> TopologyInputs {
    TopologyInputs {
        target: 400_000.0,
        small: InstanceClass { capacity: 20_000.0, price_per_hour: 0.68 },
        large: InstanceClass { capacity: 100_000.0, price_per_hour: 0.68 * 5.0 },
        replicas_per_primary: 1,
        operations_per_instance: 150.0,
        licence_per_instance: 0.0,
        hours_per_month: 730.0,
    }
}

#[test]
fn topologies() {
    let found = compare_topologies(&inputs()).unwrap();
    let (small, large) = (found.small, found.large);
    assert_eq!((small.primaries, small.instances, small.splits_to_double), (20, 40, 20));
    assert_eq!((large.primaries, large.instances, large.splits_to_double), (4, 8, 4));
    let money = |value: f64| format!("{value:.0}");
    assert_eq!([small.compute, small.operations, small.total].map(money), ["19856", "6000", "25856"]);
    assert_eq!([large.compute, large.operations, large.total].map(money), ["19856", "1200", "21056"]);
    assert_eq!([small.writes_lost, large.writes_lost], [0.05, 0.25]);
    assert_eq!((money(found.saving), format!("{:.1}", found.saving_part * 100.0)), ("4800".into(), "18.6".into()));
}

#[test]
fn a_licence_an_instance_counts_for_every_instance() {
    let found = compare_topologies(&TopologyInputs { licence_per_instance: 100.0, ..inputs() }).unwrap();
    assert_eq!((found.small.licences, found.large.licences), (4_000.0, 800.0));
    assert_eq!(format!("{:.0}", found.saving), "8000");
    assert!(compare_topologies(&TopologyInputs { hours_per_month: 0.0, ..inputs() }).is_err());
}

/// The golden ratios were sampled, 8000 draws for each width and for one shard; exact ones must agree within the
/// sampling error. The draws were cut off at 0.1, which cannot change a 99th percentile of 8.49.
#[test]
fn tail_of_a_fan_out() {
    let (mean, sd) = (5.0, 1.5);
    let one = fanout_tail(mean, sd, &[1]).unwrap()[0];
    assert_eq!(format!("{:.3} {}", one.p99, one.ratio), "8.490 1");
    let tails = fanout_tail(mean, sd, &[8, 32, 128, 512]).unwrap();
    let exact = ["1.1229", "1.1931", "1.2568", "1.3155"];
    for ((tail, sampled), exact) in tails.iter().zip([1.13, 1.19, 1.26, 1.33]).zip(exact) {
        // Errors of a quotient add up in squares; two standard errors, and half a unit of the last digit given.
        let relative = |p99: f64, width| fanout_sampling_error(sd, width, 8_000) / p99;
        let error = tail.ratio * relative(tail.p99, tail.width).hypot(relative(one.p99, 1));
        let bound = 2.0 * error + 0.005;
        assert!((tail.ratio - sampled).abs() <= bound, "N={}: {} against {sampled} +- {bound}", tail.width, tail.ratio);
        assert!(bound < 0.03, "N={}: a bound of {bound} would prove nothing", tail.width);
        assert_eq!(format!("{:.4}", tail.ratio), exact, "N={}", tail.width);
    }
    assert_eq!(fanout_tail(mean, 0.0, &[1, 512]).unwrap()[1].ratio, 1.0);
    for (mean, sd, width) in [(0.0, 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, 0), (f64::NAN, 1.0, 1)] {
        assert!(fanout_tail(mean, sd, &[width]).is_err(), "{mean} {sd} {width}");
    }
}
