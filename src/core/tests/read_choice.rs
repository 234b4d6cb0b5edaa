//! The choice of a server: its rules one by one, and what holds whatever the input.

#![allow(clippy::unwrap_used)] // a test that fails here has failed

mod common;

use std::time::Duration;

use common::random::Random;
use proptest::prelude::*;
use shardmap_core::reads::choice::{
    choose, observations_hold, Admission, Candidate, Decision, Floor, Heard, Preference, Reason, Verdict, Want, Why,
    OBSERVATIONS_HOLD,
};
use shardmap_core::reads::position::{holds, Fork, Holds, Lsn, Position, Timeline};
use shardmap_core::reads::token::{Mark, System};

const SYSTEM: System = System(7);
const MS: Duration = Duration::from_millis(1);
const PRIMARY: u32 = 0;

fn at(timeline: u32, lsn: u64) -> Position {
    Position { timeline: Timeline(timeline), lsn: Lsn(lsn) }
}

fn token(timeline: u32, lsn: u64) -> Option<Mark> {
    Some(Mark { system: SYSTEM, position: at(timeline, lsn) })
}

fn heard(position: Position, lag: Duration) -> Heard {
    Heard { system: SYSTEM, position, in_recovery: true, lag: Some(lag), round_trip: Some(MS), age: 100 * MS }
}

fn primary(position: Position) -> Candidate<'static> {
    let heard = Heard { in_recovery: false, lag: None, ..heard(position, MS) };
    Candidate { server: PRIMARY, is_primary: true, ..replica(PRIMARY, heard) }
}

fn replica(server: u32, heard: Heard) -> Candidate<'static> {
    let admission = Admission::All;
    Candidate { server, is_primary: false, weight: 1.0, zone: "", admission, heard: Some(heard), may_ask: true }
}

const WANT: Want<'static> = Want {
    preference: Preference::PreferReplica,
    heard_within: OBSERVATIONS_HOLD,
    max_lag: None,
    token: None,
    floor: None,
    last: None,
    lost: &[],
    zone: "",
    may_ask: true,
};

