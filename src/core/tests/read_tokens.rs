//! Tokens: their text, their merging, and what becomes of texts that are none.

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use proptest::prelude::*;
use shardmap_core::reads::position::{Lsn, Position, Timeline};
use shardmap_core::reads::token::{
    Cluster, Mark, ReadToken, ShardPrint, System, TokenError, MAX_SHARDS, MAX_TEXT_OF_64,
};

const OURS: Cluster = Cluster(0x0123_4567_89ab_cdef);

fn mark(system: u32, timeline: u32, lsn: u64) -> Mark {
    Mark { system: System(system), position: Position { timeline: Timeline(timeline), lsn: Lsn(lsn) } }
}

fn token(marks: &[(u32, Mark)]) -> ReadToken {
    let mut token = ReadToken::new(OURS);
    for (shard, mark) in marks {
        token.raise(ShardPrint(*shard), *mark);
    }
    token
}

fn marks() -> impl Strategy<Value = Vec<(u32, Mark)>> {
    let one = (0..20_u32, 1..4_u32, 1..4_u32, any::<u64>());
    proptest::collection::vec(one.prop_map(|(shard, system, line, lsn)| (shard, mark(system, line, lsn))), 0..40)
}

/// Frozen, and made by another program: clients keep tokens over an upgrade of the extension.
#[test]
fn a_token_is_this_text() {
    let text = token(&[(7, mark(9, 2, 0x1_0000_0000)), (1, mark(9, 1, 255))]).encode();
    let bytes = text.as_deref().map(|text| URL_SAFE_NO_PAD.decode(text)).ok().and_then(Result::ok).unwrap_or_default();
    let wanted = "01 0123456789abcdef 0002 \
                  00000001 00000009 00000001 00000000000000ff \
                  00000007 00000009 00000002 0000000100000000";
    let hex: String = bytes[..bytes.len() - 4].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, wanted.replace(' ', ""));
    let whole = "AQEjRWeJq83vAAIAAAABAAAACQAAAAEAAAAAAAAA_wAAAAcAAAAJAAAAAgAAAAEAAAAADaHVrg";
    assert_eq!(text.as_deref(), Ok(whole));
}

#[test]
fn names_and_systems_are_these_numbers() {
    assert_eq!(ShardPrint::of("shard-0"), ShardPrint(988_618_390));
    assert_eq!(System::of(7_312_345_678_901_234_567), System(1_824_514_080));
    assert_eq!(Cluster::of(7_312_345_678_901_234_567, 16_384), Cluster(4_184_210_657_203_402_935));
}

#[test]
fn tokens_of_64_shards_are_as_long_as_promised() {
    let marks: Vec<_> = (0..64).map(|shard| (shard, mark(u32::MAX, u32::MAX - 1, u64::MAX))).collect();
    let text = token(&marks).encode().unwrap();
    assert_eq!(text.len(), MAX_TEXT_OF_64);
    assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'));
}

#[test]
fn a_token_names_so_many_shards_and_no_more() {
    let marks: Vec<_> = (0..MAX_SHARDS as u32).map(|shard| (shard, mark(1, 1, 1))).collect();
    let full = token(&marks);
    assert_eq!(ReadToken::decode(&full.encode().unwrap(), OURS), Ok(full.clone()));
    let mut more = full;
    more.raise(ShardPrint(u32::MAX), mark(1, 1, 1));
    assert_eq!(more.encode(), Err(TokenError::TooMany));
}

#[test]
fn others_tokens_are_told_from_ours() {
    let mut foreign = ReadToken::new(Cluster(1));
    foreign.raise(ShardPrint(1), mark(1, 1, 1));
    let text = foreign.encode().unwrap();
    assert_eq!(ReadToken::decode(&text, OURS), Err(TokenError::Foreign));
    assert_eq!(ReadToken::decode_any(&text), Ok(foreign));
}

