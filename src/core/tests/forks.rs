//! What is known of the places where timelines parted, and what is not taken for known.

#![allow(clippy::unwrap_used)] // a test that fails here has failed

use proptest::prelude::*;
use shardmap_core::lag::forks::{of_history_file, Forks, Recovering, WORDS};
use shardmap_core::reads::position::{Fork, Lsn, Timeline};
use shardmap_core::replica::SystemIdentifier;

const SYSTEM: SystemIdentifier = SystemIdentifier(7);

fn fork(from: u32, to: u32, at: u64) -> Fork {
    Fork { from: Timeline(from), to: Timeline(to), at: Lsn(at) }
}

#[test]
fn a_history_file_names_every_parent() {
    let text = "1\t0/80\tno recovery target specified\n\n# by hand\n2\t1/A0\tbefore 2000-01-01\n";
    assert_eq!(of_history_file(text, Timeline(4)), [fork(1, 2, 0x80), fork(2, 4, 0x1_0000_00A0)]);
    assert_eq!(of_history_file("", Timeline(1)), []);
    for wrong in ["1", "1\tx", "a\t0/1", "2\t0/1\n1\t0/2", "4\t0/1", "5\t0/1"] {
        assert_eq!(of_history_file(wrong, Timeline(4)), [], "{wrong}");
    }
}

#[test]
fn a_promotion_that_was_watched_is_a_fork() {
    let was = Recovering { system: SYSTEM, timeline: Timeline(1) };
    assert_eq!(was.promoted(SYSTEM, Timeline(2), Lsn(80)), Some(fork(1, 2, 80)));
    // Timeline 2 may be its parent.
    assert_eq!(was.promoted(SYSTEM, Timeline(3), Lsn(80)), None);
    assert_eq!(was.promoted(SYSTEM, Timeline(1), Lsn(80)), None);
    assert_eq!(was.promoted(SystemIdentifier(8), Timeline(2), Lsn(80)), None);
    let last = Recovering { system: SYSTEM, timeline: Timeline(u32::MAX) };
    assert_eq!(last.promoted(SYSTEM, Timeline(0), Lsn(80)), None);
}

#[test]
fn the_newest_forks_are_kept_and_one_of_each_timeline() {
    let mut forks = Forks::new(SYSTEM);
    assert!(forks.add(fork(1, 2, 80)));
    assert!(!forks.add(fork(1, 2, 80)), "that is no news");
    assert!(forks.add(fork(1, 2, 70)));
    assert!(!forks.add(fork(2, 2, 70)) && !forks.add(fork(3, 2, 70)));
    assert_eq!(forks.list(), [fork(1, 2, 70)]);
    for timeline in [9, 3, 8, 4, 7, 5, 6] {
        forks.add(fork(timeline - 1, timeline, 1));
    }
    assert_eq!(forks.list().iter().map(|fork| fork.to.0).collect::<Vec<_>>(), [4, 5, 6, 7, 8, 9]);
    assert!(!forks.add(fork(1, 2, 80)), "there is no room for what is so old");
}

proptest! {
    #[test]
    fn words_give_back_the_forks(system in any::<u64>(), pairs in prop::collection::vec((0u32..90, 1u32..9, any::<u64>()), 0..9)) {
        let mut forks = Forks::new(SystemIdentifier(system));
        for (from, step, at) in pairs {
            forks.add(fork(from, from + step, at));
        }
        prop_assert_eq!(Forks::of_words(&forks.words()), Some(forks));
    }

    #[test]
    fn any_words_are_taken_without_panic(words in any::<[u64; WORDS]>()) {
        let _ = Forks::of_words(&words);
    }
}

#[test]
fn empty_memory_is_no_forks() {
    assert_eq!(Forks::of_words(&[0; WORDS]), None);
}