fn of(candidates: &[Candidate<'_>], want: Want<'_>) -> Decision {
    choose(candidates, &want, &[], [0, u64::MAX])
}

fn why(decision: &Decision, server: u32) -> Verdict {
    decision.considered.iter().find(|(own, _)| *own == server).map(|(_, verdict)| *verdict).unwrap()
}

#[test]
fn a_sample_past_the_token_needs_no_question() {
    let servers = [primary(at(1, 100)), replica(1, heard(at(1, 90), 20 * MS)), replica(2, heard(at(1, 50), 900 * MS))];
    let decision = of(&servers, Want { token: token(1, 90), ..WANT });
    assert_eq!((decision.server, decision.reason, decision.ask), (Some(1), Reason::Fresh, None));
    assert_eq!(why(&decision, 2), Verdict::Asked(at(1, 90)));
    assert_eq!(why(&decision, PRIMARY), Verdict::Not(Why::NotWanted));
}

#[test]
fn else_the_one_that_was_furthest_is_asked() {
    let servers = [primary(at(1, 100)), replica(1, heard(at(1, 90), MS)), replica(2, heard(at(1, 95), MS))];
    let decision = of(&servers, Want { token: token(1, 99), ..WANT });
    assert_eq!((decision.server, decision.reason, decision.ask), (Some(2), Reason::ToBeAsked, Some(at(1, 99))));
    let decision = of(&servers, Want { token: token(1, 99), may_ask: false, ..WANT });
    assert_eq!((decision.server, decision.reason), (Some(PRIMARY), Reason::NoReplica));
    let decision = of(&servers, Want { token: token(1, 99), preference: Preference::Replica, may_ask: false, ..WANT });
    assert_eq!((decision.server, decision.reason), (None, Reason::NoReplica));
}

#[test]
fn what_is_not_known_serves_nothing() {
    let old = Heard { age: OBSERVATIONS_HOLD + MS, ..heard(at(1, 100), MS) };
    let promoted = Heard { in_recovery: false, ..heard(at(2, 100), MS) };
    let silent = Candidate { heard: None, ..replica(3, promoted) };
    let servers = [primary(at(1, 100)), replica(1, old), replica(2, promoted), silent];
    let decision = of(&servers, WANT);
    assert_eq!(decision.server, Some(PRIMARY));
    let verdicts = [1, 2, 3].map(|server| why(&decision, server));
    assert_eq!(verdicts, [Why::Unknown, Why::Invalid, Why::Unknown].map(Verdict::Not));
}

#[test]
fn observations_hold_until_three_are_missing() {
    assert_eq!(observations_hold(MS), OBSERVATIONS_HOLD);
    assert_eq!(observations_hold(60_000 * MS), 180_000 * MS);
    let old = Heard { age: 170_000 * MS, ..heard(at(1, 100), MS) };
    let servers = [primary(at(1, 100)), replica(1, old)];
    assert_eq!(of(&servers, Want { heard_within: 180_000 * MS, ..WANT }).server, Some(1));
}

#[test]
fn lag_counts_up_to_now_and_unknown_is_not_zero() {
    let unknown = Heard { lag: None, ..heard(at(1, 100), MS) };
    let servers = [primary(at(1, 100)), replica(1, heard(at(1, 100), 400 * MS)), replica(2, unknown)];
    let within = |ms: u32| of(&servers, Want { max_lag: Some(ms * MS), ..WANT });
    assert_eq!(within(500).server, Some(1));
    assert_eq!(within(499).server, Some(PRIMARY));
    assert_eq!(why(&within(499), 1), Verdict::Not(Why::Lag));
    assert_eq!(why(&within(500), 2), Verdict::Not(Why::Unknown));
}

#[test]
fn rotation_takes_reads_with_tokens_first() {
    let one = replica(1, heard(at(1, 100), MS));
    let served = |admission, token| {
        of(&[primary(at(1, 100)), Candidate { admission, ..one }], Want { token, ..WANT }).server == Some(1)
    };
    assert!(served(Admission::All, token(1, 1)) && served(Admission::All, None));
    assert!(!served(Admission::WithoutToken, token(1, 1)) && served(Admission::WithoutToken, None));
    assert!(!served(Admission::None, token(1, 1)) && !served(Admission::None, None));
    let idle = Candidate { weight: 0.0, ..one };
    assert_eq!(of(&[primary(at(1, 100)), idle], WANT).server, Some(PRIMARY));
}

#[test]
fn tokens_and_failovers() {
    let forks = [Fork { from: Timeline(1), to: Timeline(2), at: Lsn(80) }];
    let servers = [primary(at(2, 200)), replica(1, heard(at(1, 190), MS)), replica(2, heard(at(2, 100), MS))];
    let decide = |token, forks: &[Fork]| choose(&servers, &Want { token, ..WANT }, forks, [0, 0]);
    // Of the new timeline: what still follows the old primary holds nothing of it, however far its LSN.
    let new = decide(token(2, 90), &forks);
    assert_eq!((new.server, why(&new, 1)), (Some(2), Verdict::Not(Why::OlderTimeline)));
    // Of the old one: up to the fork point.
    let before = decide(token(1, 80), &forks);
    assert_eq!(why(&before, 2), Verdict::Serves);
    // Behind the fork, or where that is not known, nobody on the new timeline has it for sure.
    let behind = decide(token(1, 195), &forks);
    assert_eq!(why(&behind, 2), Verdict::Not(Why::NewerTimeline));
    assert_eq!(why(&behind, 1), Verdict::Asked(at(1, 195)));
    assert_eq!(why(&decide(token(1, 10), &[]), 2), Verdict::Not(Why::NewerTimeline));
    // Of the future: the primary, with a question.
    let future = decide(token(3, 1), &forks);
    assert_eq!((future.server, future.doubtful), (Some(PRIMARY), true));
    let elsewhere = Some(Mark { system: System(8), position: at(1, 1) });
    let foreign = decide(elsewhere, &forks);
    assert_eq!((foreign.server, foreign.doubtful), (Some(PRIMARY), true));
    assert_eq!(why(&foreign, 2), Verdict::Not(Why::OtherSystem));
}

#[test]
fn what_lies_before_every_fork_is_kept() {
    let fork = |from, to, at| Fork { from: Timeline(from), to: Timeline(to), at: Lsn(at) };
    // Timeline 3 left 1 as well, and came to nothing.
    let forks = [fork(4, 5, 200), fork(1, 3, 50), fork(1, 2, 80), fork(2, 4, 150)];
    let cases = [
        (at(5, 300), at(5, 300), Holds::All),
        (at(5, 300), at(5, 301), Holds::NotYet),
        (at(5, 300), at(6, 1), Holds::Older),
        (at(5, 300), at(1, 80), Holds::All),
        (at(5, 300), at(1, 81), Holds::Lost),
        (at(5, 300), at(2, 150), Holds::All),
        (at(5, 300), at(2, 151), Holds::Lost),
        (at(5, 300), at(4, 200), Holds::All),
        // Never on the way to 5.
        (at(5, 300), at(3, 10), Holds::Lost),
        // It follows a newer timeline, and has not replayed up to where that begins.
        (at(5, 60), at(1, 61), Holds::NotYet),
        (at(5, 60), at(1, 60), Holds::All),
        (at(3, 60), at(1, 50), Holds::All),
        (at(7, 300), at(1, 1), Holds::Lost),
    ];
    for (server, wanted, want) in cases {
        assert_eq!(holds(server, wanted, &forks), want, "{server}, {wanted}");
        if server.timeline != wanted.timeline && want != Holds::Older {
            assert_eq!(holds(server, wanted, &[]), Holds::Lost);
        }
    }
    // Forks that lead in a circle lead nowhere.
    assert_eq!(holds(at(3, 9), at(1, 1), &[fork(3, 3, 9), fork(4, 3, 9)]), Holds::Lost);
}

#[test]
fn the_same_as_last_time_if_it_will_do() {
    let servers = [primary(at(1, 100)), replica(1, heard(at(1, 90), MS)), replica(2, heard(at(1, 95), Duration::ZERO))];
    let decide = |last, lost: &[u32], preference| of(&servers, Want { last, lost, preference, ..WANT });
    let sticky = decide(Some(1), &[], Preference::PreferReplica);
    assert_eq!((sticky.server, sticky.reason), (Some(1), Reason::Sticky));
    assert_eq!(decide(Some(1), &[1], Preference::PreferReplica).server, Some(2));
    assert_eq!(decide(Some(PRIMARY), &[], Preference::PreferReplica).server, Some(2));
    assert_eq!(decide(Some(1), &[], Preference::Primary).server, Some(PRIMARY));
}

#[test]
fn the_nearest_is_of_the_same_zone_or_has_the_shortest_way() {
    let far = Heard { round_trip: Some(30 * MS), ..heard(at(1, 90), MS) };
    let servers = [
        primary(at(1, 100)),
        replica(1, Heard { round_trip: Some(3 * MS), ..far }),
        Candidate { zone: "b", ..replica(2, far) },
    ];
    let decide = |zone| of(&servers, Want { zone, preference: Preference::Nearest, ..WANT });
    assert_eq!(decide("b").server, Some(2));
    assert_eq!(decide("a").server, Some(PRIMARY));
    assert_eq!(decide("").reason, Reason::Nearest);
}

#[test]
fn of_two_by_chance_the_one_that_lags_less() {
    let servers = [primary(at(1, 9)), replica(1, heard(at(1, 9), 9 * MS)), replica(2, heard(at(1, 9), MS))];
    let by = |chance| choose(&servers, &WANT, &[], chance).server;
    assert_eq!(by([0, u64::MAX]), Some(2));
    assert_eq!(by([u64::MAX, 0]), Some(2));
    assert_eq!(by([0, 0]), Some(1));
}

#[test]
fn reads_go_by_weight() {
    let even = heard(at(1, 9), MS);
    let servers =
        [primary(at(1, 9)), replica(1, even), Candidate { weight: 3.0, ..replica(2, even) }, replica(3, even)];
    let mut random = Random(1);
    let chosen = (0..20_000).filter(|_| choose(&servers, &WANT, &[], random.pair()).server == Some(2)).count();
    assert!((11_500..12_500).contains(&chosen), "{chosen} of 20000, 3 of 5 wanted");
}

fn candidates() -> impl Strategy<Value = Vec<Candidate<'static>>> {
    let heard = (1..4_u32, 0..100_u64, any::<bool>(), proptest::option::of(0..3000_u64), 0..20_000_u64, 6..8_u32);
    let heard = heard.prop_map(|(timeline, lsn, in_recovery, lag, age, system)| Heard {
        system: System(system),
        position: at(timeline, lsn),
        in_recovery,
        lag: lag.map(Duration::from_millis),
        round_trip: lag.map(Duration::from_micros),
        age: Duration::from_millis(age),
    });
    let admission = prop_oneof![Just(Admission::All), Just(Admission::WithoutToken), Just(Admission::None)];
    let one = (proptest::option::of(heard), 0..3_u8, prop_oneof![Just(""), Just("a"), Just("b")], admission);
    proptest::collection::vec(one, 1..6).prop_map(|all| {
        let candidate = |(server, (heard, weight, zone, admission)): (u32, (_, u8, _, _))| Candidate {
            server,
            is_primary: server == PRIMARY,
            weight: f64::from(weight),
            zone,
            admission,
            heard,
            may_ask: true,
        };
        (0..).zip(all).map(candidate).collect()
    })
}

