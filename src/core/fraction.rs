//! Exact fractions.
//!
//! Decides nothing. What always holds: a fraction keeps its denominator (2^32 for a ring), so that fractions of one
//! whole can be added and compared by their numerators. Refuses nothing.

use std::fmt;

/// `numerator` parts of a whole of `denominator` parts, not reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fraction {
    /// Parts.
    pub numerator: u64,
    /// Parts of the whole, above 0.
    pub denominator: u64,
}

impl Fraction {
    /// Positions of a ring.
    pub const RING: u64 = 1 << 32;

    /// Returns `positions` of a ring.
    #[must_use]
    pub fn of_ring(positions: u64) -> Self {
        Self { numerator: positions, denominator: Self::RING }
    }

    /// Returns the nearest floating-point number: 0 for nothing, 1 for the whole.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // nearest is what is promised
    pub fn value(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}
