//! Ids and decisions of prepared transactions.

use std::time::Duration;

use shardmap_core::two_phase::{
    decide, protocol, Decision, Evidence, Local, Policy, PreparedId, Protocol, TransactionId,
};

const WHOLE: TransactionId =
    TransactionId { system: 7_312_345_678_901_234_567, database: 16_384, transaction: 4_294_968_036, start: 0x1f };

#[test]
fn ids_are_written_and_read() {
    let id = PreparedId { whole: WHOLE, server: 16_500, part: 2 };
    let text = "shardmap_7312345678901234567_16384_4294968036_000000000000001f_16500_2";
    assert_eq!(id.to_string(), text);
    assert_eq!(PreparedId::parse(text), Some(id));
    assert!(text.starts_with(&format!("{WHOLE}_")));
}

#[test]
fn the_longest_id_fits_into_what_postgres_takes() {
    let whole = TransactionId { system: u64::MAX, database: u32::MAX, transaction: u64::MAX, start: u64::MAX };
    // Source: access/xact.h, GIDSIZE 200 with the terminating zero.
    assert!(PreparedId { whole, server: u32::MAX, part: u32::MAX }.to_string().len() < 200);
}

#[test]
fn other_texts_are_no_ids() {
    for text in [
        "",
        "shardmap_",
        "orders",
        "shardmap_1_2_3_0000000000000004_5",
        "shardmap_1_2_3_0000000000000004_5_6_7",
        "shardmap_1_2_3_0000000000000004_5_6 ",
        "shardmap_1_2_3_4_5_6",
        "shardmap_1_2_3_000000000000000A_5_6",
        "shardmap_+1_2_3_0000000000000004_5_6",
        "shardmap_1_2_3_0000000000000004_5_06",
        "shardmap_1_4294967296_3_0000000000000004_5_6",
        "Shardmap_1_2_3_0000000000000004_5_6",
    ] {
        assert_eq!(PreparedId::parse(text), None, "{text}");
    }
}

#[test]
fn decisions() {
    use Decision::{Commit, Foreign, Leave, RollBack, Wait};
    let table = [
        // begun since the server's start, what is known of the number, seconds since it was prepared: decision
        (true, Local::Running, 60, Wait),
        (true, Local::Aborted, 0, RollBack),
        (true, Local::Forgotten, 0, RollBack),
        (true, Local::Committed, 60, Leave),
        (true, Local::Future, 60, Leave),
        (false, Local::Future, 5, RollBack),
        (false, Local::Future, 4, Wait),
        // The number is another transaction's.
        (false, Local::Running, 5, RollBack),
        (false, Local::Committed, 5, RollBack),
        (false, Local::Aborted, 4, Wait),
    ];
    for (this_start, local, seconds, want) in table {
        let age = Duration::from_secs(seconds);
        let evidence = Evidence { ours: true, recorded: false, this_start, local, age };
        assert_eq!(decide(evidence), want, "{evidence:?}");
        assert_eq!(decide(Evidence { ours: false, ..evidence }), Foreign, "{evidence:?}");
        for ours in [true, false] {
            assert_eq!(decide(Evidence { ours, recorded: true, ..evidence }), Commit, "{evidence:?}");
        }
    }
}

#[test]
fn protocols() {
    use Protocol::{OnePhase, Refused, TwoPhase};
    let table = [
        // shards, here: under two_phase, refuse, one_phase
        (0, false, OnePhase, OnePhase, OnePhase),
        (0, true, OnePhase, OnePhase, OnePhase),
        (1, false, OnePhase, OnePhase, OnePhase),
        (1, true, TwoPhase, Refused, OnePhase),
        (2, false, TwoPhase, Refused, OnePhase),
        (2, true, TwoPhase, Refused, OnePhase),
    ];
    for (shards, here, two_phase, refuse, one_phase) in table {
        assert_eq!(protocol(shards, here, Policy::TwoPhase), two_phase, "{shards} {here}");
        assert_eq!(protocol(shards, here, Policy::Refuse), refuse, "{shards} {here}");
        assert_eq!(protocol(shards, here, Policy::OnePhase), one_phase, "{shards} {here}");
    }
}
