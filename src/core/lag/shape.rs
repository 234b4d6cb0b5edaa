//! What a distribution of lag looks like.
//!
//! Decides between steady, bursty and degrading from the spread and the trend; when in the day bursts come; and whether a
//! growing maximum under a steady p99 warns early. What always holds: small lags have no shape: below [`FLOOR`] everything is
//! steady. A moderate p90 with a p99 six times higher, and a maximum 7.5 times higher still, is bursty.

use std::time::Duration;

use super::window::{Figures, Slice};
use crate::replica::codes;

/// Milliseconds that lag has to exceed before its ratios mean anything.
pub const FLOOR: u32 = 100;
/// A percentile that is so many times the one below makes a burst.
const SPREAD: f64 = 3.0;
/// Recent medians so many times the earlier ones make a trend.
const TREND: f64 = 2.0;
/// Samples below which there is no shape.
const FEWEST: u64 = 60;

codes! {
    /// The look of a distribution.
    Shape {
        /// Too few samples.
        Unclear = 0, "unclear";
        /// Much the same all the time.
        Steady = 1, "steady";
        /// Mostly caught up, with bad moments: something comes now and then.
        Bursty = 2, "bursty";
        /// Growing: the replica does not keep up.
        Degrading = 3, "degrading";
    }
}

fn ratio(above: u32, below: u32) -> f64 {
    f64::from(above.max(FLOOR)) / f64::from(below.max(FLOOR))
}

/// The shape of a distribution, from its figures and its slices in the order of time.
#[must_use]
pub fn shape<'a>(figures: &Figures, slices: impl ExactSizeIterator<Item = &'a Slice>) -> Shape {
    if figures.samples - figures.unknown < FEWEST {
        return Shape::Unclear;
    }
    let medians: Vec<_> = slices.filter_map(|slice| slice.quantile(0.5)).collect();
    let third = medians.len() / 3;
    if third > 0 {
        let early = middle(medians.iter().take(third));
        let late = middle(medians.iter().rev().take(third));
        let half = middle(medians.iter().skip(third).take(medians.len() - 2 * third));
        // Growing all the way, not one step up and back.
        if ratio(late, early) >= TREND && late >= half && half >= early {
            return Shape::Degrading;
        }
    }
    let (tail, top) = (ratio(figures.p99, figures.p90), ratio(figures.max, figures.p99));
    if tail >= SPREAD || top >= SPREAD {
        Shape::Bursty
    } else {
        Shape::Steady
    }
}

fn middle<'a>(values: impl Iterator<Item = &'a u32>) -> u32 {
    let mut values: Vec<_> = values.copied().collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// The hours of the day, UTC, in which a slice had a burst: bit 0 stands for midnight to one.
#[must_use]
pub fn burst_hours<'a>(figures: &Figures, slices: impl Iterator<Item = &'a Slice>, length: Duration) -> u32 {
    let limit = f64::from(figures.p90.max(FLOOR)) * SPREAD;
    let mut hours = 0;
    for slice in slices.filter(|slice| f64::from(slice.max) >= limit) {
        let seconds = slice.number.saturating_mul(i64::try_from(length.as_secs()).unwrap_or(1));
        hours |= 1 << seconds.div_euclid(3600).rem_euclid(24);
    }
    hours
}

/// Whether the maximum grows while p99 stays: bad moments get worse before they get frequent. Looks at the last three
/// slices that are over.
#[must_use]
pub fn early_warning<'a>(slices: impl DoubleEndedIterator<Item = &'a Slice>) -> bool {
    let over: Vec<_> = slices.rev().skip(1).filter(|slice| slice.known() > 0).take(3).collect();
    let [last, middle, first] = over.as_slice() else { return false };
    let (first_p99, last_p99) = (first.quantile(0.99).unwrap_or(0), last.quantile(0.99).unwrap_or(0));
    let grows = last.max > middle.max && middle.max > first.max && ratio(last.max, first.max) >= TREND;
    // The maximum is part of p99 if there are few samples; then p99 is not steady and this is not early.
    grows && f64::from(last_p99) <= f64::from(first_p99.max(FLOOR)) * 1.25
}
