//! How a part of a keyspace changes hands, and what the keyspace is to become in the end.
//!
//! Decides the tokens and slots of all shards after a move. What always holds: the keys of the part belong to the
//! target, all others to whom they belonged; the result is a valid map; once every key is where it is wanted, tokens and
//! slots are exactly the wanted ones, so that nothing of the way there is left. Refuses parts that are not of the
//! keyspace's strategy, or not within their limits. Read [`crate::parts`] for where parts come from.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;

use crate::diff::diff;
use crate::error::MapError;
use crate::export::KeyspaceExport;
use crate::fraction::Fraction;
use crate::ids::{KeyspaceName, ShardName, ShardNumber, Token};
use crate::map::{KeyspaceMap, KeyspaceSpec, RangeOrder, ShardState, Strategy};
use crate::parts::Keys;
use crate::range::Bound;
use crate::slots::{common_length, plain_slots, shortened, MAX_SLOTS};

/// Why a part does not change hands. The fields are those of the message.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum ReassignError {
    /// The keyspace has no such shard.
    UnknownShard { keyspace: KeyspaceName, shard: ShardName },
    /// A part of another strategy's kind.
    NotOfStrategy { keyspace: KeyspaceName, strategy: Strategy },
    /// Tokens beyond the ring, remainders beyond the modulus, or none.
    BadPart { keyspace: KeyspaceName },
    /// More slots than [`MAX_SLOTS`] would be needed.
    TooManySlots { keyspace: KeyspaceName, slots: usize, modulus: u32 },
    /// The keyspace is no map.
    Map(MapError),
}

impl ReassignError {
    /// SQLSTATE of the error.
    #[must_use]
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::UnknownShard { .. } => "42704",
            Self::NotOfStrategy { .. } | Self::BadPart { .. } => "22023",
            Self::TooManySlots { .. } => "54000",
            Self::Map(error) => error.sqlstate(),
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::UnknownShard { .. } => "See shardmap.shards.",
            Self::NotOfStrategy { .. } => "A ring is divided by arcs, strategy \"modulo\" by remainders.",
            Self::BadPart { .. } => "Tokens go from 0 to 4294967295, remainders from 0 to the modulus, less one.",
            Self::TooManySlots { .. } => "Finish the moves that are planned, then plan this one anew.",
            Self::Map(error) => error.hint(),
        }
    }
}

impl fmt::Display for ReassignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownShard { keyspace, shard } => write!(f, "keyspace \"{keyspace}\" has no shard \"{shard}\""),
            Self::NotOfStrategy { keyspace, strategy } => {
                write!(f, "keyspace \"{keyspace}\" of strategy \"{strategy}\" is not divided in this way")
            }
            Self::BadPart { keyspace } => write!(f, "the part of keyspace \"{keyspace}\" that is to move is not valid"),
            Self::TooManySlots { keyspace, slots, modulus } => write!(
                f,
                "keyspace \"{keyspace}\" would need more than {MAX_SLOTS} slots: it has {slots}, and the part is one of \
                 modulus {modulus}"
            ),
            Self::Map(error) => error.fmt(f),
        }
    }
}

impl Error for ReassignError {}

/// Returns the keyspace with the keys of a part given to shard `target`, which becomes active if it was joining.
///
/// # Errors
/// [`ReassignError`].
pub fn reassign(space: &KeyspaceExport, target: &ShardName, keys: &Keys) -> Result<KeyspaceExport, ReassignError> {
    let name = || space.spec.name.clone();
    let mut after = space.clone();
    let spec = &mut after.spec;
    let shard = spec.shards.iter_mut().find(|shard| shard.name == *target);
    let shard = shard.ok_or_else(|| ReassignError::UnknownShard { keyspace: name(), shard: target.clone() })?;
    let number = shard.number;
    match (spec.strategy, keys) {
        (Strategy::Ring, Keys::Arcs(arcs)) => {
            let arcs = joined(arcs).ok_or_else(|| ReassignError::BadPart { keyspace: name() })?;
            let before = KeyspaceMap::build(space.spec.clone()).map_err(ReassignError::Map)?;
            give_arcs(spec, &before, number, &arcs);
        }
        (Strategy::Modulo, Keys::Remainders { modulus, remainders }) => {
            if remainders.iter().any(|remainder| remainder >= modulus) || remainders.is_empty() {
                return Err(ReassignError::BadPart { keyspace: name() });
            }
            give_remainders(spec, number, *modulus, remainders)?;
        }
        (strategy, _) => return Err(ReassignError::NotOfStrategy { keyspace: name(), strategy }),
    }
    for shard in spec.shards.iter_mut().filter(|shard| shard.number == number && shard.state == ShardState::Joining) {
        shard.state = ShardState::Active;
    }
    spec.slots = spec.slots.take().and_then(|slots| shortened(slots, &spec.shards));
    match wanted(&after).map_err(ReassignError::Map)? {
        (wish, true) => Ok(wish),
        (_, false) => Ok(after),
    }
}

