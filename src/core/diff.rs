//! The difference of two maps.
//!
//! Decides what a change of the map would move: how much, which arcs, ranges and pinned keys, from whom to whom. What
//! always holds: the figures are exact, and shards are compared by name. A giver or gainer that is missing means that
//! one of the maps gives the keys no owner. Pinned keys are listed by themselves and do not follow arcs or ranges.
//! Refuses maps of different strategies: there every key may move. Read [`crate::alloc`] for how little is enough.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;

use crate::fraction::Fraction;
use crate::ids::{ShardName, ShardNumber, Token};
use crate::map::{KeyspaceMap, Rule, Strategy};
use crate::range::{Bound, Directory};
use crate::ring::{distance, Ring};
use crate::slots::meetings;

/// What changes owner from one map to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapDiff {
    /// The share of all keys that changes owner; nothing under strategy `range`, where it depends on the keys.
    pub moved: Option<Fraction>,
    /// Who gives how much to whom, in ascending order of the names; none under strategy `range`.
    pub flows: Vec<Flow>,
    /// The arcs that change owner, in ascending order; only under strategy `ring`.
    pub arcs: Vec<ArcMove>,
    /// The ranges that change owner, in ascending order; only under strategy `range`.
    pub ranges: Vec<RangeMove>,
    /// The keys pinned in either map that change owner, in ascending order.
    pub pins: Vec<PinMove>,
}

/// Keys that change owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The shard that had them.
    pub giver: Option<ShardName>,
    /// The shard that gets them.
    pub gainer: Option<ShardName>,
    /// Of all keys.
    pub share: Fraction,
}

/// An arc `(after, through]` of the ring that changes owner; it may pass the ring's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArcMove {
    /// The position before the arc's first.
    pub after: Token,
    /// The arc's last position; the same as `after` for the whole ring.
    pub through: Token,
    /// The shard that had it.
    pub giver: Option<ShardName>,
    /// The shard that gets it.
    pub gainer: Option<ShardName>,
}

/// A range of keys that changes owner: `lower` belongs to it, `upper` does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeMove {
    /// First key, or no limit.
    pub lower: Option<String>,
    /// First key after it, or no limit.
    pub upper: Option<String>,
    /// The shard that had it.
    pub giver: Option<ShardName>,
    /// The shard that gets it.
    pub gainer: Option<ShardName>,
}

/// A pinned key that changes owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinMove {
    /// Canonical text.
    pub key: String,
    /// The shard that had it.
    pub giver: Option<ShardName>,
    /// The shard that gets it.
    pub gainer: Option<ShardName>,
}

/// Two maps that have no difference in these terms. SQLSTATE 0A000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrategiesDiffer {
    /// Strategy of the one.
    pub old: Strategy,
    /// Strategy of the other.
    pub new: Strategy,
}

impl fmt::Display for StrategiesDiffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot compare a map of strategy \"{}\" with one of strategy \"{}\"", self.old, self.new)
    }
}

impl Error for StrategiesDiffer {}

pub(crate) type Owners = (Option<ShardName>, Option<ShardName>);

/// Returns what changes owner from map `old` to map `new`.
///
/// O(points) for a ring, O(slots, times the shards that meet) for modulo, O(ranges) for ranges. Modulo's share is that of the
/// remainders; the digests' deviates from it by less than 2^-100, as 2^128 is no multiple of every number of slots.
///
/// # Errors
/// [`StrategiesDiffer`], also for range orders.
pub fn diff(old: &KeyspaceMap, new: &KeyspaceMap) -> Result<MapDiff, StrategiesDiffer> {
    let mut result =
        MapDiff { moved: None, flows: Vec::new(), arcs: Vec::new(), ranges: Vec::new(), pins: pin_moves(old, new) };
    let owners = |a: Option<ShardNumber>, b: Option<ShardNumber>| changed(old, a, new, b);
    match (old.rule(), new.rule()) {
        (Rule::Ring(a), Rule::Ring(b)) => {
            result.arcs = arc_moves(a, b, owners);
            let flows = result.arcs.iter().map(|arc| ((arc.giver.clone(), arc.gainer.clone()), arc.length()));
            (result.moved, result.flows) = add_up(flows, Fraction::RING);
        }
        (Rule::Modulo(a), Rule::Modulo(b)) => {
            let (flows, whole) = modulo_flows(a, b, owners);
            (result.moved, result.flows) = add_up(flows.into_iter(), whole);
        }
        (Rule::Range(a), Rule::Range(b)) if a.order() == b.order() => result.ranges = range_moves(a, b, owners),
        _ => return Err(StrategiesDiffer { old: old.strategy(), new: new.strategy() }),
    }
    Ok(result)
}

