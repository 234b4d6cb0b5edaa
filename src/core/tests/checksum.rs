//! Faults in copied rows are found: in their bucket, in no other, by name.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use shardmap_core::checksum::{
    compare_buckets, compare_rows, read_rows, read_side, Aspect, Buckets, Checksum, RowDigest, RowFault, Side, Summary,
};
use shardmap_core::hash::md5_u128;
use shardmap_core::ids::Token;

/// Key, number within the key, contents.
type Row = (u8, u16, String);

fn token(row: &Row) -> Token {
    Token::of(row.0.to_string().as_bytes())
}

fn identity(row: &Row) -> String {
    format!("({},{})", row.0, row.1)
}

fn text(row: &Row) -> String {
    format!("({},{},{})", row.0, row.1, row.2)
}

/// Any hash of 63 bits will do.
fn checksum_of(text: &str) -> Checksum {
    Checksum(md5_u128(text.as_bytes()) >> 65)
}

/// The definition of a summary, word by word; the SQL on a shard does the same.
fn summarize(rows: &[Row], bucket_of: impl Fn(&Row) -> u32) -> Side {
    let mut parts: BTreeMap<u32, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        parts.entry(bucket_of(row)).or_default().push(row);
    }
    let summary = |rows: Vec<&Row>| {
        let mut checksum = Checksum::default();
        rows.iter().for_each(|row| checksum += checksum_of(&text(row)));
        let numbers = || rows.iter().map(|row| u64::from(row.1));
        let figures = [numbers().sum::<u64>(), numbers().min().unwrap(), numbers().max().unwrap()];
        Summary {
            rows: rows.len() as u64,
            checksum,
            keys: rows.iter().map(|row| row.0).collect::<BTreeSet<_>>().len() as u64,
            figures: figures.iter().map(|figure| Some(figure.to_string())).collect(),
        }
    };
    parts.into_iter().map(|(bucket, rows)| (bucket, summary(rows))).collect()
}

fn digests(rows: &[Row]) -> Vec<RowDigest> {
    let digest = |row: &Row| RowDigest {
        key: row.0.to_string(),
        row: identity(row),
        digest: format!("{:x}", checksum_of(&text(row)).0),
    };
    rows.iter().map(digest).collect()
}

/// Rows of different identity.
fn rows() -> impl Strategy<Value = Vec<Row>> {
    vec((any::<u8>(), 0..50_u16, "[a-z,()]{0,6}"), 1..120).prop_map(|mut rows| {
        rows.sort_by_key(|row| (row.0, row.1));
        rows.dedup_by_key(|row| (row.0, row.1));
        rows
    })
}

proptest! {
    #[test]
    fn the_order_of_rows_does_not_count(rows in rows(), bits in 0..=16_u32, seed in any::<u64>()) {
        let buckets = Buckets::new(bits);
        let mut other = rows.clone();
        other.sort_by_key(|row| Token::of(format!("{seed}{row:?}").as_bytes()));
        let (a, b) = (summarize(&rows, |r| buckets.of(token(r))), summarize(&other, |r| buckets.of(token(r))));
        prop_assert_eq!(compare_buckets(&a, &b), vec![]);
        prop_assert_eq!(compare_rows(&digests(&rows), &digests(&other)), vec![]);
    }

    #[test]
    fn a_fault_is_found_in_its_bucket_and_by_name(
        rows in rows(), bits in 0..=16_u32, at in any::<Index>(), fault in 0..4_usize,
    ) {
        let at = at.index(rows.len());
        let mut copy = rows.clone();
        let (want, source, target) = [
            (RowFault::Missing, 1, 0), (RowFault::Extra, 0, 1), (RowFault::Doubled, 1, 2), (RowFault::Changed, 1, 1),
        ][fault];
        let met = match want {
            RowFault::Missing => copy.remove(at),
            RowFault::Extra => { copy.push((rows[at].0, 99, "x".into())); copy[copy.len() - 1].clone() }
            RowFault::Doubled => { copy.push(rows[at].clone()); rows[at].clone() }
            RowFault::Changed => { copy[at].2.push('!'); rows[at].clone() }
        };
        let buckets = Buckets::new(bits);
        for parts in [false, true] {
            let bucket_of = |row: &Row| match parts {
                false => buckets.of(token(row)),
                true => buckets.part(token(row), &identity(row)),
            };
            let found = compare_buckets(&summarize(&rows, bucket_of), &summarize(&copy, bucket_of));
            prop_assert_eq!(found.iter().map(|found| found.bucket).collect::<Vec<_>>(), vec![bucket_of(&met)]);
            prop_assert!(found[0].aspects.contains(&Aspect::Checksum));
            prop_assert_eq!(found[0].aspects.contains(&Aspect::Rows), want != RowFault::Changed);
        }
        // Narrowed: only the rows of that bucket are looked at.
        let within = |rows: &[Row]| rows.iter().filter(|row| buckets.of(token(row)) == buckets.of(token(&met))).cloned()
            .collect::<Vec<_>>();
        let found = compare_rows(&digests(&within(&rows)), &digests(&within(&copy)));
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!((found[0].fault, &found[0].row, found[0].source, found[0].target),
            (want, &identity(&met), source, target));
    }

    #[test]
    fn buckets_cut_the_token_space(token in any::<u32>(), bits in 0..=20_u32) {
        let buckets = Buckets::new(bits);
        let bucket = buckets.of(Token(token));
        let (first, last) = buckets.tokens(bucket);
        prop_assert!(first.0 <= token && token <= last.0);
        prop_assert_eq!((buckets.of(first), buckets.of(last)), (bucket, bucket));
        prop_assert_eq!(first.0.checked_sub(1).map(|before| buckets.of(Token(before))), bucket.checked_sub(1));
        prop_assert!(u64::from(bucket) < 1 << bits.min(16));
    }
}

