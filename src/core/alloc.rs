//! Allocation of ring positions to a new shard.
//!
//! Decides where a shard's tokens go. [`random_tokens`] is the rule of the golden figures: it spreads by number.
//! [`balanced_tokens`] places them where they even out the load, so that few suffice, as Cassandra 4 does. What always
//! holds: the result depends on the arguments only; existing tokens stay where they are, so that arcs move to the new
//! shard alone. Refuses nothing: it does as well as the existing tokens allow. Read [`crate::balance`] to measure it.
//!
//! How the balanced one works. A new token can take from one arc, hence from one shard. With `c` tokens at most `c`
//! shards can be relieved by one addition, and a shard that is not relieved grows against the mean with every addition.
//! So the aim is not that all are even now, but that all stay even: ordered by load, shard `i` should hold no more than
//! will be its limit when its turn comes, after `i / c` further additions. Each addition relieves the `c` most loaded
//! shards down to the lowest of these limits, all lowered by one factor such that the shares add up to the ring.
//! In the limit of many shards the most loaded one is at `1 / (c ln(1 + 1/c))` of the mean, 1.031 for 16 tokens.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::MapError;
use crate::hash::vnode_token;
use crate::ids::{KeyspaceName, ShardName, ShardNumber};
use crate::ring::{distance, Ring};
pub use crate::ring::{random_tokens, vnode_count};

const RING: f64 = 4_294_967_296.0;

/// How a keyspace gives new shards their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Allocation {
    /// By the vnodes' digests: [`random_tokens`].
    Random,
    /// Where they even out the load: [`balanced_tokens`].
    Balanced,
}

impl Allocation {
    /// Returns the tokens of a new shard: `round(weight * vnodes)` of them, at least 1.
    ///
    /// `existing`: name, weight and tokens of each other shard of `keyspace`. `vnodes`: of a shard of weight 1.
    ///
    /// # Errors
    /// [`MapError::BadWeight`]; [`MapError::TooManyTokens`]: more than [`crate::ring::MAX_TOKENS`].
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a number for the message; it saturates
    pub fn tokens(
        self,
        keyspace: &KeyspaceName,
        existing: &[(ShardName, f64, Vec<u32>)],
        new_shard: &ShardName,
        weight: f64,
        vnodes: u32,
    ) -> Result<Vec<u32>, MapError> {
        let (keyspace, shard) = (keyspace.clone(), new_shard.clone());
        if !weight.is_finite() || weight <= 0.0 {
            return Err(MapError::BadWeight { keyspace, shard, weight });
        }
        let tokens = (weight * f64::from(vnodes)).round() as usize;
        let count = vnode_count(weight, vnodes).ok_or(MapError::TooManyTokens { keyspace, shard, tokens })?;
        Ok(match self {
            Self::Random => random_tokens(new_shard.as_str(), count),
            Self::Balanced => balanced_tokens(existing, new_shard, weight, count),
        })
    }
}

/// An arc of an existing shard that a new token can cut: the ring positions `start + 1` to `start + length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arc {
    length: u64,
    start: u32,
}

#[derive(Clone, Debug)]
struct Holder {
    weight: f64,
    share: f64,
    /// Longest first.
    arcs: Vec<Arc>,
    /// How much of its share it gives, and in how many cuts.
    gives: f64,
    cuts: usize,
}

/// Returns `count` tokens for shard `new_shard` that even out the load per weight of a ring, ascending.
///
/// `existing`: name, weight and tokens of each other shard; those without tokens do not count. `weight`: of the new
/// shard, which gets about its share of the total weight. The first shard of a ring gets evenly spaced tokens.
/// O(points log points).
///
/// Source: the aim is that of Apache Cassandra (CASSANDRA-7032), the method is that of this module's head.
#[must_use]
pub fn balanced_tokens(
    existing: &[(ShardName, f64, Vec<u32>)],
    new_shard: &ShardName,
    weight: f64,
    count: u32,
) -> Vec<u32> {
    let mut holders = holders(existing);
    let mut tokens = BTreeSet::new();
    if holders.is_empty() {
        let first = vnode_token(new_shard.as_str(), 0).0;
        let step = |index: u32| (u64::from(index) << 32) / u64::from(count);
        tokens.extend((0..count).map(|index| first.wrapping_add(step(index) as u32)));
        return tokens.into_iter().collect();
    }
    // The lowest limits go to those who can reach them.
    let relieved = holders.len().min(count as usize);
    if let Some(relieved) = holders.get_mut(..relieved) {
        relieved.sort_by(|a, b| b.floor().total_cmp(&a.floor()));
    }
    // First as if arcs were no limit, which says where the cuts are wanted; then with what these cuts can reach.
    set_gifts(&mut holders, weight, count as usize, |holder| holder.share - 1.0);
    set_cuts(&mut holders, count as usize);
    set_gifts(&mut holders, weight, count as usize, Holder::reach);
    for holder in holders.iter().filter(|holder| holder.cuts > 0) {
        cut(holder, &mut tokens);
    }
    // Where the arcs were too short to cut, ordinary vnodes make up the number.
    let taken: BTreeSet<u32> = existing.iter().flat_map(|(_, _, tokens)| tokens.iter().copied()).collect();
    let spare = (0..).map(|index| vnode_token(new_shard.as_str(), index).0).filter(|token| !taken.contains(token));
    for token in spare.take(2 * count as usize) {
        if tokens.len() < count as usize {
            tokens.insert(token);
        }
    }
    tokens.into_iter().collect()
}

