//! Parts: what moves from one shard to one other when a map becomes another.
//!
//! Decides how keys that change owner are told apart: by tokens on a ring, by remainders under `modulo`, by bounds under
//! `range`. What always holds: a key is in a part exactly if the one map gives it to the giver and the other to the
//! gainer; the parts hold no key twice, and together all that change owner. Keys without an owner in one of the maps
//! have no rows, and pinned keys do not follow the rule: neither is part of anything. Refuses what needs more slots than
//! [`MAX_SLOTS`]. Read [`crate::reassign`] for how a part changes hands.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use crate::diff::{changed, diff, ArcMove, StrategiesDiffer};
use crate::fraction::Fraction;
use crate::hash::md5_u128;
use crate::ids::{KeyspaceName, ShardName, Token};
use crate::map::{remainder, KeyspaceMap, Rule};
use crate::slots::{common_length, MAX_SLOTS};

/// Keys that move from one shard to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The shard that has them.
    pub giver: ShardName,
    /// The shard that gets them.
    pub gainer: ShardName,
    /// Which they are.
    pub keys: Keys,
}

/// A set of keys, pinned ones aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// By token: ascending, `from` belongs to it, `to` does not; within 0 to 2^32.
    Arcs(Vec<(u64, u64)>),
    /// By MD5 mod `modulus`: ascending, below it.
    Remainders {
        /// What the digest is divided by.
        modulus: u32,
        /// What remains.
        remainders: Vec<u32>,
    },
    /// By value: `lower` belongs to it, `upper` does not.
    Range {
        /// First key, or no limit.
        lower: Option<String>,
        /// First key after it, or no limit.
        upper: Option<String>,
    },
}

impl Keys {
    /// Tells whether a key belongs to a set of tokens or of remainders.
    #[must_use]
    pub fn contains(&self, canonical: &[u8]) -> bool {
        let digest = md5_u128(canonical);
        match self {
            Self::Arcs(arcs) => {
                let token = u64::from(Token::from_digest(digest).0);
                arcs.iter().any(|(from, to)| (*from..*to).contains(&token))
            }
            Self::Remainders { modulus, remainders } => {
                let rest = remainder(digest, *modulus as usize);
                remainders.iter().any(|remainder| *remainder as usize == rest)
            }
            Self::Range { .. } => false,
        }
    }
}

/// Why there are no parts. The fields are those of the message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PartsError {
    /// Maps of different strategies.
    Differ(StrategiesDiffer),
    /// More slots than [`MAX_SLOTS`] would be needed.
    TooManySlots { keyspace: KeyspaceName, before: usize, after: usize },
}

impl PartsError {
    /// SQLSTATE of the error.
    #[must_use]
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::Differ(_) => "0A000",
            Self::TooManySlots { .. } => "54000",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Differ(_) => "A keyspace keeps its strategy for life.",
            Self::TooManySlots { .. } => {
                "Finish the moves that are planned first; then change the number of shards in steps that have a common \
                 divisor with it, or by fewer."
            }
        }
    }
}

impl fmt::Display for PartsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Differ(error) => error.fmt(f),
            Self::TooManySlots { keyspace, before, after } => write!(
                f,
                "keyspace \"{keyspace}\" would need more than {MAX_SLOTS} slots to go from {before} to {after}"
            ),
        }
    }
}

impl Error for PartsError {}

/// Returns what moves from map `old` to map `new`: one part for each giver and gainer, by their names; under strategy
/// `range` one for each range, in ascending order.
///
/// # Errors
/// [`PartsError`].
pub fn parts(old: &KeyspaceMap, new: &KeyspaceMap) -> Result<Vec<Part>, PartsError> {
    if let (Rule::Modulo(a), Rule::Modulo(b)) = (old.rule(), new.rule()) {
        if a.is_empty() || b.is_empty() {
            return Ok(Vec::new());
        }
        let length = common_length(a.len(), b.len(), MAX_SLOTS).ok_or_else(|| PartsError::TooManySlots {
            keyspace: old.name().clone(),
            before: a.len(),
            after: b.len(),
        })?;
        let pairs = a.iter().cycle().zip(b.iter().cycle()).take(length);
        let remainders = pairs.zip(0_u32..).filter_map(|((a, b), remainder)| {
            (a != b).then(|| changed(old, Some(*a), new, Some(*b)).map(|owners| (owners, remainder))).flatten()
        });
        let modulus = u32::try_from(length).unwrap_or(u32::MAX);
        return Ok(grouped(remainders, |remainders| Keys::Remainders { modulus, remainders }));
    }
    let found = diff(old, new).map_err(PartsError::Differ)?;
    let arcs = found.arcs.iter().flat_map(|arc| {
        let owners = (arc.giver.clone(), arc.gainer.clone());
        intervals(arc).into_iter().map(move |interval| (owners.clone(), interval))
    });
    let mut parts = grouped(arcs, |mut arcs| {
        arcs.sort_unstable();
        Keys::Arcs(arcs)
    });
    parts.extend(found.ranges.into_iter().filter_map(|range| {
        let keys = Keys::Range { lower: range.lower, upper: range.upper };
        Some(Part { giver: range.giver?, gainer: range.gainer?, keys })
    }));
    Ok(parts)
}

/// Returns the tokens of an arc, half-open: in two pieces if it passes the ring's end.
pub(crate) fn intervals(arc: &ArcMove) -> Vec<(u64, u64)> {
    let (from, to) = (u64::from(arc.after.0) + 1, u64::from(arc.through.0) + 1);
    let pieces = if from < to { vec![(from, to)] } else { vec![(0, to), (from, Fraction::RING)] };
    pieces.into_iter().filter(|(from, to)| from < to).collect()
}

fn grouped<T>(
    pieces: impl Iterator<Item = ((Option<ShardName>, Option<ShardName>), T)>,
    keys: impl Fn(Vec<T>) -> Keys,
) -> Vec<Part> {
    let mut groups: BTreeMap<(ShardName, ShardName), Vec<T>> = BTreeMap::new();
    for ((giver, gainer), piece) in pieces {
        if let (Some(giver), Some(gainer)) = (giver, gainer) {
            groups.entry((giver, gainer)).or_default().push(piece);
        }
    }
    groups.into_iter().map(|((giver, gainer), pieces)| Part { giver, gainer, keys: keys(pieces) }).collect()
}
