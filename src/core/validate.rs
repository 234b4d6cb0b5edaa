//! Validation of a keyspace as a whole.
//!
//! Decides whether a specification is a map. What always holds: what passes here gives every key at most one owner, and
//! every owner exists. Refuses with the first thing that is wrong, by name. Used by [`crate::map`] only.

use std::collections::BTreeSet;

use crate::error::MapError;
use crate::ids::{ShardName, ShardNumber};
use crate::map::{KeyspaceSpec, RangeSpec, ShardSpec, ShardState, Strategy};
use crate::pins::Pins;
use crate::range::{range_text, Bound, KeyRange, RangeOrder};
use crate::ring::MAX_TOKENS;
use crate::slots::MAX_SLOTS;

/// Postgres cuts longer identifiers (NAMEDATALEN - 1).
const MAX_NAME_BYTES: usize = 63;

/// Returns the shards in ascending order of their names.
pub(crate) fn shards(spec: &KeyspaceSpec) -> Result<Vec<&ShardSpec>, MapError> {
    let keyspace = || spec.name.clone();
    name(spec, spec.name.as_str())?;
    for shard in &spec.shards {
        name(spec, shard.name.as_str())?;
        if shard.number > ShardNumber::MAX {
            return Err(MapError::NumberTooLarge {
                keyspace: keyspace(),
                shard: shard.name.clone(),
                number: shard.number,
            });
        }
        if !shard.weight.is_finite() || shard.weight <= 0.0 {
            return Err(MapError::BadWeight { keyspace: keyspace(), shard: shard.name.clone(), weight: shard.weight });
        }
        if shard.tokens.len() > MAX_TOKENS {
            let tokens = shard.tokens.len();
            return Err(MapError::TooManyTokens { keyspace: keyspace(), shard: shard.name.clone(), tokens });
        }
    }
    let mut shards: Vec<&ShardSpec> = spec.shards.iter().collect();
    shards.sort_unstable_by(|a, b| (a.number, &a.name).cmp(&(b.number, &b.name)));
    if let Some((a, b)) = neighbours(&shards).find(|(a, b)| a.number == b.number && a.name != b.name) {
        let (first, second) = (a.name.clone(), b.name.clone());
        return Err(MapError::DuplicateNumber { keyspace: keyspace(), number: a.number, first, second });
    }
    shards.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some((shard, _)) = neighbours(&shards).find(|(a, b)| a.name == b.name) {
        return Err(MapError::DuplicateShard { keyspace: keyspace(), shard: shard.name.clone() });
    }
    Ok(shards)
}

/// Returns the pins with the numbers of their shards. `names`: the shards in ascending order of their names.
pub(crate) fn pins(spec: &KeyspaceSpec, names: &[&ShardSpec]) -> Result<Pins, MapError> {
    let mut pins = Vec::with_capacity(spec.pins.len());
    for (key, shard) in &spec.pins {
        let number = find(names, shard).ok_or_else(|| MapError::UnknownPinShard {
            keyspace: spec.name.clone(),
            key: key.clone(),
            shard: shard.clone(),
        })?;
        pins.push((key.as_str(), number));
    }
    pins.sort_unstable();
    if let Some(((key, _), _)) = neighbours(&pins).find(|(a, b)| a.0 == b.0) {
        return Err(MapError::DuplicatePin { keyspace: spec.name.clone(), key: (*key).to_owned() });
    }
    Ok(Pins::build(pins.into_iter()))
}

/// Returns the ranges in ascending order, with the numbers of their shards.
pub(crate) fn ranges(spec: &KeyspaceSpec, names: &[&ShardSpec]) -> Result<Vec<KeyRange>, MapError> {
    let order = match spec.strategy {
        Strategy::Range(order) => order,
        Strategy::Ring | Strategy::Modulo if spec.ranges.is_empty() => return Ok(Vec::new()),
        Strategy::Ring | Strategy::Modulo => return Err(MapError::RangesNotAllowed { keyspace: spec.name.clone() }),
    };
    let mut ranges = Vec::with_capacity(spec.ranges.len());
    for range in &spec.ranges {
        ranges.push((key_range(spec, names, order, range)?, range));
    }
    // No lower bound sorts before every bound, as None is before Some.
    ranges.sort_by(|(a, _), (b, _)| a.lower.cmp(&b.lower));
    let overlap = neighbours(&ranges).find(|((a, _), (b, _))| match (&a.upper, &b.lower) {
        (Some(upper), Some(lower)) => upper > lower,
        (None, _) | (_, None) => true,
    });
    if let Some(((_, first), (_, second))) = overlap {
        return Err(MapError::OverlappingRanges {
            keyspace: spec.name.clone(),
            first: text(first),
            first_shard: first.shard.clone(),
            second: text(second),
            second_shard: second.shard.clone(),
        });
    }
    Ok(ranges.into_iter().map(|(range, _)| range).collect())
}

/// Checks the owners of the remainders.
pub(crate) fn slots(spec: &KeyspaceSpec) -> Result<(), MapError> {
    let Some(slots) = &spec.slots else {
        return Ok(());
    };
    let keyspace = || spec.name.clone();
    if spec.strategy != Strategy::Modulo {
        return Err(MapError::SlotsNotAllowed { keyspace: keyspace() });
    }
    if !(1..=MAX_SLOTS).contains(&slots.len()) {
        return Err(MapError::BadSlotCount { keyspace: keyspace(), slots: slots.len() });
    }
    let taking_part: BTreeSet<ShardNumber> =
        spec.shards.iter().filter(|shard| shard.state != ShardState::Joining).map(|shard| shard.number).collect();
    match slots.iter().find(|number| !taking_part.contains(number)) {
        Some(number) => Err(MapError::UnknownSlotShard { keyspace: keyspace(), number: *number }),
        None => Ok(()),
    }
}

fn key_range(
    spec: &KeyspaceSpec,
    names: &[&ShardSpec],
    order: RangeOrder,
    range: &RangeSpec,
) -> Result<KeyRange, MapError> {
    let keyspace = || spec.name.clone();
    let bound = |bound: &Option<String>| match bound {
        None => Ok(None),
        Some(bound) => Bound::parse(order, bound)
            .map(Some)
            .ok_or_else(|| MapError::BadBound { keyspace: keyspace(), bound: bound.clone() }),
    };
    let shard = find(names, &range.shard).ok_or_else(|| MapError::UnknownRangeShard {
        keyspace: keyspace(),
        range: text(range),
        shard: range.shard.clone(),
    })?;
    let (lower, upper) = (bound(&range.lower)?, bound(&range.upper)?);
    if matches!((&lower, &upper), (Some(lower), Some(upper)) if lower >= upper) {
        return Err(MapError::InvertedRange { keyspace: keyspace(), range: text(range), shard: range.shard.clone() });
    }
    Ok(KeyRange { lower, upper, shard })
}

fn name(spec: &KeyspaceSpec, name: &str) -> Result<(), MapError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
        return Err(MapError::BadName { keyspace: spec.name.clone(), name: name.to_owned() });
    }
    Ok(())
}

fn find(names: &[&ShardSpec], name: &ShardName) -> Option<ShardNumber> {
    let at = names.binary_search_by(|shard| shard.name.cmp(name)).ok()?;
    names.get(at).map(|shard| shard.number)
}

fn text(range: &RangeSpec) -> String {
    range_text(range.lower.as_deref(), range.upper.as_deref())
}

fn neighbours<T>(items: &[T]) -> impl Iterator<Item = (&T, &T)> {
    items.iter().zip(items.iter().skip(1))
}