/// What each change of a summary is called.
#[test]
fn aspects_name_what_differs() {
    let base = Summary { rows: 2, checksum: Checksum(7), keys: 1, figures: vec![Some("3".into()), None] };
    for (other, want) in [
        (base.clone(), vec![]),
        (Summary { rows: 3, ..base.clone() }, vec![Aspect::Rows]),
        (Summary { keys: 2, ..base.clone() }, vec![Aspect::Keys]),
        (Summary { checksum: Checksum(8), ..base.clone() }, vec![Aspect::Checksum]),
        (Summary { figures: vec![Some("3".into()), Some("0".into())], ..base.clone() }, vec![Aspect::Figure(1)]),
        (Summary::default(), vec![Aspect::Rows, Aspect::Keys, Aspect::Checksum, Aspect::Figure(0)]),
    ] {
        let found = compare_buckets(&Side::from([(5, base.clone())]), &Side::from([(5, other)]));
        assert_eq!(found.first().map(|found| found.aspects.clone()).unwrap_or_default(), want);
    }
    // A bucket that one of them does not have.
    let found = compare_buckets(&Side::from([(5, base)]), &Side::new());
    assert_eq!((found.len(), found[0].source_rows, found[0].target_rows), (1, 2, 0));
}

#[test]
fn documents_are_read_or_refused() {
    let side = read_side(r#"[[3, "2", "1208925819614629174706175", "1", ["-4", null, "9.50"]]]"#).unwrap();
    let want = Summary {
        rows: 2,
        checksum: Checksum((1 << 80) - 1),
        keys: 1,
        figures: vec![Some("-4".into()), None, Some("9.50".into())],
    };
    assert_eq!(side, Side::from([(3, want)]));
    assert_eq!(read_side("[]").unwrap(), Side::new());
    let row = RowDigest { key: "k".into(), row: "(k,1)".into(), digest: "ab".into() };
    assert_eq!(read_rows(r#"[["k", "(k,1)", "ab", 7]]"#).unwrap(), [row]);
    for bad in [
        "",
        "null",
        "{}",
        "[[1]]",
        r#"[[1, "x", "1", "1", []]]"#,
        r#"[[1, "0", "0", "0", []]]"#,
        r#"[[-1, "1", "1", "1", []]]"#,
        r#"[[1, "1", "-1", "1", []]]"#,
        r#"[[1, "1", "1", "1", []], [1, "1", "1", "1", []]]"#,
    ] {
        assert!(read_side(bad).is_err(), "{bad}");
    }
    assert!(read_rows(r#"[["k", null, "ab", 7]]"#).is_err());
}

/// Frozen: `sql/verify.sql` computes the same on every shard.
#[test]
fn a_rows_part_is_by_its_token_and_the_md5_of_its_identity() {
    // RFC 1321, section A.5: MD5 ("abc") = 900150983cd24fb0d6963f7d28e17f72.
    assert_eq!(Buckets::new(4).part(Token(0xabcd_0000), "abc"), 0xa_900);
}
