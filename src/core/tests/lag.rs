//! Lag against a model of a primary whose every step is known, and distributions and budgets over simulated days.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::time::Duration;

use proptest::prelude::*;
use shardmap_core::lag::history::{History, POINTS};
use shardmap_core::lag::judge::{self, Answer, Asked};
use shardmap_core::lag::objective::{Alert, Objective};
use shardmap_core::lag::rotation::Why;
use shardmap_core::lag::shape::Shape;
use shardmap_core::lag::summary::{news, Summary, WORDS};
use shardmap_core::lag::tracker::{Minute, Sample, Tracker};
use shardmap_core::lag::window::milliseconds;
use shardmap_core::replica::{
    Invalid, Lsn, Moment, Observation, Receiver, Rotation, Standing, SystemIdentifier, Timeline, Unknown,
};

const SECOND: Duration = Duration::from_secs(1);
const SYSTEM: SystemIdentifier = SystemIdentifier(7);

/// Seconds since the epoch of the test, which is in the day's middle.
fn at(seconds: f64) -> Moment {
    Moment((43_200 + 86_400 * 9_000) * 1_000_000).plus(Duration::from_secs_f64(seconds))
}

fn answer(in_recovery: bool, lsn: u64) -> Answer {
    Answer {
        in_recovery,
        system: Some(SYSTEM),
        timeline: Some(Timeline(1)),
        timeline_is_current: true,
        position: Some(Lsn(lsn)),
        received: in_recovery.then_some(Lsn(lsn)),
        receiver: in_recovery.then_some(Receiver::Running),
        paused: in_recovery.then_some(false),
    }
}

fn asked(seconds: f64, heard: Result<Answer, Unknown>) -> Asked {
    Asked { sent: at(seconds), came: at(seconds + 0.002), heard }
}

/// A primary that was at `lsn` at each of these seconds.
fn watched(looks: &[(f64, u64)]) -> History {
    let mut history = None;
    for (seconds, lsn) in looks {
        judge::primary(&asked(*seconds, Ok(answer(false, *lsn))), &mut history);
    }
    history.unwrap()
}

fn lag_of(history: &History, seconds: f64, lsn: u64) -> Option<f64> {
    history.lag(Lsn(lsn), at(seconds), SECOND).map(|lag| lag.as_secs_f64())
}

#[test]
fn lag_is_the_time_since_the_primary_left_the_position() {
    let history = watched(&[(0.0, 100), (1.0, 100), (2.0, 200), (3.0, 300)]);
    for (lsn, want) in [
        (99, None),
        (100, Some(2.0)),
        (150, Some(1.5)),
        (200, Some(1.0)),
        (250, Some(0.5)),
        (300, Some(0.0)),
        (999, Some(0.0)),
    ] {
        assert_eq!(lag_of(&history, 3.0, lsn), want, "lsn {lsn}");
    }
    assert_eq!(history.behind(Lsn(250)), 50);
    assert_eq!(history.behind(Lsn(301)), 0);
}

#[test]
fn an_idle_primary_is_no_lag_and_an_unseen_one_is() {
    let history = watched(&[(0.0, 100), (3600.0, 100)]);
    assert_eq!(lag_of(&history, 3600.5, 100), Some(0.0));
    // What was written while nobody looked is not there yet, for all we know.
    assert_eq!(lag_of(&history, 3660.0, 100), Some(60.0));
}

#[test]
fn a_failover_takes_what_cannot_be_true_any_more() {
    let mut history = Some(watched(&[(0.0, 100), (1.0, 200), (2.0, 300)]));
    let mut promoted = answer(false, 150);
    promoted.timeline = Some(Timeline(2));
    assert_eq!(judge::primary(&asked(3.0, Ok(promoted)), &mut history).standing, Standing::Primary);
    let history_now = history.clone().unwrap();
    assert_eq!((history_now.timeline(), history_now.newest()), (Timeline(2), Lsn(150)));
    // The former primary comes back: it is not believed.
    let observation = judge::primary(&asked(4.0, Ok(answer(false, 400))), &mut history);
    assert_eq!(observation.standing, Standing::Invalid(Invalid::OtherTimeline));
    assert_eq!(history, Some(history_now));
    // Another cluster at the same address is another history.
    let other = Answer { system: Some(SystemIdentifier(8)), ..answer(false, 50) };
    judge::primary(&asked(5.0, Ok(other)), &mut history);
    assert_eq!(history.map(|history| (history.len(), history.newest())), Some((1, Lsn(50))));
}