/// Returns the shards that hold arcs, the most loaded first.
fn holders(existing: &[(ShardName, f64, Vec<u32>)]) -> Vec<Holder> {
    let mut shards: Vec<_> = existing.iter().collect();
    shards.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let numbers = (0..=u16::MAX).map(ShardNumber);
    let ring = Ring::build(numbers.zip(&shards).map(|(number, shard)| (number, &*shard.2)));
    let mut holders: Vec<Holder> = shards
        .iter()
        .map(|shard| Holder { weight: shard.1, share: 0.0, arcs: Vec::new(), gives: 0.0, cuts: 0 })
        .collect();
    for (start, point) in ring.arcs() {
        if let Some(holder) = holders.get_mut(usize::from(point.shard.0)) {
            let length = distance(start, point.token);
            holder.share += length as f64;
            holder.arcs.push(Arc { length, start: start.0 });
        }
    }
    holders.retain(|holder| !holder.arcs.is_empty());
    for holder in &mut holders {
        holder.arcs.sort_unstable_by(|a, b| b.cmp(a));
    }
    holders.sort_by(|a, b| (b.share / b.weight).total_cmp(&(a.share / a.weight)));
    holders
}

/// Decides how much each of the `count` most loaded shards gives.
fn set_gifts(holders: &mut [Holder], weight: f64, count: usize, most: impl Fn(&Holder) -> f64) {
    let total: f64 = holders.iter().map(|holder| holder.weight).sum::<f64>() + weight;
    let spared = holders.len().saturating_sub(count);
    let limit = |rank: usize| 1.0 / (total + (rank / count.max(1)) as f64 * weight);
    let mut rest = RING - holders.iter().skip(count).map(|holder| holder.share).sum::<f64>();
    let mut open: Vec<(usize, f64, f64)> = Vec::new();
    let mut sum = limit(spared) * weight;
    for (at, holder) in holders.iter().take(count).enumerate() {
        let limit = limit(spared + 1 + at) * holder.weight;
        sum += limit;
        open.push((at, limit, most(holder)));
    }
    // Each round settles those who would have to take, or to give more than they can; then the factor is set anew.
    loop {
        let factor = rest / sum;
        let before = open.len();
        open.retain(|(at, limit, most)| {
            let Some(holder) = holders.get_mut(*at) else {
                return false;
            };
            holder.gives = holder.share - factor * limit;
            let settled = holder.gives.clamp(0.0, *most);
            if settled == holder.gives {
                return true;
            }
            holder.gives = settled;
            rest -= holder.share - settled;
            sum -= limit;
            false
        });
        if open.len() == before {
            return;
        }
    }
}

/// Shares the `count` cuts out: one for each that gives, and the rest where the cuts would be largest for their arcs.
fn set_cuts(holders: &mut [Holder], count: usize) {
    for holder in holders.iter_mut().take(count) {
        holder.cuts = usize::from(holder.gives >= 1.0);
    }
    let spare = count.saturating_sub(holders.iter().map(|holder| holder.cuts).sum());
    for _ in 0..spare {
        let open = holders.iter_mut().filter(|holder| holder.cuts > 0 && holder.cuts < holder.arcs.len());
        let tightest = open.max_by(|a, b| (a.gives / a.reach()).total_cmp(&(b.gives / b.reach())));
        if let Some(holder) = tightest {
            holder.cuts += 1;
        }
    }
}

/// Cuts a shard's gift out of its arcs: the shortest that suffice, so that long ones are left for later.
fn cut(holder: &Holder, tokens: &mut BTreeSet<u32>) {
    let gives = holder.gives.round() as u64;
    let length = |arcs: &[Arc]| -> u64 { arcs.iter().map(|arc| arc.length).sum() };
    let suffice = |arcs: &&[Arc]| length(arcs) >= gives + arcs.len() as u64;
    let longest = holder.arcs.get(..holder.cuts);
    let Some(arcs) = holder.arcs.windows(holder.cuts).rev().find(suffice).or(longest) else {
        return;
    };
    let whole = u128::from(length(arcs).max(1));
    for arc in arcs {
        // At most the arc's own length.
        tokens.extend(arc.cut((u128::from(gives) * u128::from(arc.length) / whole) as u64));
    }
}

impl Holder {
    /// The least load per weight that one cut can leave it with.
    fn floor(&self) -> f64 {
        self.arcs.first().map_or(0.0, |longest| (self.share - longest.length as f64) / self.weight)
    }

    /// The most that it can give with its cuts: its longest arcs, less one position each.
    fn reach(&self) -> f64 {
        self.arcs.iter().take(self.cuts).map(|arc| arc.length as f64 - 1.0).sum()
    }
}

impl Arc {
    /// Returns the token that takes the first `part` positions of the arc, at least 1, leaving at least 1.
    fn cut(self, part: u64) -> Option<u32> {
        let part = part.clamp(1, (self.length - 1).max(1));
        (self.length > 1).then(|| self.start.wrapping_add(part as u32))
    }
}