#[test]
fn no_replica_answers_below_the_floor() {
    let floor = |system, timeline, lsn| Want { floor: Some(Floor { system, position: at(timeline, lsn) }), ..WANT };
    let one = |position| [primary(at(2, 100)), replica(1, heard(position, MS))];
    let own = Some(SYSTEM);
    for (position, want, verdict) in [
        (at(1, 90), floor(own, 1, 90), Verdict::Serves),
        (at(1, 89), floor(own, 1, 90), Verdict::Asked(at(1, 90))),
        (at(1, 89), floor(None, 1, 90), Verdict::Asked(at(1, 90))),
        (at(1, 89), Want { may_ask: false, ..floor(own, 1, 90) }, Verdict::Not(Why::BehindMove)),
        // The shard was made anew.
        (at(1, 10), floor(Some(System(99)), 1, 90), Verdict::Serves),
        // After a failover, wherever the fork was.
        (at(2, 95), floor(own, 1, 90), Verdict::Serves),
        (at(2, 80), floor(own, 1, 90), Verdict::Asked(at(2, 90))),
        (at(1, 95), floor(own, 2, 90), Verdict::Not(Why::OlderTimeline)),
        // With a token.
        (at(1, 89), Want { token: token(1, 80), ..floor(own, 1, 90) }, Verdict::Asked(at(1, 90))),
        (at(1, 89), Want { token: token(1, 95), ..floor(own, 1, 90) }, Verdict::Asked(at(1, 95))),
        (at(1, 92), Want { token: token(1, 95), ..floor(own, 1, 90) }, Verdict::Asked(at(1, 95))),
        (at(1, 95), Want { token: token(1, 95), ..floor(own, 1, 90) }, Verdict::Serves),
    ] {
        assert_eq!(why(&of(&one(position), want), 1), verdict, "{position} {want:?}");
    }
}