#[test]
fn a_replica_ahead_of_what_its_primary_wrote_later_follows_another_one() {
    let at = |second, lsn| {
        let history = watched(&[(0.0, 100)]);
        judge::replica(&asked(second, Ok(answer(true, lsn))), Some(&history), Duration::from_secs(3))
    };
    let primary = |second, lsn| asked(second, Ok(answer(false, lsn)));
    assert!(judge::is_ahead(&at(1.0, 201), &primary(2.0, 200)));
    assert!(!judge::is_ahead(&at(1.0, 200), &primary(2.0, 200)));
    // The primary may have written it in between.
    assert!(!judge::is_ahead(&at(2.0, 201), &primary(1.0, 200)));
    for other in [
        Answer { timeline: Some(Timeline(2)), ..answer(false, 200) },
        Answer { system: Some(SystemIdentifier(8)), ..answer(false, 200) },
        Answer { system: None, ..answer(false, 200) },
        answer(true, 200),
    ] {
        assert!(!judge::is_ahead(&at(1.0, 201), &asked(2.0, Ok(other))), "{other:?}");
    }
    assert!(!judge::is_ahead(&at(1.0, 201), &asked(2.0, Err(Unknown::Unreachable))));
}

#[test]
fn a_replica_is_known_unknown_or_invalid() {
    let history = watched(&[(0.0, 100), (1.0, 200), (2.0, 300)]);
    let good = answer(true, 200);
    let cases = [
        (good, Standing::Replica { lag: Duration::from_millis(1002) }),
        (Answer { position: Some(Lsn(300)), ..good }, Standing::Replica { lag: Duration::ZERO }),
        (Answer { position: Some(Lsn(50)), ..good }, Standing::Unknown(Unknown::NotLongEnough)),
        (Answer { position: None, ..good }, Standing::Unknown(Unknown::NotLongEnough)),
        (Answer { in_recovery: false, ..good }, Standing::Invalid(Invalid::NotReplica)),
        (Answer { system: Some(SystemIdentifier(8)), ..good }, Standing::Invalid(Invalid::OtherSystem)),
        (Answer { system: None, ..good }, Standing::Replica { lag: Duration::from_millis(1002) }),
        (Answer { timeline: Some(Timeline(2)), ..good }, Standing::Invalid(Invalid::OtherTimeline)),
        (Answer { timeline: Some(Timeline(0)), ..good }, Standing::Invalid(Invalid::OtherTimeline)),
        (Answer { timeline: None, ..good }, Standing::Unknown(Unknown::TimelineHidden)),
        (
            Answer { timeline: Some(Timeline(0)), timeline_is_current: false, ..good },
            Standing::Unknown(Unknown::TimelineHidden),
        ),
        (
            Answer { timeline: Some(Timeline(2)), timeline_is_current: false, ..good },
            Standing::Invalid(Invalid::OtherTimeline),
        ),
        // Even one that has replayed all: what comes next would not reach it.
        (
            Answer { position: Some(Lsn(300)), receiver: Some(Receiver::Stopped), ..good },
            Standing::Unknown(Unknown::NoReceiver),
        ),
        (Answer { receiver: Some(Receiver::NotUsed), ..good }, Standing::Replica { lag: Duration::from_millis(1002) }),
    ];
    for (answer, want) in cases {
        let observation = judge::replica(&asked(2.0, Ok(answer)), Some(&history), SECOND);
        assert_eq!(observation.standing, want, "{answer:?}");
    }
    for why in Unknown::ALL {
        let observation = judge::replica(&asked(2.0, Err(*why)), Some(&history), SECOND);
        assert_eq!((observation.standing, observation.replayed), (Standing::Unknown(*why), None));
    }
    let alone = judge::replica(&asked(2.0, Ok(good)), None, SECOND);
    assert_eq!(alone.standing, Standing::Unknown(Unknown::NoPrimary));
}

