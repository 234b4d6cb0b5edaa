//! The distribution of lag over the last minutes and hours.
//!
//! Decides how samples age: a window is cut into slices, and loses its oldest slice as time goes on, so that it covers its
//! length and up to a slice more. What always holds: unknown samples are counted apart; a value is right to one percent,
//! the greatest exactly; memory is bounded by the histogram's own number of distinct values a slice. Values are
//! milliseconds.

use std::collections::VecDeque;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::replica::Moment;

/// The greatest lag that is told apart: 49 days.
pub const MAX_MS: u32 = u32::MAX;
/// Of a value, so that it is right to one percent.
const SIGNIFICANT_DIGITS: u8 = 2;

/// A lag as samples count it: rounded up, so that only none is 0.
#[must_use]
pub fn milliseconds(lag: Duration) -> u32 {
    u32::try_from(lag.as_micros().div_ceil(1000)).unwrap_or(MAX_MS)
}

/// Samples of a short time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// Its number since the epoch.
    pub number: i64,
    /// Values with how often they came, in ascending order.
    pub counts: Vec<(u32, u32)>,
    /// Samples of which the lag is not known.
    pub unknown: u32,
    /// The greatest value, exactly.
    pub max: u32,
    /// Milliseconds that its samples stand for. Kept for minutes only.
    pub watched: u32,
}

impl Slice {
    /// An empty one.
    #[must_use]
    pub fn new(number: i64) -> Self {
        Self { number, ..Self::default() }
    }

    /// Adds samples of one value. `exact`: the value before it was rounded.
    fn add(&mut self, value: u32, times: u32, exact: u32) {
        match self.counts.binary_search_by_key(&value, |count| count.0) {
            Ok(at) => {
                if let Some(count) = self.counts.get_mut(at) {
                    count.1 = count.1.saturating_add(times);
                }
            }
            Err(at) => self.counts.insert(at, (value, times)),
        }
        self.max = self.max.max(exact);
    }

    /// Samples of which the lag is known.
    #[must_use]
    pub fn known(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(count.1)).sum()
    }

    /// The least value that this share of the known samples does not exceed.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<u32> {
        let known = self.known();
        let wanted = ((known as f64 * share).ceil() as u64).clamp(1, known.max(1));
        let mut seen = 0;
        self.counts.iter().find_map(|(value, times)| {
            seen += u64::from(*times);
            (seen >= wanted).then_some(*value)
        })
    }

    /// How many samples exceed a value, the unknown ones among them.
    #[must_use]
    pub fn worse_than(&self, limit: u32) -> u64 {
        let worse = self.counts.iter().filter(|count| count.0 > limit);
        worse.map(|count| u64::from(count.1)).sum::<u64>() + u64::from(self.unknown)
    }
}

/// The number of the slice in which a moment lies.
#[must_use]
pub fn slice_number(at: Moment, length: Duration) -> i64 {
    at.0.div_euclid(i64::try_from(length.as_micros()).unwrap_or(i64::MAX).max(1))
}

/// A distribution in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Samples in all.
    pub samples: u64,
    /// Those of which the lag is not known.
    pub unknown: u64,
    /// Milliseconds that half of the known samples do not exceed.
    pub p50: u32,
    /// Nine in ten.
    pub p90: u32,
    /// 99 in 100.
    pub p99: u32,
    /// The greatest.
    pub max: u32,
}

/// A distribution over a length of time up to now.
#[derive(Clone, Debug)]
pub struct Window {
    slice: Duration,
    slices: i64,
    /// In the order of time; the last is the current one.
    past: VecDeque<Slice>,
    /// All of `past`.
    total: Histogram<u32>,
}

impl Window {
    /// An empty window of `slices` slices.
    #[must_use]
    pub fn new(slice: Duration, slices: u16) -> Self {
        Self { slice, slices: slices.into(), past: VecDeque::new(), total: empty() }
    }

    /// How long it is.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.slice * u32::try_from(self.slices).unwrap_or(u32::MAX)
    }

    /// Adds samples at `at`; `None`: of which the lag is not known.
    pub fn add(&mut self, at: Moment, value: Option<u32>, times: u32) {
        self.advance(at);
        let value = value.map(|exact| (exact, rounded(&self.total, exact)));
        let Some(slice) = self.past.back_mut() else { return };
        match value {
            Some((exact, value)) => {
                slice.add(value, times, exact);
                self.total.saturating_record_n(value.into(), times);
            }
            None => slice.unknown = slice.unknown.saturating_add(times),
        }
    }

    /// Lets time go on to `at`.
    pub fn advance(&mut self, at: Moment) {
        let number = slice_number(at, self.slice);
        if self.past.back().is_none_or(|slice| slice.number < number) {
            self.past.push_back(Slice::new(number));
        }
        // After a clock was set back the newest slice takes what comes.
        let newest = self.past.back().map_or(number, |slice| slice.number);
        let before = self.past.len();
        while self.past.front().is_some_and(|slice| slice.number < newest.saturating_sub(self.slices)) {
            self.past.pop_front();
        }
        if self.past.len() < before {
            self.total.reset();
            for (value, times) in self.past.iter().flat_map(|slice| &slice.counts) {
                self.total.saturating_record_n(u64::from(*value), *times);
            }
        }
    }

    /// The distribution.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let unknown = self.past.iter().map(|slice| u64::from(slice.unknown)).sum();
        let max = self.past.iter().map(|slice| slice.max).max().unwrap_or(0);
        let at = |share: f64| u32::try_from(self.total.value_at_quantile(share)).unwrap_or(MAX_MS).min(max);
        Figures { samples: self.total.len() + unknown, unknown, p50: at(0.5), p90: at(0.9), p99: at(0.99), max }
    }

    /// Its slices, in the order of time.
    pub fn slices(&self) -> impl DoubleEndedIterator<Item = &Slice> + ExactSizeIterator {
        self.past.iter()
    }
}

/// The value by which samples that are as good as equal are counted.
fn rounded(histogram: &Histogram<u32>, value: u32) -> u32 {
    u32::try_from(histogram.lowest_equivalent(value.into())).unwrap_or(value)
}

/// Adds a sample to a slice that is kept apart, rounded as in `window`.
pub fn count(slice: &mut Slice, window: &Window, value: Option<u32>) {
    match value {
        Some(exact) => slice.add(rounded(&window.total, exact), 1, exact),
        None => slice.unknown = slice.unknown.saturating_add(1),
    }
}

#[allow(clippy::expect_used)] // constants that are right
fn empty() -> Histogram<u32> {
    Histogram::new_with_max(MAX_MS.into(), SIGNIFICANT_DIGITS).expect("two digits up to 2^32 are possible")
}
