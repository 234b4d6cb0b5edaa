//! Who gives up in a circle of waits.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use shardmap_core::deadlock::{Circle, Graph, Party, Place, SessionId, Wait, TURN};

fn session(pid: i32) -> SessionId {
    SessionId { server: 0xabc, pid }
}

/// `waiter` waits for `holder` on `shard` (0: here) since `since`.
fn wait(waiter: i32, holder: i32, shard: u32, since: i64) -> Wait {
    Wait {
        place: if shard == 0 { Place::Here } else { Place::Shard(shard) },
        waiter: Party::Session(session(waiter)),
        pid: 1000 * shard as i32 + waiter,
        since,
        holder: Party::Session(session(holder)),
        holder_pid: 1000 * shard as i32 + holder,
    }
}

fn graph(waits: &[Wait]) -> Graph {
    let mut graph = Graph::default();
    waits.iter().for_each(|wait| graph.add(*wait));
    graph
}

fn candidates(circle: Option<Circle>) -> Vec<i32> {
    circle.unwrap().candidates.iter().map(|session| session.pid).collect()
}

#[test]
fn two_sessions_on_two_shards() {
    let waits = [wait(1, 2, 1, 10), wait(2, 1, 2, 20)];
    let circle = graph(&waits).circle(session(1)).unwrap();
    assert_eq!(circle.path, waits);
    assert_eq!(circle.candidates, [session(2), session(1)]);
    let other = graph(&waits).circle(session(2)).unwrap();
    assert_eq!(other.path, [waits[1], waits[0]]);
    assert_eq!(other.candidates, circle.candidates);
}

#[test]
fn waiting_is_no_circle() {
    let queue = graph(&[wait(1, 2, 1, 10), wait(2, 3, 1, 20), wait(4, 2, 2, 30)]);
    for pid in 1..=4 {
        assert_eq!(queue.circle(session(pid)), None, "pid={pid}");
    }
}

#[test]
fn who_waits_for_a_circle_is_not_in_it() {
    let graph = graph(&[wait(1, 2, 1, 10), wait(2, 1, 2, 20), wait(3, 1, 1, 30), wait(1, 4, 1, 40)]);
    assert_eq!(graph.circle(session(3)), None);
    assert_eq!(graph.circle(session(4)), None);
    assert_eq!(candidates(graph.circle(session(1))), [2, 1]);
}

#[test]
fn who_waits_here_cannot_give_up() {
    let graph = graph(&[wait(1, 2, 1, 10), wait(2, 1, 0, 20)]);
    assert_eq!(candidates(graph.circle(session(1))), [1]);
    assert_eq!(candidates(graph.circle(session(2))), [1]);
}

#[test]
fn strangers_are_links_of_a_circle() {
    let stranger = Party::Stranger(Place::Shard(1), 77);
    let waits = [
        Wait { holder: stranger, holder_pid: 77, ..wait(1, 0, 1, 10) },
        Wait { waiter: stranger, pid: 77, ..wait(0, 2, 1, 20) },
        wait(2, 1, 2, 5),
    ];
    let circle = graph(&waits).circle(session(1)).unwrap();
    assert_eq!(circle.path, waits);
    assert_eq!(circle.candidates, [session(1), session(2)]);
}

#[test]
fn the_next_candidate_gives_the_first_time() {
    let circle = graph(&[wait(1, 2, 1, 10), wait(2, 3, 2, 20), wait(3, 1, 3, 30)]).circle(session(1)).unwrap();
    let after = |turns| (1..=3).filter(|pid| circle.is_for(session(*pid), TURN * turns)).collect::<Vec<_>>();
    assert_eq!((after(0), after(1), after(2)), (vec![3], vec![2, 3], vec![1, 2, 3]));
    assert!(!circle.is_for(session(2), TURN / 2));
    assert!(!circle.is_for(session(9), TURN * 100));
}