/// Returns the names of both owners, if they differ.
pub(crate) fn changed(
    old: &KeyspaceMap,
    giver: Option<ShardNumber>,
    new: &KeyspaceMap,
    gainer: Option<ShardNumber>,
) -> Option<Owners> {
    let giver = giver.and_then(|number| old.shard(number)).map(|shard| &shard.name);
    let gainer = gainer.and_then(|number| new.shard(number)).map(|shard| &shard.name);
    (giver != gainer).then(|| (giver.cloned(), gainer.cloned()))
}

fn pin_moves(old: &KeyspaceMap, new: &KeyspaceMap) -> Vec<PinMove> {
    let keys: BTreeSet<&[u8]> = old.pins().keys().chain(new.pins().keys()).collect();
    let moves = keys.into_iter().filter_map(|key| {
        let (giver, gainer) = changed(old, old.owner(key).ok(), new, new.owner(key).ok())?;
        Some(PinMove { key: String::from_utf8_lossy(key).into_owned(), giver, gainer })
    });
    moves.collect()
}

fn arc_moves(
    old: &Ring,
    new: &Ring,
    owners: impl Fn(Option<ShardNumber>, Option<ShardNumber>) -> Option<Owners>,
) -> Vec<ArcMove> {
    let mut tokens: Vec<Token> = old.points().iter().chain(new.points()).map(|point| point.token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    let mut moves: Vec<ArcMove> = Vec::new();
    let before = tokens.last().into_iter().chain(&tokens);
    for (after, through) in before.copied().zip(tokens.iter().copied()) {
        let Some((giver, gainer)) = owners(old.owner(through), new.owner(through)) else {
            continue;
        };
        match moves.last_mut() {
            Some(last) if last.through == after && last.giver == giver && last.gainer == gainer => {
                last.through = through
            }
            _ => moves.push(ArcMove { after, through, giver, gainer }),
        }
    }
    join_over_the_end(&mut moves);
    moves
}

/// The arc over the ring's end was met in two parts, if the arc before it moves alike.
fn join_over_the_end(moves: &mut Vec<ArcMove>) {
    let Some((last, [first, ..])) = moves.split_last_mut() else {
        return;
    };
    if last.through == first.after && last.giver == first.giver && last.gainer == first.gainer {
        first.after = last.after;
        moves.pop();
    }
}

impl ArcMove {
    /// Returns how many positions of the ring it holds.
    #[must_use]
    pub fn length(&self) -> u64 {
        distance(self.after, self.through)
    }
}

/// Returns the flows in parts of the second value, a remainder of the least common multiple each.
fn modulo_flows(
    old: &[ShardNumber],
    new: &[ShardNumber],
    owners: impl Fn(Option<ShardNumber>, Option<ShardNumber>) -> Option<Owners>,
) -> (Vec<(Owners, u64)>, u64) {
    if old.is_empty() || new.is_empty() {
        let (some, whole) = (old.iter().map(|a| owners(Some(*a), None)), old.len().max(new.len()).max(1));
        let flows = some.chain(new.iter().map(|b| owners(None, Some(*b)))).flatten();
        return (flows.map(|flow| (flow, 1)).collect(), whole as u64);
    }
    let (pairs, whole) = meetings(old, new);
    let flow = |((a, b), count)| owners(Some(a), Some(b)).map(|owners| (owners, count));
    (pairs.into_iter().filter_map(flow).collect(), whole)
}

fn add_up(parts: impl Iterator<Item = (Owners, u64)>, whole: u64) -> (Option<Fraction>, Vec<Flow>) {
    let mut sums: BTreeMap<Owners, u64> = BTreeMap::new();
    for (owners, part) in parts {
        *sums.entry(owners).or_default() += part;
    }
    let fraction = |numerator| Fraction { numerator, denominator: whole };
    let moved = fraction(sums.values().sum());
    let flow = |((giver, gainer), part)| Flow { giver, gainer, share: fraction(part) };
    (Some(moved), sums.into_iter().map(flow).collect())
}

fn range_moves(
    old: &Directory,
    new: &Directory,
    owners: impl Fn(Option<ShardNumber>, Option<ShardNumber>) -> Option<Owners>,
) -> Vec<RangeMove> {
    let ranges = old.ranges().iter().chain(new.ranges());
    let bounds: BTreeSet<&Bound> = ranges.flat_map(|range| range.lower.iter().chain(&range.upper)).collect();
    let lowers = std::iter::once(None).chain(bounds.iter().copied().map(Some));
    let uppers = bounds.iter().copied().map(Some).chain(std::iter::once(None));
    let mut moves: Vec<RangeMove> = Vec::new();
    let mut end: Option<&Bound> = None;
    for (lower, upper) in lowers.zip(uppers) {
        let Some((giver, gainer)) = owners(old.owner_from(lower), new.owner_from(lower)) else {
            continue;
        };
        match moves.last_mut() {
            Some(last) if end == lower && last.giver == giver && last.gainer == gainer => {
                last.upper = upper.map(Bound::text);
            }
            _ => moves.push(RangeMove { lower: lower.map(Bound::text), upper: upper.map(Bound::text), giver, gainer }),
        }
        end = upper;
    }
    moves
}