#[test]
fn history_is_bounded_and_keeps_its_beginning() {
    let looks: Vec<_> = (0u32..50_000).map(|second| (f64::from(second), 1000 + u64::from(second) * 10)).collect();
    let history = watched(&looks);
    assert!(history.len() <= POINTS);
    assert_eq!(lag_of(&history, 49_999.0, 1000), Some(49_999.0));
    // The primary wrote evenly, so that thinning costs nothing.
    assert_eq!(lag_of(&history, 49_999.0, 1000 + 12_345 * 10), Some(37_654.0));
}

proptest! {
    /// A primary that writes at random, looked at every second; a replica that shows the state of any moment.
    #[test]
    fn lag_is_right_to_the_time_between_two_looks(
        steps in prop::collection::vec(0u64..3, 2..200), moment in any::<prop::sample::Index>(), into in 0.0..1.0f64,
    ) {
        let mut lsn = 1000;
        let looks: Vec<_> = steps.iter().enumerate().map(|(second, step)| {
            lsn += step * 1000;
            (second as f64, lsn)
        }).collect();
        let history = watched(&looks);
        let now = (looks.len() - 1) as f64;
        // Between two looks the primary writes evenly; the replica shows its state of `then`.
        let whole = moment.index(looks.len());
        let next = looks[(whole + 1).min(looks.len() - 1)].1;
        let here = looks[whole].1 + ((next - looks[whole].1) as f64 * into) as u64;
        let lag = lag_of(&history, now, here).unwrap();
        if here == lsn {
            prop_assert_eq!(lag, 0.0);
        } else {
            // The last moment at which the primary was still there.
            let left = looks.iter().rposition(|look| look.1 <= here).unwrap() as f64;
            prop_assert!(lag > 0.0 && lag <= now - left + 1e-5 && lag >= now - left - 1.0 - 1e-5, "{lag} {left} {now}");
        }
    }

    #[test]
    fn more_replayed_is_never_more_lag(
        looks in prop::collection::vec((0.001..5.0f64, 0u64..500), 1..300), one in 0u64..100_000, other in 0u64..100_000,
    ) {
        let (mut seconds, mut lsn) = (0.0, 0);
        let looks: Vec<_> = looks.into_iter().map(|(pause, step)| {
            seconds += pause;
            lsn += step;
            (seconds, lsn)
        }).collect();
        let history = watched(&looks);
        let (less, more) = (one.min(other), one.max(other));
        let lags = (lag_of(&history, seconds, less), lag_of(&history, seconds, more));
        match lags {
            (None, _) => {}
            (Some(less), Some(more)) => prop_assert!(more <= less),
            (Some(_), None) => prop_assert!(false, "the newer position is unknown"),
        }
    }

    /// A percentile of the histogram is the one of the sorted samples, to one percent, never less.
    #[test]
    fn percentiles_are_those_of_the_samples(lags in prop::collection::vec(0u32..10_000_000, 1..60)) {
        let mut tracker = Tracker::new(at(0.0), None);
        for (second, lag) in lags.iter().enumerate() {
            tracker.record(at(second as f64), Sample { lag: Some(*lag), is_its_own: true }, SECOND);
        }
        let mut sorted = lags.clone();
        sorted.sort_unstable();
        let exact = |share: f64| f64::from(sorted[((sorted.len() as f64 * share).ceil() as usize).max(1) - 1]);
        for figures in tracker.summary(at(lags.len() as f64 - 1.0), false).figures {
            prop_assert_eq!((figures.samples, figures.unknown), (lags.len() as u64, 0));
            prop_assert_eq!(f64::from(figures.max), exact(1.0));
            for (found, share) in [(figures.p50, 0.5), (figures.p90, 0.9), (figures.p99, 0.99)] {
                let (found, exact) = (f64::from(found), exact(share));
                prop_assert!(found >= exact && found <= exact * 1.01 + 1.0, "{share}: {found} {exact}");
            }
        }
    }

    #[test]
    fn any_words_are_taken_without_panic(words in any::<[u64; WORDS]>()) {
        let _ = Summary::of_words(&words);
    }
}