#[test]
fn another_wait_of_the_same_sessions_confirms_nothing() {
    let waits = [wait(1, 2, 1, 10), wait(2, 1, 2, 20)];
    assert!(graph(&[waits[0], waits[1], wait(5, 6, 1, 1)]).confirms(&waits));
    assert!(!graph(&[waits[0], wait(2, 1, 2, 21)]).confirms(&waits));
    assert!(!graph(&[waits[0]]).confirms(&waits));
}

#[test]
fn names() {
    let id = SessionId { server: 0x0123_4567_89ab_cdef, pid: 4242 };
    assert_eq!(id.application_name("pg_shardmap"), "pg_shardmap 0123456789abcdef.4242");
    for given in ["pg_shardmap", "", "my app 0123456789abcdef.7", &"ä".repeat(63), &"x".repeat(200)] {
        let name = id.application_name(given);
        assert!(name.len() <= 63, "{name}");
        assert_eq!(SessionId::find(&name), Some(id), "{name}");
        assert_eq!(SessionId::find(&format!("{name} - 10.0.0.1:5432")), Some(id), "{name}");
    }
    for other in ["", "psql", "0123456789abcde.42", "0123456789abcdef.+42", "0123456789ABCDEF.42", "10.0.0.1"] {
        assert_eq!(SessionId::find(other), None, "{other}");
    }
}

/// Whether one gets from `from` back to it, step by step from each to all it waits for.
fn returns(waits: &[Wait], from: i32) -> bool {
    let mut reached: BTreeSet<Party> = BTreeSet::new();
    for _ in 0..=waits.len() {
        for wait in waits {
            if wait.waiter == Party::Session(session(from)) || reached.contains(&wait.waiter) {
                reached.insert(wait.holder);
            }
        }
    }
    reached.contains(&Party::Session(session(from)))
}

fn waits() -> impl Strategy<Value = Vec<Wait>> {
    let one = (0..7_i32, 0..7_i32, 0..4_u32, 0..9_i64);
    vec(one.prop_map(|(waiter, holder, shard, since)| wait(waiter, holder, shard, since)), 0..14)
}

proptest! {
    #[test]
    fn a_circle_is_found_if_and_only_if_there_is_one(waits in waits()) {
        let graph = graph(&waits);
        for pid in 0..7 {
            prop_assert_eq!(graph.circle(session(pid)).is_some(), returns(&waits, pid), "pid={}", pid);
        }
    }

    #[test]
    fn all_of_a_circle_agree_on_who_gives_up(waits in waits()) {
        let graph = graph(&waits);
        for pid in 0..7 {
            let Some(circle) = graph.circle(session(pid)) else { continue };
            // The path is a circle through the looker, of waits that there are, with no party twice.
            prop_assert!(graph.confirms(&circle.path));
            let ends = circle.path.iter().map(|wait| wait.holder);
            let starts: Vec<_> = circle.path.iter().map(|wait| wait.waiter).collect();
            prop_assert_eq!(starts[0], Party::Session(session(pid)));
            prop_assert!(ends.eq(starts.iter().copied().cycle().skip(1).take(starts.len())));
            prop_assert_eq!(starts.iter().collect::<BTreeSet<_>>().len(), starts.len());
            for party in starts {
                let Party::Session(member) = party else { continue };
                let other = graph.circle(member).unwrap();
                prop_assert_eq!(&other.candidates, &circle.candidates);
            }
            // One of the path's waits on shards, if there is any, belongs to somebody who may give up.
            if circle.path.iter().any(|wait| wait.place != Place::Here) {
                prop_assert!(!circle.candidates.is_empty());
            }
        }
    }

    #[test]
    fn once_the_first_has_given_up_its_circle_is_open(waits in waits()) {
        for pid in 0..7 {
            let Some(circle) = graph(&waits).circle(session(pid)) else { continue };
            let Some(first) = circle.candidates.first().map(|first| Party::Session(*first)) else { continue };
            let rest: Vec<_> = waits.iter().filter(|w| w.waiter != first && w.holder != first).copied().collect();
            prop_assert!(graph(&rest).circle(circle.candidates[0]).is_none());
        }
    }
}
