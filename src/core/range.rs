//! The directory: ordered key ranges, each with an owner and a version.
//!
//! Decides which range holds a key. What always holds: ranges are sorted, hold at least one key each, and do not overlap;
//! they need not cover everything. Refuses bounds that are out of order or not of the order's kind. Built by
//! [`crate::map`] only.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::ids::ShardNumber;

/// How keys are ordered for ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RangeOrder {
    /// By the value of the canonical text as a 64-bit integer.
    Integer,
    /// By the bytes of the canonical text.
    Bytes,
}

/// A bound in its order. Bounds of one directory are all of one kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Bound {
    Integer(i64),
    Bytes(Box<[u8]>),
}

impl Bound {
    /// Reads a bound, or nothing if it is not the canonical text of an integer where one is needed.
    pub(crate) fn parse(order: RangeOrder, text: &str) -> Option<Self> {
        match order {
            RangeOrder::Integer => {
                let value: i64 = text.parse().ok()?;
                (value.to_string() == text).then_some(Self::Integer(value))
            }
            RangeOrder::Bytes => Some(Self::Bytes(text.as_bytes().into())),
        }
    }

    pub(crate) fn text(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    fn key(&self) -> Key<'_> {
        match self {
            Self::Integer(value) => Key::Integer(*value),
            Self::Bytes(bytes) => Key::Bytes(bytes),
        }
    }

    fn cmp_key(&self, key: Key<'_>) -> Ordering {
        match (self, key) {
            (Self::Integer(bound), Key::Integer(key)) => bound.cmp(&key),
            (Self::Bytes(bound), Key::Bytes(key)) => (**bound).cmp(key),
            // One directory has one order, so that the kinds never differ.
            (Self::Integer(_), Key::Bytes(_)) => Ordering::Less,
            (Self::Bytes(_), Key::Integer(_)) => Ordering::Greater,
        }
    }
}

#[derive(Clone, Copy)]
enum Key<'a> {
    Integer(i64),
    Bytes(&'a [u8]),
}

/// A range of keys: `lower` belongs to it, `upper` does not; no bound is no limit.
#[derive(Clone, Debug)]
pub(crate) struct KeyRange {
    pub(crate) lower: Option<Bound>,
    pub(crate) upper: Option<Bound>,
    pub(crate) shard: ShardNumber,
}

/// Why a lookup found no range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    NotCovered,
    NotAnInteger,
}

/// The ranges of a keyspace.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    order: RangeOrder,
    ranges: Vec<KeyRange>,
}

impl Directory {
    /// Takes ranges that are sorted, not empty, and do not overlap.
    pub(crate) fn new(order: RangeOrder, ranges: Vec<KeyRange>) -> Self {
        Self { order, ranges }
    }

    pub(crate) fn order(&self) -> RangeOrder {
        self.order
    }

    pub(crate) fn ranges(&self) -> &[KeyRange] {
        &self.ranges
    }

    /// Returns the shard whose range holds the key. O(log ranges), no allocation.
    pub(crate) fn owner(&self, canonical: &[u8]) -> Result<ShardNumber, Miss> {
        let key = match self.order {
            RangeOrder::Integer => Key::Integer(parse_integer(canonical).ok_or(Miss::NotAnInteger)?),
            RangeOrder::Bytes => Key::Bytes(canonical),
        };
        self.find(key).ok_or(Miss::NotCovered)
    }

    /// Returns the shard of the range that holds `bound`, or of the one without a lower bound.
    pub(crate) fn owner_from(&self, bound: Option<&Bound>) -> Option<ShardNumber> {
        match bound {
            Some(bound) => self.find(bound.key()),
            None => self.ranges.first().filter(|range| range.lower.is_none()).map(|range| range.shard),
        }
    }

    fn find(&self, key: Key<'_>) -> Option<ShardNumber> {
        let above = |bound: &Bound| bound.cmp_key(key) == Ordering::Greater;
        let after = self.ranges.partition_point(|range| !range.lower.as_ref().is_some_and(above));
        let range = self.ranges.get(after.checked_sub(1)?)?;
        range.upper.as_ref().is_none_or(above).then_some(range.shard)
    }
}

fn parse_integer(canonical: &[u8]) -> Option<i64> {
    std::str::from_utf8(canonical).ok()?.parse().ok()
}

/// Returns a range as text, `[lower, upper)`.
pub(crate) fn range_text(lower: Option<&str>, upper: Option<&str>) -> String {
    format!("[{}, {})", lower.unwrap_or("-infinity"), upper.unwrap_or("infinity"))
}