/// A replica whose lag in milliseconds is a function of the second; `None`: unknown.
struct Simulated {
    tracker: Tracker,
    second: f64,
    minutes: Vec<Minute>,
}

impl Simulated {
    fn new(objective: Option<Objective>) -> Self {
        Self { tracker: Tracker::new(at(0.0), objective), second: 0.0, minutes: Vec::new() }
    }

    fn run(&mut self, seconds: u32, lag: impl Fn(u32) -> Option<u32>) -> Summary {
        self.run_every(1, seconds, lag)
    }

    fn run_every(&mut self, interval: u32, seconds: u32, lag: impl Fn(u32) -> Option<u32>) -> Summary {
        for second in (0..seconds).step_by(interval as usize) {
            let sample = Sample { lag: lag(second), is_its_own: true };
            self.minutes.extend(self.tracker.record(at(self.second), sample, SECOND * interval));
            self.second += f64::from(interval);
        }
        self.tracker.summary(at(self.second), false)
    }
}

fn objective() -> Option<Objective> {
    Some(Objective { threshold: 5 * SECOND, target: 0.99, calm: Duration::from_secs(600) })
}

#[test]
fn unknown_is_counted_and_never_zero() {
    let summary = Simulated::new(None).run(60, |second| (second % 4 != 0).then_some(2000));
    let [minute, ..] = summary.figures;
    assert_eq!((minute.samples, minute.unknown), (60, 15));
    assert_eq!((minute.p50, minute.max), (2000, 2000));
}

#[test]
fn windows_forget() {
    let mut replica = Simulated::new(None);
    replica.run(60, |_| Some(9000));
    let [minute, five, hour, day] = replica.run(120, |_| Some(10)).figures;
    assert_eq!((minute.max, minute.samples), (10, 60));
    assert_eq!((five.max, five.samples), (9000, 180));
    let summary = replica.run(3700, |_| Some(10));
    assert_eq!(summary.figures[2].max, 10);
    assert_eq!((hour.max, day.max, summary.figures[3].max), (9000, 9000, 9000));
}

#[test]
fn what_was_kept_brings_back_distribution_and_budget() {
    let mut replica = Simulated::new(objective());
    let before = replica.run(3 * 3600, |second| if second % 100 == 0 { None } else { Some(second % 7 * 1000) });
    let mut later = Tracker::new(at(replica.second), objective());
    later.restore(&replica.minutes);
    later.restore(&[replica.tracker.minute().clone()]);
    let after = later.summary(at(replica.second), false);
    assert_eq!(after.figures[3], before.figures[3]);
    let (before, after) = (before.rates.unwrap(), after.rates.unwrap());
    assert!(
        before.three_days > 5.0 / 72.0 && (after.three_days - before.three_days).abs() < 0.05,
        "{before:?} {after:?}"
    );
}

#[test]
fn burn_rates_are_the_share_of_the_budget() {
    // 36 s in an hour are exactly 1 % of it.
    let summary = Simulated::new(objective()).run(3600, |second| Some(if second < 36 { 6000 } else { 0 }));
    let rates = summary.rates.unwrap();
    assert!((rates.hour - 1.0).abs() < 0.05, "{rates:?}");
    assert_eq!(rates.half_hour, 0.0, "it was in the other half");
    assert!((rates.six_hours - 1.0 / 6.0).abs() < 0.01 && (rates.three_days - 1.0 / 72.0).abs() < 0.001, "{rates:?}");
    assert_eq!(rates.five_minutes, 0.0);
    assert_eq!((summary.alert, summary.state.rotation), (Alert::Ok, Rotation::In));
}

