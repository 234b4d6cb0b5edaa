//! What a distribution of lag means for readers.
//!
//! By the meaning of a percentile, one read in a hundred meets a lag of p99 or more, one in ten of p90 or more. It is an
//! estimate: it takes reads and lag to be independent, which a burst that both come from breaks.

/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// Reads that meet a lag at or past a percentile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Impact {
    /// Each second.
    pub per_second: f64,
    /// Each day.
    pub per_day: f64,
}

/// Returns how many of `reads_per_second` meet a lag at or past the percentile, 0 to 100.
#[must_use]
pub fn impact(percentile: u8, reads_per_second: f64) -> Impact {
    let share = f64::from(100 - percentile.min(100));
    let per_second = reads_per_second * share / 100.0;
    Impact { per_second, per_day: per_second * DAY }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of the reference: 8,000 reads a second.
    #[test]
    fn figures_are_exact() {
        assert_eq!(impact(99, 8000.0), Impact { per_second: 80.0, per_day: 6_912_000.0 });
        assert_eq!(impact(90, 8000.0).per_second.to_bits(), 800.0_f64.to_bits());
        assert_eq!(impact(100, 8000.0), Impact { per_second: 0.0, per_day: 0.0 });
    }
}
