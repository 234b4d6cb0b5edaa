//! What is expected of a replica, and how fast it uses up what it may miss.
//!
//! An objective says that a share of time (the target, 99 % say) is spent under a lag (the threshold). What the target leaves
//! is the error budget. A burn rate of 1 uses up exactly the budget of a window; the usual pairs of a long and a short window
//! decide who is told (1 hour and 5 minutes, 6 hours and 30 minutes, 3 days and 6 hours): both must burn, so that what is over no
//! longer alarms. Time that nobody watched is taken to be good.
//! What always holds: a target below 94 % could never burn 14.4 times too fast; the limits are bounded so that it can alarm.

use std::collections::VecDeque;
use std::time::Duration;

use super::window::{milliseconds, slice_number};
use crate::replica::{codes, Moment};

/// What is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// The greatest lag that is good.
    pub threshold: Duration,
    /// The share of time in which it should be good: more than 0, less than 1.
    pub target: f64,
    /// How long it must be good before the replica gets reads again.
    pub calm: Duration,
}

impl Objective {
    /// Whether a sample is good; `None`: the lag is not known, which is bad.
    #[must_use]
    pub fn is_good(&self, lag: Option<u32>) -> bool {
        lag.is_some_and(|lag| lag <= milliseconds(self.threshold))
    }

    /// The share of time that may be bad.
    fn budget(&self) -> f64 {
        (1.0 - self.target).clamp(1e-9, 1.0)
    }

    /// A limit of burn rates, or 90 % of the greatest there can be.
    #[must_use]
    pub fn limit(&self, usual: f64) -> f64 {
        usual.min(0.9 / self.budget())
    }
}

codes! {
    /// Who should look at a replica.
    Alert {
        /// Nobody.
        Ok = 0, "ok";
        /// Somebody, some time: the budget does not last.
        Warn = 1, "warn";
        /// Somebody, now: it will soon be gone.
        Page = 2, "page";
    }
}

/// Burn rate at which the budget of 30 days loses 2 % in an hour.
pub const FAST: f64 = 14.4;
/// Loses 5 % in six hours.
pub const MEDIUM: f64 = 6.0;
/// Loses 10 % in three days.
pub const SLOW: f64 = 1.0;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// Burn rates over 5 minutes, 30 minutes, 1 hour, 6 hours and 3 days.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Over 5 minutes.
    pub five_minutes: f64,
    /// Over half an hour.
    pub half_hour: f64,
    /// Over an hour.
    pub hour: f64,
    /// Over six hours.
    pub six_hours: f64,
    /// Over three days.
    pub three_days: f64,
}

impl Rates {
    /// Who should look, by the usual pairs of windows.
    #[must_use]
    pub fn alert(&self, objective: &Objective) -> Alert {
        let both = |long: f64, short: f64, usual: f64| long.min(short) >= objective.limit(usual);
        if both(self.hour, self.five_minutes, FAST) || both(self.six_hours, self.half_hour, MEDIUM) {
            Alert::Page
        } else if both(self.three_days, self.six_hours, SLOW) {
            Alert::Warn
        } else {
            Alert::Ok
        }
    }

    /// The share of three days' budget that is left; less than 0: overdrawn.
    #[must_use]
    pub fn budget_left(&self) -> f64 {
        1.0 - self.three_days
    }
}

/// Bad time over a length of time up to now.
#[derive(Clone, Debug)]
struct Bad {
    slice: Duration,
    slices: i64,
    /// Numbers of slices, and their bad time in microseconds. Slices without any are left out.
    past: VecDeque<(i64, u64)>,
}

impl Bad {
    fn new(slice: Duration, slices: i64) -> Self {
        Self { slice, slices, past: VecDeque::new() }
    }

    fn advance(&mut self, at: Moment) {
        let number = slice_number(at, self.slice);
        while self.past.front().is_some_and(|slice| slice.0 < number.saturating_sub(self.slices)) {
            self.past.pop_front();
        }
    }

    fn add(&mut self, at: Moment, bad: Duration) {
        self.advance(at);
        let number = slice_number(at, self.slice);
        let micros = u64::try_from(bad.as_micros()).unwrap_or(u64::MAX);
        match self.past.back_mut() {
            Some(slice) if slice.0 >= number => slice.1 = slice.1.saturating_add(micros),
            _ => self.past.push_back((number, micros)),
        }
    }

    fn rate(&self, objective: &Objective) -> f64 {
        let bad: f64 = self.past.iter().map(|slice| slice.1 as f64).sum();
        let length = self.slice.as_micros() as f64 * self.slices as f64;
        (bad / length).min(1.0) / objective.budget()
    }
}

/// How a replica's objective burns.
#[derive(Clone, Debug)]
pub struct Burn {
    objective: Objective,
    windows: [Bad; 5],
    /// The last bad sample.
    last_bad: Option<Moment>,
}

impl Burn {
    /// Begins with the whole budget.
    #[must_use]
    pub fn new(objective: Objective) -> Self {
        let windows = [
            Bad::new(5 * MINUTE / 60, 60),
            Bad::new(MINUTE / 2, 60),
            Bad::new(MINUTE, 60),
            Bad::new(5 * MINUTE, 72),
            Bad::new(HOUR, 72),
        ];
        Self { objective, windows, last_bad: None }
    }

    /// The objective.
    #[must_use]
    pub fn objective(&self) -> &Objective {
        &self.objective
    }

    /// Notes that the time up to `at`, so long, was as this sample says.
    pub fn note(&mut self, at: Moment, time: Duration, lag: Option<u32>) {
        if !self.objective.is_good(lag) {
            self.note_bad(at, time);
        }
    }

    /// Notes that so much time up to `at` was bad.
    pub fn note_bad(&mut self, at: Moment, time: Duration) {
        self.last_bad = self.last_bad.max(Some(at));
        for window in &mut self.windows {
            window.add(at, time);
        }
    }

    /// The burn rates at `now`.
    pub fn rates(&mut self, now: Moment) -> Rates {
        let objective = self.objective;
        let [five_minutes, half_hour, hour, six_hours, three_days] = &mut self.windows;
        let rate = |window: &mut Bad| {
            window.advance(now);
            window.rate(&objective)
        };
        Rates {
            five_minutes: rate(five_minutes),
            half_hour: rate(half_hour),
            hour: rate(hour),
            six_hours: rate(six_hours),
            three_days: rate(three_days),
        }
    }

    /// Whether all has been good for as long as a replica must be before it gets reads again.
    #[must_use]
    pub fn is_calm(&self, now: Moment) -> bool {
        self.last_bad.is_none_or(|bad| now.since(bad) >= self.objective.calm)
    }
}