#[test]
fn a_burning_replica_leaves_in_two_steps_and_comes_back_when_calm() {
    let mut replica = Simulated::new(objective());
    assert_eq!(replica.run(3600, |_| Some(0)).state.why, Why::Start);
    let out_of = |rotation: Rotation, replica: &mut Simulated| {
        let seconds = (1..3600).find(|_| replica.run(1, |_| None).state.rotation == rotation);
        seconds.unwrap()
    };
    // 14.4 times too fast over five minutes: 43.2 s of 300; over an hour: 518.4 s of 3600.
    assert_eq!(out_of(Rotation::OutOfReadYourWrites, &mut replica), 44);
    assert_eq!(out_of(Rotation::Out, &mut replica), 519 - 44);
    let summary = replica.run(1, |_| None);
    assert_eq!((summary.alert, summary.state.why), (Alert::Page, Why::Paging));
    // Good again: nobody is paged after five minutes, and the replica is back after ten.
    assert_eq!(replica.run(300, |_| Some(0)).alert, Alert::Ok);
    assert_eq!(replica.run(298, |_| Some(0)).state.rotation, Rotation::Out);
    let back = replica.run(3, |_| Some(0));
    assert_eq!((back.state.rotation, back.state.why), (Rotation::In, Why::Calm));
    assert!(at(replica.second).since(back.state.since) < 4 * SECOND);
}

/// The pairs of a long and a short window: what is over no longer alarms.
#[test]
fn pages_and_tickets_end_with_their_short_windows() {
    // A third of the time bad: 33 times too fast, for twenty minutes. Then good.
    let bad = |second: u32| Some(if second.is_multiple_of(3) { 9000 } else { 0 });
    let alert = |replica: &mut Simulated, seconds| replica.run(seconds, |_| Some(0)).alert;
    let mut replica = Simulated::new(objective());
    replica.run(6 * 3600, |_| Some(0));
    let burning = replica.run(1200, bad);
    let rates = burning.rates.unwrap();
    // Over an hour 11, too little for a page by that; over half an hour 22, over six hours 1.9.
    assert!((rates.hour - 11.1).abs() < 0.3 && (rates.half_hour - 22.2).abs() < 0.6, "{rates:?}");
    assert_eq!(burning.alert, Alert::Ok);
    // Twice as slow for an hour and a half more: six hours reach 6, and half an hour is far beyond.
    let burning = replica.run(5400, |second| Some(if second.is_multiple_of(6) { 9000 } else { 0 }));
    let rates = burning.rates.unwrap();
    assert!(rates.six_hours >= 6.0 && rates.half_hour >= 14.4 && burning.alert == Alert::Page, "{rates:?}");
    // Calm again: five minutes later the first pair is silent, half an hour later the second, though six hours and one still burn.
    let after = replica.run(1500, |_| Some(0)).rates.unwrap();
    assert!(after.half_hour < 6.0 && after.six_hours >= 6.0 && after.hour >= 6.0, "{after:?}");
    assert_eq!(alert(&mut replica, 1), Alert::Ok);
}

#[test]
fn drain_comes_first() {
    let mut tracker = Tracker::new(at(0.0), objective());
    assert_eq!(tracker.summary(at(1.0), true).state.rotation, Rotation::Drained);
    let back = tracker.summary(at(2.0), false).state;
    assert_eq!((back.rotation, back.why, back.since), (Rotation::In, Why::Undrained, at(2.0)));
}

#[test]
fn a_low_target_can_still_page() {
    let low = Some(Objective { threshold: SECOND, target: 0.5, calm: SECOND });
    assert_eq!(Simulated::new(low).run(3600, |_| Some(60_000)).alert, Alert::Page);
}

#[test]
fn what_the_primary_does_is_not_held_against_the_replica() {
    let mut lagging = Observation::unknown(at(0.0), Unknown::NotAsked);
    for (standing, primary_seen, want) in [
        (Standing::Replica { lag: 7 * SECOND }, true, (Some(7000), true)),
        (Standing::Replica { lag: 7 * SECOND }, false, (None, false)),
        (Standing::Unknown(Unknown::Unreachable), true, (None, true)),
        (Standing::Invalid(Invalid::OtherSystem), true, (None, true)),
        (Standing::Unknown(Unknown::NoPrimary), true, (None, false)),
        (Standing::Unknown(Unknown::NotLongEnough), true, (None, false)),
    ] {
        lagging.standing = standing;
        let sample = Sample::of(&lagging, primary_seen);
        assert_eq!((sample.lag, sample.is_its_own), want, "{standing:?}");
    }
    assert_eq!((milliseconds(Duration::ZERO), milliseconds(Duration::from_micros(1))), (0, 1));
}

