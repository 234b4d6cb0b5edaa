//! Which keys a shard gives to relieve it.
//!
//! Decides the part: whole arcs of a ring, so that there are not more of them than need be, and one that is cut; slots
//! under `modulo`, each cut in several where it has few; the keys from a bound on under `range`. What always holds: all
//! other keys keep their owner. Refuses shards that own nothing, and what is not of the keyspace's strategy. Read
//! [`crate::burden`] for who gives how much to whom.

use crate::export::KeyspaceExport;
use crate::ids::{ShardName, ShardNumber};
use crate::map::{KeyspaceMap, RangeSpec, ShardState, Strategy};
use crate::parts::Keys;
use crate::range::Bound;
use crate::reassign::{reassign, ReassignError};
use crate::ring::distance;
use crate::slots::{plain_slots, shortened, MAX_SLOTS};

/// As many times as the slots are repeated at most, and how near to the wished part is near enough.
const REPEATS: [usize; 5] = [1, 2, 4, 8, 16];
const NEAR: f64 = 0.05;

/// Returns the keyspace with about `part` of what `giver` owns given to `gainer`: on a ring or under `modulo`. Nothing if
/// it owns nothing, or too little to be divided.
///
/// What was wanted before is forgotten: this is wanted now. `part`: above 0, at most 1.
///
/// # Errors
/// [`ReassignError`].
pub fn give_part(
    space: &KeyspaceExport,
    giver: &ShardName,
    gainer: &ShardName,
    part: f64,
) -> Result<Option<KeyspaceExport>, ReassignError> {
    let mut space = space.clone();
    space.wanted_tokens.clear();
    space.wanted_slots = None;
    let number = |name: &ShardName| {
        let shard = space.spec.shards.iter().find(|shard| shard.name == *name);
        shard
            .map(|shard| shard.number)
            .ok_or_else(|| ReassignError::UnknownShard { keyspace: space.spec.name.clone(), shard: name.clone() })
    };
    let (from, to) = (number(giver)?, number(gainer)?);
    match space.spec.strategy {
        Strategy::Ring => {
            let map = KeyspaceMap::build(space.spec.clone()).map_err(ReassignError::Map)?;
            let arcs = some_arcs(&map, from, part);
            if arcs.is_empty() {
                return Ok(None);
            }
            reassign(&space, gainer, &Keys::Arcs(arcs)).map(Some)
        }
        Strategy::Modulo => {
            let slots = space.spec.slots.take().unwrap_or_else(|| plain_slots(&space.spec.shards));
            let Some(slots) = some_slots(slots, from, to, part) else {
                return Ok(None);
            };
            for shard in space.spec.shards.iter_mut().filter(|shard| shard.number == to) {
                shard.state = if shard.state == ShardState::Joining { ShardState::Active } else { shard.state };
            }
            space.spec.slots = shortened(slots, &space.spec.shards);
            space.wanted_slots.clone_from(&space.spec.slots);
            Ok(Some(space))
        }
        strategy @ Strategy::Range(_) => Err(ReassignError::NotOfStrategy { keyspace: space.spec.name, strategy }),
    }
}

/// Returns arcs of a shard, in ascending order, that make up a part of what it owns.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // within the ring
fn some_arcs(map: &KeyspaceMap, shard: ShardNumber, part: f64) -> Vec<(u64, u64)> {
    let points = map.points();
    let before = points.last().into_iter().chain(points).map(|point| point.token);
    let owned: Vec<(u64, u64)> = before
        .zip(points)
        .filter(|(_, point)| point.shard == shard)
        .map(|(after, point)| ((u64::from(after.0) + 1) % (1 << 32), distance(after, point.token)))
        .collect();
    let total: u64 = owned.iter().map(|(_, length)| length).sum();
    let mut rest = (total as f64 * part).round() as u64;
    let mut arcs = Vec::new();
    for (from, length) in owned {
        let length = length.min(rest);
        rest -= length;
        // In two where it passes the ring's end.
        let end = (from + length).min(1 << 32);
        arcs.extend([(from, end), (0, from + length - end)]);
    }
    arcs.retain(|(from, to)| from < to);
    arcs.sort_unstable();
    arcs
}

/// Returns the slots with about a part of the giver's given away: repeated as often as it takes to come near.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // at most MAX_SLOTS
fn some_slots(slots: Vec<ShardNumber>, from: ShardNumber, to: ShardNumber, part: f64) -> Option<Vec<ShardNumber>> {
    let owned = slots.iter().filter(|owner| **owner == from).count();
    let tried = REPEATS.iter().filter(|times| owned > 0 && slots.len() * **times <= MAX_SLOTS).map(|times| {
        let given = ((owned * times) as f64 * part).round();
        (times, given as usize, (given / (owned * times) as f64 - part).abs())
    });
    let tried: Vec<_> = tried.filter(|(_, given, _)| *given > 0).collect();
    let best = tried.iter().find(|(_, _, off)| *off <= NEAR).or(tried.last())?;
    let mut rest = best.1;
    let mut given: Vec<ShardNumber> = slots.iter().copied().cycle().take(slots.len() * best.0).collect();
    for owner in given.iter_mut().rev().filter(|owner| **owner == from) {
        if rest == 0 {
            break;
        }
        *owner = to;
        rest -= 1;
    }
    Some(given)
}

/// Returns a keyspace of ranges with all that `giver` owns from `bound` on given to `gainer`; nothing if that is nothing.
///
/// # Errors
/// [`ReassignError`]: `bound` is none of the keyspace's order, or it has no ranges.
pub fn give_from(
    space: &KeyspaceExport,
    giver: &ShardName,
    gainer: &ShardName,
    bound: &str,
) -> Result<Option<KeyspaceExport>, ReassignError> {
    let mut space = space.clone();
    let spec = &mut space.spec;
    let Strategy::Range(order) = spec.strategy else {
        return Err(ReassignError::NotOfStrategy { keyspace: spec.name.clone(), strategy: spec.strategy });
    };
    let parse = |bound: &str| Bound::parse(order, bound);
    let at = parse(bound).ok_or_else(|| ReassignError::BadPart { keyspace: spec.name.clone() })?;
    let version = spec.version + 1;
    let mut changed = false;
    for range in std::mem::take(&mut spec.ranges) {
        let (lower, upper) = (range.lower.as_deref().and_then(parse), range.upper.as_deref().and_then(parse));
        if range.shard != *giver || upper.is_some_and(|upper| upper <= at) {
            spec.ranges.push(range);
            continue;
        }
        changed = true;
        if lower.is_some_and(|lower| lower >= at) {
            spec.ranges.push(RangeSpec { shard: gainer.clone(), version, ..range });
        } else {
            let cut = Some(bound.to_owned());
            spec.ranges.push(RangeSpec { upper: cut.clone(), version, ..range.clone() });
            spec.ranges.push(RangeSpec { lower: cut, shard: gainer.clone(), version, ..range });
        }
    }
    Ok(changed.then_some(space))
}