#[test]
fn what_is_no_token_is_said_to_be_none() {
    let text = token(&[(1, mark(1, 1, 77))]).encode().unwrap();
    for wrong in ["", "a", "0/16B3748", "AQ==", "%41", "ü", "AAAAAAAA", &"A".repeat(200_000), &format!("{text}=")] {
        assert!(ReadToken::decode(wrong, OURS).is_err(), "{wrong}");
    }
    assert_eq!(ReadToken::decode(text.split_at(text.len() - 4).0, OURS), Err(TokenError::Damaged));
    let sealed = |mut content: Vec<u8>| {
        let sum = shardmap_core::hash::md5_u128(&content).to_be_bytes();
        content.extend(&sum[..4]);
        URL_SAFE_NO_PAD.encode(content)
    };
    let mut later = URL_SAFE_NO_PAD.decode(&text).unwrap();
    later.truncate(later.len() - 4);
    assert_eq!(sealed(later.clone()), text);
    let with = |at: usize, byte: u8| {
        let mut changed = later.clone();
        changed[at] = byte;
        sealed(changed)
    };
    assert_eq!(ReadToken::decode(&with(0, 2), OURS), Err(TokenError::Version(2)));
    assert_eq!(ReadToken::decode(&with(10, 2), OURS), Err(TokenError::NoToken), "fewer entries than it says");
    assert_eq!(ReadToken::decode(&with(10, 0), OURS), Err(TokenError::NoToken), "more entries than it says");
    let twice = [&later[..10], &[2], &later[11..], &later[11..]].concat();
    assert_eq!(ReadToken::decode(&sealed(twice), OURS), Err(TokenError::NoToken), "a shard twice");
}

#[test]
fn a_later_timeline_stands_for_all_before_it() {
    let merged = token(&[(1, mark(1, 1, 900)), (1, mark(1, 2, 500))]);
    assert_eq!(merged.mark(ShardPrint(1)), Some(mark(1, 2, 500)));
}

#[test]
fn marks_of_two_systems_merge_to_one_that_no_replica_has() {
    let merged = token(&[(1, mark(1, 1, 900)), (1, mark(2, 1, 500))]);
    assert_eq!(merged.mark(ShardPrint(1)), Some(mark(0, u32::MAX, u64::MAX)));
}

#[test]
fn positions_are_read_and_written_as_postgres_does() {
    assert_eq!(Lsn::parse("16/B374D848"), Some(Lsn(0x16_B374_D848)));
    assert_eq!(Lsn(0x16_B374_D848).to_string(), "16/B374D848");
    for wrong in ["", "/", "1", "1/", "/1", "123456789/0", "+1/0", "g/0", "1/2/3"] {
        assert_eq!(Lsn::parse(wrong), None, "{wrong}");
    }
}

proptest! {
    #[test]
    fn a_token_is_read_as_it_was_written(marks in marks()) {
        let token = token(&marks);
        prop_assert_eq!(ReadToken::decode(&token.encode().unwrap(), OURS), Ok(token));
    }

    #[test]
    fn no_text_stops_the_reader(text in "\\PC*") {
        let _ = ReadToken::decode(&text, OURS);
    }

    #[test]
    fn no_bytes_stop_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200), sealed in any::<bool>()) {
        let mut bytes = bytes;
        if sealed {
            let sum = shardmap_core::hash::md5_u128(&bytes).to_be_bytes();
            bytes.extend(&sum[..4]);
        }
        if let Ok(token) = ReadToken::decode_any(&URL_SAFE_NO_PAD.encode(&bytes)) {
            prop_assert_eq!(URL_SAFE_NO_PAD.decode(token.encode().unwrap()).unwrap(), bytes);
        }
    }

    #[test]
    fn a_changed_letter_is_noticed(marks in marks(), at in any::<prop::sample::Index>(), letter in "[A-Za-z0-9_-]") {
        let text = token(&marks).encode().unwrap();
        let at = at.index(text.len());
        let mut changed = text.clone();
        changed.replace_range(at..=at, &letter);
        prop_assert!(changed == text || ReadToken::decode(&changed, OURS).is_err());
    }

    #[test]
    fn merging_takes_any_order_and_forgets_nothing(first in marks(), second in marks(), third in marks()) {
        let [first, second, third] = [token(&first), token(&second), token(&third)];
        let merge = |left: &ReadToken, right: &ReadToken| {
            let mut merged = left.clone();
            merged.merge(right);
            merged
        };
        prop_assert_eq!(merge(&first, &second), merge(&second, &first));
        prop_assert_eq!(merge(&merge(&first, &second), &third), merge(&first, &merge(&second, &third)));
        prop_assert_eq!(merge(&first, &first), first.clone());
        let merged = merge(&first, &second);
        for shard in (0..20).map(ShardPrint) {
            let own = [first.mark(shard), second.mark(shard)].into_iter().flatten().map(|mark| mark.position).max();
            prop_assert!(merged.mark(shard).map(|mark| mark.position) >= own);
        }
    }
}
