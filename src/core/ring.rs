//! The ring: tokens in order, each with the shard that owns the arc which ends there.
//!
//! Decides the owner of a token: the first point at or after it, wrapping round. What always holds: points are sorted
//! and distinct; where two shards hold one token the lower name owns it, whatever the order of registration; a lookup
//! allocates nothing. Built by [`crate::map`] only.

use crate::hash::vnode_token;
use crate::ids::{ShardNumber, Token};

/// Most tokens that a shard can hold.
pub const MAX_TOKENS: usize = 1 << 16;

/// One position on the ring and the owner of the arc that ends there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// End of the arc, which belongs to it.
    pub token: Token,
    /// The shard that owns the arc.
    pub shard: ShardNumber,
}

/// The points of a keyspace, with an index over their high bits.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    points: Vec<Point>,
    /// `starts[b]`: how many points lie below bucket `b`; one entry more than buckets.
    starts: Vec<u32>,
    shift: u32,
}

impl Ring {
    /// Builds a ring from each shard's number and tokens, the shards in ascending order of their names.
    pub(crate) fn build<'a>(shards: impl Iterator<Item = (ShardNumber, &'a [u32])>) -> Self {
        let mut keys: Vec<u64> = Vec::new();
        for (rank, (number, tokens)) in shards.enumerate() {
            // At most 1024 shards, hence rank and number take 16 bits each.
            let low = ((rank as u64 & 0xffff) << 16) | u64::from(number.0);
            keys.extend(tokens.iter().map(|token| (u64::from(*token) << 32) | low));
        }
        keys.sort_unstable();
        keys.dedup_by_key(|key| *key >> 32);
        let points: Vec<Point> = keys.iter().map(|key| point(*key)).collect();
        let (starts, shift) = index(&points);
        Self { points, starts, shift }
    }

    /// Returns the shard that owns position `token`, or nothing if the ring has no points.
    ///
    /// `token`: from [`crate::hash`], never the raw key. A shard owns `(previous, own]`; past the last point the ring
    /// wraps to the first. O(1) expected for tokens that are spread evenly, O(log points) always; no allocation.
    ///
    /// Source: Karger et al., STOC 1997; the index over the token's high bits has a bucket for about three points.
    #[must_use]
    pub fn owner(&self, token: Token) -> Option<ShardNumber> {
        let bucket = (token.0 >> self.shift) as usize;
        let low = *self.starts.get(bucket)? as usize;
        let high = *self.starts.get(bucket + 1)? as usize;
        let within = self.points.get(low..high)?.partition_point(|point| point.token < token);
        self.points.get(low + within).or(self.points.first()).map(|point| point.shard)
    }

    /// Returns each point with the token before it: its shard owns `(previous, own]`.
    pub(crate) fn arcs(&self) -> impl Iterator<Item = (Token, Point)> + '_ {
        let before = self.points.last().into_iter().chain(&self.points);
        before.map(|point| point.token).zip(self.points.iter().copied())
    }

    /// Returns the points in ascending order of their tokens.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.points
    }
}

#[allow(clippy::cast_possible_truncation)] // takes the key apart again
fn point(key: u64) -> Point {
    Point { token: Token((key >> 32) as u32), shard: ShardNumber(key as u16) }
}

/// Returns the length of the arc `(from, to]`: the whole ring if they are one position.
pub(crate) fn distance(from: Token, to: Token) -> u64 {
    match to.0.wrapping_sub(from.0) {
        0 => 1 << 32,
        length => u64::from(length),
    }
}

/// Small enough to stay in the cache: a bucket for 2 to 4 points.
fn index(points: &[Point]) -> (Vec<u32>, u32) {
    let bits = points.len().next_power_of_two().ilog2().saturating_sub(2).clamp(1, 20);
    let shift = 32 - bits;
    let mut starts = Vec::with_capacity((1 << bits) + 1);
    let mut below = 0_u32;
    let mut rest = points.iter().peekable();
    for bucket in 0..1_u32 << bits {
        starts.push(below);
        while rest.next_if(|point| point.token.0 >> shift <= bucket).is_some() {
            below += 1;
        }
    }
    starts.push(below);
    (starts, shift)
}

/// Returns the `count` tokens of a shard under random allocation: those of its vnodes `name#0`, `name#1` and so on.
#[must_use]
pub fn random_tokens(name: &str, count: u32) -> Vec<u32> {
    (0..count).map(|index| vnode_token(name, index).0).collect()
}

/// Returns how many vnodes a shard of `weight` has: `round(weight * vnodes)`, at least 1; nothing if the weight is not
/// a finite number above 0, or the count above [`MAX_TOKENS`].
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within 1 and MAX_TOKENS when cast
pub fn vnode_count(weight: f64, vnodes: u32) -> Option<u32> {
    let count = (weight * f64::from(vnodes)).round().max(1.0);
    (weight.is_finite() && weight > 0.0 && count <= MAX_TOKENS as f64).then_some(count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ShardNumber = ShardNumber(7);
    const B: ShardNumber = ShardNumber(3);

    /// Frozen: a changed row moves live data.
    #[test]
    fn owners_at_the_edges() {
        let ring = Ring::build([(A, &[10_u32, 30][..]), (B, &[30, 0x8000_0000][..])].into_iter());
        for (token, want) in
            [(0, A), (10, A), (11, A), (30, A), (31, B), (0x8000_0000, B), (0x8000_0001, A), (u32::MAX, A)]
        {
            assert_eq!(ring.owner(Token(token)), Some(want), "token={token}");
        }
        assert_eq!(Ring::build(std::iter::empty()).owner(Token(0)), None);
        assert_eq!(Ring::default().owner(Token(0)), None);
    }

    #[test]
    fn vnode_counts() {
        for (weight, vnodes, want) in [
            (1.0, 100, Some(100)),
            (0.5, 1, Some(1)),
            (0.001, 100, Some(1)),
            (1.505, 100, Some(151)),
            (f64::NAN, 100, None),
            (f64::INFINITY, 100, None),
            (0.0, 100, None),
            (-1.0, 100, None),
            (1e9, 100, None),
        ] {
            assert_eq!(vnode_count(weight, vnodes), want, "{weight} * {vnodes}");
        }
    }
}
