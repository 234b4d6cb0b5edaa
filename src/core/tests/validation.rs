//! What is no map is refused, by name.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use shardmap_core::error::RouteError;
use shardmap_core::ids::{KeyspaceName, ShardName, ShardNumber};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, RangeOrder, RangeSpec, ShardState, Strategy};

fn two() -> KeyspaceSpec {
    common::random(Strategy::Ring, 2, 4)
}

fn range(lower: Option<&str>, upper: Option<&str>, shard: &str) -> RangeSpec {
    RangeSpec { lower: lower.map(Into::into), upper: upper.map(Into::into), shard: shard.into(), version: 1 }
}

fn ranges(order: RangeOrder, ranges: &[RangeSpec]) -> KeyspaceSpec {
    KeyspaceSpec { strategy: Strategy::Range(order), ranges: ranges.to_vec(), ..two() }
}

fn slots(slots: Vec<ShardNumber>) -> KeyspaceSpec {
    KeyspaceSpec { slots: Some(slots), ..common::keyspace(Strategy::Modulo, (0..2).map(common::shard).collect()) }
}

#[test]
fn errors_name_what_is_wrong() {
    let with = |change: &dyn Fn(&mut KeyspaceSpec)| {
        let mut spec = two();
        change(&mut spec);
        spec
    };
    let integers = |given: &[RangeSpec]| ranges(RangeOrder::Integer, given);
    for (spec, state, message) in [
        (with(&|s| s.name = KeyspaceName::from("")), "42602", r#"name "" in keyspace "" is not valid"#),
        (with(&|s| s.shards[1].name = "a\0".into()), "42602", "name \"a\0\" in keyspace \"main\" is not valid"),
        (with(&|s| s.shards[1].name = "shard-0".into()), "42710", r#"keyspace "main" has shard "shard-0" twice"#),
        (
            with(&|s| s.shards[1].number = ShardNumber(0)),
            "42710",
            r#"shards "shard-0" and "shard-1" of keyspace "main" both have number 0"#,
        ),
        (
            with(&|s| s.shards[1].number = ShardNumber(1024)),
            "54000",
            r#"number 1024 of shard "shard-1" in keyspace "main" is out of range"#,
        ),
        (
            with(&|s| s.shards[1].weight = f64::NAN),
            "22023",
            r#"weight NaN of shard "shard-1" in keyspace "main" is not valid"#,
        ),
        (
            with(&|s| s.shards[1].weight = 0.0),
            "22023",
            r#"weight 0 of shard "shard-1" in keyspace "main" is not valid"#,
        ),
        (
            with(&|s| s.shards[1].tokens = vec![1; 65_537]),
            "54000",
            r#"shard "shard-1" in keyspace "main" would have 65537 tokens"#,
        ),
        (
            with(&|s| s.pins = vec![("k".into(), "gone".into())]),
            "42704",
            r#"key "k" is pinned to shard "gone", which keyspace "main" does not have"#,
        ),
        (
            with(&|s| s.pins = vec![("k".into(), "shard-0".into()), ("k".into(), "shard-1".into())]),
            "42710",
            r#"key "k" of keyspace "main" is pinned twice"#,
        ),
        (with(&|s| s.slots = Some(vec![ShardNumber(0)])), "55000", r#"keyspace "main" does not use slots"#),
        (slots(vec![]), "54000", r#"keyspace "main" would have 0 slots"#),
        (slots(vec![ShardNumber(0); 65_537]), "54000", r#"keyspace "main" would have 65537 slots"#),
        (
            slots(vec![ShardNumber(0), ShardNumber(2)]),
            "42704",
            r#"a slot of keyspace "main" belongs to shard number 2, which takes no part in it"#,
        ),
        (
            with(&|s| {
                *s = slots(vec![ShardNumber(1)]);
                s.shards[1].state = ShardState::Joining;
            }),
            "42704",
            r#"a slot of keyspace "main" belongs to shard number 1, which takes no part in it"#,
        ),
        (with(&|s| s.ranges = vec![range(None, None, "shard-0")]), "55000", r#"keyspace "main" does not use ranges"#),
        (
            integers(&[range(Some("1"), None, "gone")]),
            "42704",
            r#"range [1, infinity) belongs to shard "gone", which keyspace "main" does not have"#,
        ),
        (
            integers(&[range(Some("007"), None, "shard-0")]),
            "22P02",
            r#"range bound "007" of keyspace "main" is not an integer"#,
        ),
        (
            integers(&[range(Some("9"), Some("9"), "shard-0")]),
            "42P17",
            r#"range [9, 9) of shard "shard-0" in keyspace "main" holds no key"#,
        ),
        (
            integers(&[range(Some("9"), Some("10"), "shard-0"), range(None, Some("10"), "shard-1")]),
            "42P17",
            r#"range [-infinity, 10) of shard "shard-1" and range [9, 10) of shard "shard-0" in keyspace "main" overlap"#,
        ),
        (
            integers(&[range(None, Some("1"), "shard-0"), range(None, Some("2"), "shard-0")]),
            "42P17",
            r#"range [-infinity, 1) of shard "shard-0" and range [-infinity, 2) of shard "shard-0" in keyspace "main" overlap"#,
        ),
        (
            integers(&[range(Some("1"), None, "shard-0"), range(Some("2"), None, "shard-1")]),
            "42P17",
            r#"range [1, infinity) of shard "shard-0" and range [2, infinity) of shard "shard-1" in keyspace "main" overlap"#,
        ),
    ] {
        let error = KeyspaceMap::build(spec).unwrap_err();
        assert_eq!((error.to_string().as_str(), error.sqlstate()), (message, state));
        assert!(error.hint().ends_with('.'), "{error}");
    }
}

#[test]
fn ranges_by_bytes_and_by_integer() {
    let bytes = [range(Some("m"), None, "shard-1"), range(None, Some("b"), "shard-0")];
    let map = common::build(ranges(RangeOrder::Bytes, &bytes));
    let not_covered = |key: &str| Err(RouteError::NotCovered { keyspace: "main".into(), key: key.into() });
    for (key, want) in [
        ("", Ok(ShardNumber(0))),
        ("azzz", Ok(ShardNumber(0))),
        ("b", not_covered("b")),
        ("lzzz", not_covered("lzzz")),
        ("m", Ok(ShardNumber(1))),
        ("z", Ok(ShardNumber(1))),
    ] {
        assert_eq!(map.owner(key.as_bytes()), want, "{key}");
    }
    let map = common::build(ranges(RangeOrder::Integer, &[range(Some("-5"), Some("10"), "shard-0")]));
    let not_an_integer = Err(RouteError::NotAnInteger { keyspace: "main".into(), key: "x".into() });
    for (key, want) in [
        ("-5", Ok(ShardNumber(0))),
        ("9", Ok(ShardNumber(0))),
        ("10", not_covered("10")),
        ("-6", not_covered("-6")),
        ("x", not_an_integer),
    ] {
        assert_eq!(map.owner(key.as_bytes()), want, "{key}");
    }
    assert_eq!(common::build(ranges(RangeOrder::Bytes, &[])).owner(b"k"), not_covered("k"));
}

#[test]
fn keyspaces_in_which_nothing_is_owned() {
    for strategy in [Strategy::Ring, Strategy::Modulo] {
        let empty = common::build(common::keyspace(strategy, vec![]));
        let error = empty.owner(b"k").unwrap_err();
        assert_eq!(error.to_string(), r#"keyspace "main" has no active shard"#);
        assert_eq!(error.sqlstate(), "55000");
        assert!(empty.is_empty());
    }
    // Registered, but without tokens.
    assert!(common::build(common::keyspace(Strategy::Ring, vec![common::shard(0)])).owner(b"k").is_err());
    let mut joining = common::keyspace(Strategy::Modulo, vec![common::shard(0)]);
    joining.shards[0].state = ShardState::Joining;
    assert!(common::build(joining).owner(b"k").is_err());
}

#[test]
fn pins_come_first() {
    for strategy in [Strategy::Ring, Strategy::Modulo, Strategy::Range(RangeOrder::Bytes)] {
        let mut spec = common::random(strategy, 8, 16);
        spec.pins = (0..100).map(|key| (format!("key-{key}"), ShardName::from("shard-5"))).collect();
        let map = common::build(spec);
        assert!((0..100).all(|key| map.owner(format!("key-{key}").as_bytes()) == Ok(ShardNumber(5))), "{strategy}");
        assert!((100..200).any(|key| map.owner(format!("key-{key}").as_bytes()) != Ok(ShardNumber(5))), "{strategy}");
    }
}

#[test]
fn shards_by_number_and_name() {
    let map = common::build(common::random(Strategy::Ring, 12, 1));
    assert_eq!((map.len(), map.version(), map.name().as_str()), (12, 1, "main"));
    assert!(map.shards().map(|shard| shard.number.0).eq(0..12));
    for number in 0..12 {
        let shard = map.shard(ShardNumber(number)).unwrap();
        assert_eq!(map.shard_by_name(shard.name.as_str()), Some(shard));
    }
    assert_eq!((map.shard(ShardNumber(12)), map.shard_by_name("shard-12")), (None, None));
}