/// Returns the keyspace as it should be by its shards' states and wanted tokens and slots, and whether every key is with
/// the shard that should have it already. Joining shards take part then, draining ones own nothing; ranges
/// of those go to their neighbours' owners.
///
/// # Errors
/// [`MapError`]: the keyspace is no map, or would be none.
pub fn wanted(space: &KeyspaceExport) -> Result<(KeyspaceExport, bool), MapError> {
    let mut wish = space.clone();
    let spec = &mut wish.spec;
    for shard in &mut spec.shards {
        match shard.state {
            ShardState::Joining => shard.state = ShardState::Active,
            ShardState::Draining => shard.tokens.clear(),
            ShardState::Active => {}
        }
        if let (ShardState::Active, Some(tokens)) = (shard.state, space.wanted_tokens.get(&shard.name)) {
            shard.tokens.clone_from(tokens);
        }
    }
    if spec.strategy == Strategy::Modulo {
        let staying: Vec<_> = spec.shards.iter().filter(|shard| shard.state == ShardState::Active).cloned().collect();
        let stays = |owner: &ShardNumber| staying.iter().any(|shard| shard.number == *owner);
        let slots = space.wanted_slots.clone().filter(|slots| slots.iter().all(stays));
        let slots = slots.unwrap_or_else(|| plain_slots(&staying));
        if !slots.is_empty() {
            spec.slots = shortened(slots, &spec.shards);
        }
    }
    if let Strategy::Range(order) = spec.strategy {
        give_ranges(spec, order);
    }
    let (old, new) = (KeyspaceMap::build(space.spec.clone())?, KeyspaceMap::build(wish.spec.clone())?);
    let is_so = diff(&old, &new).is_ok_and(|found| found.flows.is_empty() && found.ranges.is_empty());
    Ok((wish, is_so))
}

/// Gives the ranges of draining shards to their neighbours' owners: who has the keys before, else those after, else those
/// beyond a gap.
fn give_ranges(spec: &mut KeyspaceSpec, order: RangeOrder) {
    let stays =
        |name: &ShardName| spec.shards.iter().any(|shard| shard.name == *name && shard.state != ShardState::Draining);
    let bound = |text: &Option<String>| text.as_ref().and_then(|text| Bound::parse(order, text));
    spec.ranges.sort_by_cached_key(|range| bound(&range.lower));
    for at in 0..spec.ranges.len() {
        let Some((before, [range, after @ ..])) = spec.ranges.split_at_checked(at) else {
            return;
        };
        if stays(&range.shard) {
            continue;
        }
        let (below, above) =
            (before.last().filter(|near| stays(&near.shard)), after.iter().find(|near| stays(&near.shard)));
        let touches = below.is_some_and(|near| near.upper == range.lower)
            || after.first().is_none_or(|near| near.lower != range.upper);
        let near = if touches { below.or(above) } else { above.or(below) };
        let any = spec.shards.iter().filter(|shard| stays(&shard.name)).min_by_key(|shard| shard.number);
        let Some(owner) = near.map(|range| range.shard.clone()).or_else(|| any.map(|shard| shard.name.clone())) else {
            return;
        };
        if let Some(range) = spec.ranges.get_mut(at) {
            range.shard = owner;
            range.version = spec.version + 1;
        }
    }
}