fn wants() -> impl Strategy<Value = Want<'static>> {
    let preference = prop_oneof![
        Just(Preference::Primary),
        Just(Preference::PreferReplica),
        Just(Preference::Replica),
        Just(Preference::Nearest)
    ];
    let option = || proptest::option::of(0..6_u32);
    let wanted = proptest::option::of((1..4_u32, 0..100_u64));
    (preference, proptest::option::of(0..4000_u64), wanted, option(), any::<bool>()).prop_map(
        |(preference, max_lag, wanted, last, may_ask)| Want {
            preference,
            heard_within: OBSERVATIONS_HOLD,
            max_lag: max_lag.map(Duration::from_millis),
            token: wanted.and_then(|(timeline, lsn)| token(timeline, lsn)),
            floor: None,
            last,
            lost: &[4],
            zone: "a",
            may_ask,
        },
    )
}

proptest! {
    /// Whatever is known, a replica serves only what it is known to have, and the way out is the primary.
    #[test]
    fn a_chosen_replica_has_what_is_wanted(servers in candidates(), want in wants(), chance in any::<[u64; 2]>()) {
        let decision = choose(&servers, &want, &[], chance);
        prop_assert_eq!(decision.considered.len(), servers.len());
        prop_assert_eq!(&decision, &choose(&servers, &want, &[], chance));
        let Some(server) = decision.server else {
            prop_assert_eq!(want.preference, Preference::Replica);
            return Ok(());
        };
        let chosen = servers[server as usize];
        if chosen.is_primary {
            prop_assert!(decision.ask.is_none());
            prop_assert!(want.preference != Preference::Replica);
            return Ok(());
        }
        prop_assert!(want.preference != Preference::Primary && server != 4);
        let known = chosen.heard.unwrap();
        prop_assert!(known.in_recovery && known.age <= OBSERVATIONS_HOLD && chosen.admission != Admission::None);
        if let Some(most) = want.max_lag {
            prop_assert!(known.lag.unwrap() + known.age <= most);
        }
        if let Some(token) = want.token {
            prop_assert_eq!(known.system, token.system);
            prop_assert_eq!(known.position.timeline, token.position.timeline);
            let is_asked = decision.ask == Some(token.position) && want.may_ask;
            prop_assert!(known.position.lsn >= token.position.lsn || is_asked);
        }
    }
}
