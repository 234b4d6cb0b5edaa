//! A primary's positions over gaps, restarts and clocks that are set: nobody seems less behind than he may be.

#![allow(clippy::unwrap_used)] // a test that fails here has failed

use std::time::Duration;

use shardmap_core::lag::history::{History, Kept};
use shardmap_core::replica::{Lsn, Moment, SystemIdentifier, Timeline};

const SECOND: Duration = Duration::from_secs(1);
const SYSTEM: SystemIdentifier = SystemIdentifier(7);

fn at(seconds: f64) -> Moment {
    Moment(86_400_000_000).plus(Duration::from_secs_f64(seconds))
}

fn look(history: &mut History, seconds: f64, lsn: u64) {
    history.note(Some(SYSTEM), Timeline(1), Lsn(lsn), at(seconds));
}

/// A primary that was at `lsn` at each of these seconds.
fn watched(looks: &[(f64, u64)]) -> History {
    let (first, rest) = looks.split_first().unwrap();
    let mut history = History::new(Some(SYSTEM), Timeline(1), Lsn(first.1), at(first.0));
    rest.iter().for_each(|(seconds, lsn)| look(&mut history, *seconds, *lsn));
    history
}

fn lag_of(history: &History, seconds: f64, lsn: u64) -> Option<f64> {
    history.lag(Lsn(lsn), at(seconds), SECOND).map(|lag| lag.as_secs_f64())
}

#[test]
fn what_nobody_saw_makes_nobody_less_behind() {
    let history = watched(&[(0.0, 100), (9.0, 200), (20.0, 300), (21.0, 400)]);
    // Evenly within a moment; all at once at the beginning of a long time.
    assert_eq!(lag_of(&history, 21.0, 150), Some(16.5));
    assert_eq!(lag_of(&history, 21.0, 299), Some(12.0));
    assert_eq!(lag_of(&history, 21.0, 300), Some(1.0));
    // Thinning forgets no gap.
    let looks: Vec<_> = (0u32..2000).map(|second| (f64::from(second), 1000 + u64::from(second))).collect();
    let later = (0u32..8000).map(|second| (f64::from(10_000 + second), 5000 + u64::from(second)));
    let history = watched(&looks.into_iter().chain(later).collect::<Vec<_>>());
    let lag = lag_of(&history, 18_000.0, 4990).unwrap();
    assert!((15_990.0..=16_040.0).contains(&lag), "{lag}");
}

/// The coordinator's clock is the only one that counts; it may be set.
#[test]
fn a_clock_that_is_set_gives_no_false_zero() {
    let mut history = Some(watched(&[(0.0, 100), (1.0, 200), (2.0, 300)]));
    // Set back so that a look a moment after 2 seems to be at 1.5.
    look(history.as_mut().unwrap(), 1.5, 400);
    let back = history.clone().unwrap();
    for (lsn, want) in [(200, 1.0), (100, 2.0), (300, 0.0), (400, 0.0)] {
        assert_eq!(lag_of(&back, 1.5, lsn), Some(want), "lsn {lsn}");
    }
    look(history.as_mut().unwrap(), 2.5, 500);
    assert_eq!(lag_of(&history.clone().unwrap(), 2.5, 300), Some(1.0));
    // Set forward by an hour: who is behind seems further behind, who is not is at zero.
    look(history.as_mut().unwrap(), 3602.5, 500);
    let forward = history.unwrap();
    assert_eq!((lag_of(&forward, 3602.5, 500), lag_of(&forward, 3602.5, 400)), (Some(0.0), Some(3601.0)));
}

#[test]
fn what_was_kept_lets_lag_be_known_at_once() {
    let before = watched(&[(0.0, 100), (60.0, 400)]);
    let kept = [before.kept().unwrap(), Kept { at: at(120.0), lsn: Lsn(1000), ..before.kept().unwrap() }];
    // Ten minutes later somebody looks again.
    let mut history = History::restored(&kept, Some(SYSTEM), Timeline(1));
    look(history.as_mut().unwrap(), 720.0, 1600);
    let history = history.unwrap();
    assert_eq!(lag_of(&history, 720.0, 1600), Some(0.0));
    // Anything may have happened meanwhile: it is not said to be less behind than it may be.
    assert_eq!(lag_of(&history, 720.0, 1300), Some(600.0));
    assert_eq!(lag_of(&history, 720.0, 400), Some(660.0));
    assert_eq!(lag_of(&history, 720.0, 399), None);
    // Not of another log, nor of one that is newer than what the primary says now, as after it was set back.
    assert_eq!(History::restored(&kept, Some(SystemIdentifier(8)), Timeline(1)), None);
    assert_eq!(History::restored(&kept, None, Timeline(1)), None);
    assert_eq!(History::restored(&kept, Some(SYSTEM), Timeline(0)), None);
    assert_eq!(History::restored(&[], Some(SYSTEM), Timeline(1)), None);
    assert_eq!(History::new(None, Timeline(1), Lsn(1), at(0.0)).kept(), None);
}