/// Returns arcs in ascending order, with those that touch as one; nothing if they are not on the ring, or none.
fn joined(arcs: &[(u64, u64)]) -> Option<Vec<(u32, u32)>> {
    let mut arcs = arcs.to_vec();
    arcs.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from, to) in arcs {
        if from >= to || to > Fraction::RING {
            return None;
        }
        match joined.last_mut() {
            Some(last) if last.1 >= from => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    let ends = |(from, to): (u64, u64)| Some((u32::try_from(from).ok()?, u32::try_from(to - 1).ok()?));
    joined.into_iter().map(ends).collect::<Option<Vec<_>>>().filter(|arcs| !arcs.is_empty())
}

/// `arcs`: first and last token of each, ascending, not touching.
fn give_arcs(spec: &mut KeyspaceSpec, before: &KeyspaceMap, target: ShardNumber, arcs: &[(u32, u32)]) {
    let within = |token: u32| {
        let after = arcs.partition_point(|(first, _)| *first <= token);
        after.checked_sub(1).and_then(|at| arcs.get(at)).is_some_and(|(_, last)| token <= *last)
    };
    // Tokens stay where they are, but for those of others within an arc.
    for shard in spec.shards.iter_mut().filter(|shard| shard.number != target) {
        shard.tokens.retain(|token| !within(*token));
    }
    let mut points: BTreeMap<u32, ShardNumber> = before
        .points()
        .iter()
        .map(|point| (point.token.0, point.shard))
        .filter(|(token, owner)| !within(*token) || *owner == target)
        .collect();
    // What ends where an arc begins stays with its owner; what ends with the arc is the target's.
    let mut made: BTreeSet<u32> = BTreeSet::new();
    let mut mark = |token: u32, owner: ShardNumber| {
        if points.insert(token, owner) != Some(owner) {
            made.insert(token);
        }
    };
    for (first, last) in arcs {
        let end = first.wrapping_sub(1);
        if let Some(owner) = before.owner_of_token(Token(end)).filter(|_| !within(end)) {
            mark(end, owner);
        }
        mark(*last, target);
    }
    // A new token that is followed by one of the same owner says nothing.
    let next = points.iter().skip(1).chain(points.iter().take(1)).map(|(_, owner)| *owner);
    let ends_nothing = |owner: ShardNumber, next: ShardNumber| owner == next && points.len() > 1;
    let needed: Vec<(u32, ShardNumber)> = points
        .iter()
        .zip(next)
        .filter(|((token, owner), next)| made.contains(token) && !ends_nothing(**owner, *next))
        .map(|((token, owner), _)| (*token, *owner))
        .collect();
    let alone = made.len() == points.len() && needed.is_empty();
    let only = points.iter().take(usize::from(alone)).map(|(token, owner)| (*token, *owner));
    let mut needed: Vec<(u32, ShardNumber)> = needed.into_iter().chain(only).collect();
    for shard in &mut spec.shards {
        let known: BTreeSet<u32> = shard.tokens.iter().copied().collect();
        let own = needed.extract_if(.., |(_, owner)| *owner == shard.number);
        shard.tokens.extend(own.map(|(token, _)| token).filter(|token| !known.contains(token)));
    }
}

fn give_remainders(
    spec: &mut KeyspaceSpec,
    target: ShardNumber,
    modulus: u32,
    remainders: &[u32],
) -> Result<(), ReassignError> {
    let slots = spec.slots.take().unwrap_or_else(|| plain_slots(&spec.shards));
    let length = common_length(slots.len(), modulus as usize, MAX_SLOTS)
        .ok_or_else(|| ReassignError::TooManySlots { keyspace: spec.name.clone(), slots: slots.len(), modulus })?;
    let given: BTreeSet<u32> = remainders.iter().copied().collect();
    let slot = |(owner, remainder): (&ShardNumber, u32)| {
        if given.contains(&remainder) {
            target
        } else {
            *owner
        }
    };
    spec.slots = Some(slots.iter().cycle().zip((0..modulus).cycle()).map(slot).take(length).collect());
    Ok(())
}
