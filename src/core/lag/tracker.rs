//! One replica's lag over time: samples in, a summary and finished minutes out.
//!
//! Decides what counts for which figure. What always holds: a sample that says nothing about the replica (its primary was not
//! seen, or not long enough) is unknown in the distribution and does not burn the objective; any other unknown does. Finished
//! minutes, given to [`Tracker::restore`] of a later tracker, bring distribution and budget back.

use std::time::Duration;

use super::objective::{Alert, Burn, Objective};
use super::rotation::State;
use super::shape::{burst_hours, early_warning, shape};
use super::summary::Summary;
use super::window::{count, milliseconds, slice_number, Slice, Window};
use crate::replica::{Moment, Observation, Standing, Unknown};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const TEN_MINUTES: Duration = Duration::from_secs(600);

/// What an observation is for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Milliseconds behind, if that is known.
    pub lag: Option<u32>,
    /// Whether it is the replica's doing.
    pub is_its_own: bool,
}

impl Sample {
    /// `primary_seen`: the primary has answered lately, so that the lag is the replica's.
    #[must_use]
    pub fn of(observation: &Observation, primary_seen: bool) -> Self {
        let is_its_own = primary_seen
            && !matches!(
                observation.standing,
                Standing::Unknown(Unknown::NotAsked | Unknown::NoPrimary | Unknown::NotLongEnough)
            );
        let lag = match observation.standing {
            Standing::Replica { lag } if primary_seen => Some(milliseconds(lag)),
            _ => None,
        };
        Self { lag, is_its_own }
    }
}

/// A minute that is over: its number since 2000-01-01 UTC is the slice's.
pub type Minute = Slice;

/// One replica over time.
#[derive(Clone, Debug)]
pub struct Tracker {
    windows: [Window; 4],
    minute: Minute,
    burn: Option<Burn>,
    last: Option<Moment>,
    alert: (Alert, Moment),
    state: State,
}

impl Tracker {
    /// Begins to watch at `now`.
    #[must_use]
    pub fn new(now: Moment, objective: Option<Objective>) -> Self {
        let windows = [
            Window::new(SECOND, 60),
            Window::new(5 * SECOND, 60),
            Window::new(MINUTE, 60),
            Window::new(TEN_MINUTES, 144),
        ];
        Self {
            windows,
            minute: Slice::new(slice_number(now, MINUTE)),
            burn: objective.map(Burn::new),
            last: None,
            alert: (Alert::Ok, now),
            state: State::new(now),
        }
    }

    /// The objective.
    #[must_use]
    pub fn objective(&self) -> Option<&Objective> {
        self.burn.as_ref().map(Burn::objective)
    }

    /// Takes another objective, whose budget is whole until [`Tracker::restore_budget`] says what was bad.
    pub fn set_objective(&mut self, objective: Option<Objective>) {
        self.burn = objective.map(Burn::new);
    }

    /// Brings back what an earlier tracker gave, oldest first.
    pub fn restore(&mut self, minutes: &[Minute]) {
        for minute in minutes {
            let at = middle(minute);
            for window in self.windows.iter_mut().skip(2) {
                for (value, times) in &minute.counts {
                    window.add(at, Some(exact(minute, *value)), *times);
                }
                if minute.unknown > 0 {
                    window.add(at, None, minute.unknown);
                }
            }
        }
        self.restore_budget(minutes);
    }

    /// Notes what of these minutes was bad for the objective.
    pub fn restore_budget(&mut self, minutes: &[Minute]) {
        let Some(burn) = &mut self.burn else { return };
        let limit = milliseconds(burn.objective().threshold);
        for minute in minutes {
            let samples = minute.known() + u64::from(minute.unknown);
            let bad = minute.worse_than(limit);
            if bad > 0 {
                let watched = Duration::from_millis(minute.watched.into());
                burn.note_bad(middle(minute), watched.mul_f64(bad as f64 / samples as f64));
            }
        }
    }

    /// Adds a sample; returns the minute that it finds over.
    ///
    /// `interval`: between samples; a sample stands for the time since the last one, at most twice that.
    pub fn record(&mut self, now: Moment, sample: Sample, interval: Duration) -> Option<Minute> {
        let time = self.last.map_or(interval, |last| now.since(last).min(2 * interval));
        self.last = Some(now);
        for window in &mut self.windows {
            window.add(now, sample.lag, 1);
        }
        if let Some(burn) = self.burn.as_mut().filter(|_| sample.is_its_own) {
            burn.note(now, time, sample.lag);
        }
        let over = self.end_minute(now);
        if let Some(window) = self.windows.first() {
            count(&mut self.minute, window, sample.lag);
        }
        let watched = Duration::from_millis(self.minute.watched.into()) + time;
        self.minute.watched = u32::try_from(watched.min(MINUTE).as_millis()).unwrap_or(0);
        over
    }

    /// Ends the minute under way if `now` is not in it.
    pub fn end_minute(&mut self, now: Moment) -> Option<Minute> {
        let number = slice_number(now, MINUTE);
        if number <= self.minute.number {
            return None;
        }
        let over = std::mem::replace(&mut self.minute, Slice::new(number));
        (over.known() > 0 || over.unknown > 0).then_some(over)
    }

    /// The minute under way, for a tracker that ends before the minute does.
    #[must_use]
    pub fn minute(&self) -> &Minute {
        &self.minute
    }

    /// Decides anew who should look and which reads it gets, and returns all there is to say.
    pub fn summary(&mut self, now: Moment, drained: bool) -> Summary {
        for window in &mut self.windows {
            window.advance(now);
        }
        let rates = self.burn.as_mut().map(|burn| burn.rates(now));
        let alert = self.objective().zip(rates).map_or(Alert::Ok, |(objective, rates)| rates.alert(objective));
        if alert != self.alert.0 {
            self.alert = (alert, now);
        }
        self.state = self.state.next(now, drained, self.burn.as_mut());
        let figures = self.windows.each_ref().map(Window::figures);
        let [.., day] = &self.windows;
        let [.., of_day] = &figures;
        Summary {
            figures,
            rates,
            alert,
            alert_since: self.alert.1,
            early_warning: early_warning(day.slices()),
            shape: shape(of_day, day.slices()),
            burst_hours: burst_hours(of_day, day.slices(), TEN_MINUTES),
            state: self.state,
        }
    }
}

fn middle(minute: &Minute) -> Moment {
    Moment(minute.number.saturating_mul(60_000_000)).plus(MINUTE / 2)
}

/// The minute's exact maximum for the greatest of its values, which was rounded down.
fn exact(minute: &Minute, value: u32) -> u32 {
    let is_greatest = minute.counts.last().is_some_and(|greatest| greatest.0 == value);
    if is_greatest {
        minute.max
    } else {
        value
    }
}
