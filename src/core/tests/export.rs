//! What is exported is imported exactly.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeMap;

use proptest::prelude::*;
use shardmap_core::export::{from_json, to_json, Allocation, ExportError, KeyspaceExport};
use shardmap_core::ids::{ShardName, ShardNumber};
use shardmap_core::map::{KeyspaceSpec, RangeOrder, RangeSpec, ShardState, Strategy as Rule};

fn export(spec: KeyspaceSpec) -> KeyspaceExport {
    let (wanted_tokens, wanted_slots) = (BTreeMap::new(), None);
    let (vnodes, allocation, options) = (100, Allocation::Balanced, BTreeMap::new());
    KeyspaceExport { spec, vnodes, allocation, options, wanted_tokens, wanted_slots }
}

/// Frozen: other coordinators read it.
#[test]
fn the_layout() {
    let mut spec = common::random(Rule::Range(RangeOrder::Integer), 1, 1);
    spec.pins = vec![("a\"b\\".into(), "shard-0".into())];
    spec.ranges = vec![RangeSpec { lower: None, upper: Some("5".into()), shard: "shard-0".into(), version: 3 }];
    let mut keyspace = export(spec);
    keyspace.options.insert("shard-0".into(), BTreeMap::from([("host".into(), "a".into())]));
    let json = to_json(&[keyspace.clone()]).unwrap();
    assert_eq!(
        json,
        r#"{"layout":1,"keyspaces":[{"name":"main","strategy":"range","range_order":"integer","version":1,"vnodes":100,"allocation":"balanced","shards":[{"name":"shard-0","number":0,"weight":1.0,"state":"active","tokens":[1691068269],"options":{"host":"a"}}],"pins":[{"key":"a\"b\\","shard":"shard-0"}],"ranges":[{"lower":null,"upper":"5","shard":"shard-0","version":3}]}]}"#
    );
    assert_eq!(from_json(&json).unwrap(), [keyspace]);
}

/// Frozen too. What is not there is not written: maps without slots read as they always did.
#[test]
fn slots_and_what_is_wanted() {
    let mut keyspace = export(common::keyspace(Rule::Modulo, vec![common::shard(3)]));
    keyspace.spec.slots = Some(vec![ShardNumber(3); 2]);
    keyspace.wanted_slots = Some(vec![ShardNumber(3)]);
    keyspace.wanted_tokens.insert("shard-3".into(), vec![7]);
    let json = to_json(&[keyspace.clone()]).unwrap();
    assert_eq!(
        json,
        r#"{"layout":1,"keyspaces":[{"name":"main","strategy":"modulo","range_order":null,"version":1,"vnodes":100,"allocation":"balanced","shards":[{"name":"shard-3","number":3,"weight":1.0,"state":"active","tokens":[],"wanted_tokens":[7],"options":null}],"pins":[],"ranges":[],"slots":[3,3],"wanted_slots":[3]}]}"#
    );
    assert_eq!(from_json(&json).unwrap(), [keyspace]);
}

#[test]
fn what_is_refused() {
    let good = to_json(&[export(common::random(Rule::Ring, 2, 2))]).unwrap();
    for (json, message) in [
        (good.replace("\"layout\":1", "\"layout\":2"), "exported map has layout 2, but this version reads layout 1"),
        (good.replace("\"layout\":1,", ""), "exported map names no layout"),
        (good.replace("\"layout\":1", "\"layout\":\"1\""), "exported map names no layout"),
        ("[]".into(), "exported map names no layout"),
        ("{".into(), "exported map is malformed: EOF while parsing an object at line 1 column 1"),
        (good.replace("\"pins\":[]", "\"pin\":[]"), "exported map is malformed: unknown field `pin`, expected one of `name`, `strategy`, `range_order`, `version`, `vnodes`, `allocation`, `shards`, `pins`, `ranges`, `slots`, `wanted_slots`"),
        (good.replace("\"ring\"", "\"range\""), "exported map is malformed: range_order is for strategy \"range\", which needs it"),
        (good.replace("shard-1", "shard-0"), "keyspace \"main\" has shard \"shard-0\" twice"),
    ] {
        assert_eq!(from_json(&json).unwrap_err().to_string(), message);
    }
    let keyspace = export(common::random(Rule::Ring, 2, 2));
    assert!(matches!(to_json(&[keyspace.clone(), keyspace.clone()]), Err(ExportError::DuplicateKeyspace(_))));
    let options = BTreeMap::from([(ShardName::from("gone"), BTreeMap::new())]);
    assert!(matches!(to_json(&[KeyspaceExport { options, ..keyspace }]), Err(ExportError::UnknownShard(..))));
}

proptest! {
    #[test]
    fn round_trip(
        weights in prop::collection::vec(f64::MIN_POSITIVE..1e300, 1..10),
        version: u64,
        names in prop::collection::vec(".{1,15}", 10),
        tokens in prop::collection::vec(any::<u32>(), 0..20),
        option in any::<(String, String)>(),
    ) {
        let shards = (0..).zip(weights).map(|(number, weight)| {
            let mut shard = common::shard(number);
            shard.name = format!("{number}{}", names[usize::from(number)].replace('\0', "")).into();
            (shard.weight, shard.tokens) = (weight, tokens.clone());
            (shard.number, shard.state) = (ShardNumber(number * 100), ShardState::Draining);
            shard
        });
        let mut spec = common::keyspace(Rule::Ring, shards.collect());
        spec.version = version;
        spec.pins = vec![(names[1].clone(), spec.shards[0].name.clone())];
        let mut keyspace = export(spec.clone());
        keyspace.options.insert(spec.shards[0].name.clone(), BTreeMap::from([option]));
        let json = to_json(&[keyspace.clone()]);
        let back = json.and_then(|json| from_json(&json));
        prop_assert_eq!(back, Ok(vec![keyspace]));
    }
}
