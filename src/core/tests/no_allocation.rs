//! Finding a key's shard allocates nothing.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::hint::black_box;

use allocation_counter::measure;
use shardmap_core::key::{CanonicalBuf, KeyValue};
use shardmap_core::map::{KeyspaceSpec, RangeOrder, RangeSpec, Strategy};

#[test]
fn a_lookup_allocates_nothing() {
    let integers = Strategy::Range(RangeOrder::Integer);
    for strategy in [Strategy::Ring, Strategy::Modulo, integers] {
        let ranges = match strategy {
            Strategy::Range(_) => {
                vec![RangeSpec { lower: None, upper: None, shard: "shard-0".into(), version: 1 }]
            }
            _ => vec![],
        };
        for pins in [vec![], vec![("77".to_owned(), "shard-3".into())]] {
            let spec = common::random(strategy, 16, 100);
            let map = common::build(KeyspaceSpec { ranges: ranges.clone(), pins, ..spec });
            let mut buf = CanonicalBuf::new();
            let counted = measure(|| {
                for key in 0..1_000 {
                    let owner = map.owner(KeyValue::Integer(key).canonical(&mut buf)).unwrap();
                    black_box(map.shard(owner).unwrap());
                    black_box(map.shard_by_name("shard-11").unwrap());
                }
            });
            assert_eq!(counted.count_total, 0, "{strategy}");
        }
    }
}

#[test]
fn canonical_text_allocates_nothing() {
    let mut buf = CanonicalBuf::new();
    let long = vec![7; 10_000];
    KeyValue::Bytea(&long).canonical(&mut buf);
    let counted = measure(|| {
        for value in [
            KeyValue::Integer(i64::MIN),
            KeyValue::Text(b"text"),
            KeyValue::Bpchar(b"text  "),
            KeyValue::Uuid([255; 16]),
            KeyValue::Numeric("123.4500"),
            KeyValue::Date(i32::MAX - 1),
            KeyValue::Timestamp(i64::MAX - 1),
            KeyValue::Timestamptz(i64::MIN + 1),
            KeyValue::Bytea(&long),
        ] {
            black_box(value.canonical(&mut buf));
        }
    });
    assert_eq!(counted.count_total, 0);
}