/// The reference's case: p90 of 2 s, p99 of 12 s, a maximum of 90 s.
#[test]
fn shapes() {
    let day = 24 * 3600;
    let bursty = |second: u32| {
        Some(match second % 10_000 {
            0 => {
                if second == 40_000 {
                    90_000
                } else {
                    12_000
                }
            }
            1..=100 => 12_000,
            101..=1100 => 2000,
            _ => 100,
        })
    };
    let summary = Simulated::new(None).run_every(10, day, bursty);
    let [.., figures] = summary.figures;
    assert!(
        figures.p90.abs_diff(2000) <= 20 && figures.p99.abs_diff(12_000) <= 120 && figures.max == 90_000,
        "{figures:?}"
    );
    assert_eq!(summary.shape, Shape::Bursty);

    let steady = Simulated::new(None).run_every(10, day, |second| Some(2000 + second % 300));
    assert_eq!((steady.shape, steady.burst_hours), (Shape::Steady, 0));
    let small = Simulated::new(None).run_every(10, day, |second| Some(second % 90));
    assert_eq!(small.shape, Shape::Steady);
    let growing = Simulated::new(None).run_every(10, day, |second| Some(1000 + second));
    assert_eq!(growing.shape, Shape::Degrading);
    assert_eq!(Simulated::new(None).run(30, |_| Some(1)).shape, Shape::Unclear);

    // A nightly job: the clock starts at noon UTC, so that 15 hours later it is 3 o'clock.
    let nightly = |second: u32| Some(if (54_000..54_600).contains(&second) { 30_000 } else { 50 });
    let summary = Simulated::new(None).run_every(10, day, nightly);
    assert_eq!((summary.shape, summary.burst_hours), (Shape::Bursty, 1 << 3));
}

#[test]
fn a_growing_maximum_under_a_steady_p99_warns_early() {
    let growing = |second: u32| Some(if second % 600 == 300 { 1000 + second * 4 } else { 20 });
    assert!(Simulated::new(None).run(2400, growing).early_warning);
    let constant = |second: u32| Some(if second % 600 == 300 { 5000 } else { 20 });
    assert!(!Simulated::new(None).run(2400, constant).early_warning);
    // p99 grows too: that is no early warning, it is here.
    assert!(!Simulated::new(None).run(2400, |second| Some(1000 + second * 2)).early_warning);
}

#[test]
fn only_a_change_is_news() {
    let mut replica = Simulated::new(objective());
    let good = replica.run(3600, |_| Some(0));
    assert_eq!(news("s", "r", None, &good), None);
    let bad = replica.run(60, |_| None);
    assert_eq!(news("s", "r", Some(&bad), &bad), None);
    let told: serde_json::Value = serde_json::from_str(&news("s", "a \"r\"", Some(&good), &bad).unwrap()).unwrap();
    let want = serde_json::json!({
        "shard": "s", "replica": "a \"r\"", "alert": "ok", "rotation": "out of read-your-writes", "early_warning": false,
        "why": "objective missed in the last five minutes",
        "was": {"alert": "ok", "rotation": "in", "early_warning": false},
    });
    assert_eq!(told, want);
    assert!(news("s", "r", None, &bad).is_some());
}

#[test]
fn words_give_back_the_summary() {
    let mut replica = Simulated::new(objective());
    let summary = replica.run(700, |second| (second % 5 != 0).then_some(second * 10));
    assert_eq!(Summary::of_words(&summary.words()), Some(summary));
    let summary = Simulated::new(None).run(10, Some);
    assert_eq!(Summary::of_words(&summary.words()), Some(summary));
    assert_eq!(Summary::of_words(&[0; WORDS]), None);
}
