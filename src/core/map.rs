//! The shard map of one keyspace.
//!
//! Decides which shard owns a key: the pins first, then the keyspace's strategy. What always holds: a map is validated
//! as a whole when it is built, and never changes after; a lookup allocates nothing. Refuses, in [`KeyspaceMap::build`],
//! whatever would leave two answers or none by mistake. Read [`crate::ring`], [`crate::slots`] and [`crate::range`] next.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{MapError, RouteError};
use crate::hash::md5_u128;
use crate::ids::{KeyspaceName, ShardName, ShardNumber, Token};
use crate::pins::Pins;
pub use crate::range::RangeOrder;
use crate::range::{Directory, Miss};
use crate::ring::{distance, Point, Ring};
use crate::slots::plain_slots;
use crate::validate;

/// How keys are given to shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Consistent hashing: the first vnode at or after the key's token.
    Ring,
    /// MD5 as a 128-bit number mod the number of slots, each of which has an owner; by default a slot a shard.
    Modulo,
    /// Ordered key ranges.
    Range(RangeOrder),
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ring => "ring",
            Self::Modulo => "modulo",
            Self::Range(RangeOrder::Integer) => "range of integers",
            Self::Range(RangeOrder::Bytes) => "range of bytes",
        })
    }
}

/// What a shard does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardState {
    /// Holds what the map gives it.
    Active,
    /// Registered while others hold all rows; takes no part in modulo.
    Joining,
    /// Holds what the map gives it until that has been moved away.
    Draining,
}

/// A shard as the catalog holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardSpec {
    /// Unique in the keyspace.
    pub name: ShardName,
    /// Unique in the keyspace.
    pub number: ShardNumber,
    /// Share of load, in relation to the other shards' weights: finite, above 0.
    pub weight: f64,
    /// What the shard does at the moment.
    pub state: ShardState,
    /// Ring positions; without any a shard of a ring owns nothing.
    pub tokens: Vec<u32>,
}

/// A range as the catalog holds it; bounds are canonical text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSpec {
    /// First key of the range, or no limit.
    pub lower: Option<String>,
    /// First key after the range, or no limit.
    pub upper: Option<String>,
    /// Owner of the range.
    pub shard: ShardName,
    /// Grows by one with every change of the range.
    pub version: u64,
}

/// All that a map is built from.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyspaceSpec {
    /// Name of the keyspace.
    pub name: KeyspaceName,
    /// How keys are given to shards.
    pub strategy: Strategy,
    /// Grows by one with every change of the map.
    pub version: u64,
    /// In any order.
    pub shards: Vec<ShardSpec>,
    /// Canonical text of a key, and its shard; in any order.
    pub pins: Vec<(String, ShardName)>,
    /// In any order; only with [`Strategy::Range`].
    pub ranges: Vec<RangeSpec>,
    /// The owner of each remainder; only with [`Strategy::Modulo`]. Nothing: the shards that take part, one after the
    /// other in ascending order of their numbers.
    pub slots: Option<Vec<ShardNumber>>,
}

/// A shard of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// Its name.
    pub name: ShardName,
    /// Its number.
    pub number: ShardNumber,
    /// Its share of load, in relation to the other shards' weights.
    pub weight: f64,
    /// What it does at the moment.
    pub state: ShardState,
    /// How many tokens it was given.
    pub vnodes: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum Rule {
    Ring(Ring),
    /// The owner of each remainder.
    Modulo(Vec<ShardNumber>),
    Range(Directory),
}

/// The shard map of one keyspace, immutable.
#[derive(Clone, Debug)]
pub struct KeyspaceMap {
    name: KeyspaceName,
    version: u64,
    /// In ascending order of their numbers.
    shards: Vec<Shard>,
    /// In ascending order of the names.
    by_name: Vec<(ShardName, ShardNumber)>,
    pins: Pins,
    rule: Rule,
}

impl KeyspaceMap {
    /// Builds the map of a keyspace. A keyspace without shards is a map too: no key has an owner in it.
    ///
    /// # Errors
    /// [`MapError`], which names the first thing that is wrong: shards first, then pins, then ranges.
    pub fn build(spec: KeyspaceSpec) -> Result<Self, MapError> {
        let names = validate::shards(&spec)?;
        let pins = validate::pins(&spec, &names)?;
        let ranges = validate::ranges(&spec, &names)?;
        validate::slots(&spec)?;
        let mut shards: Vec<Shard> = spec.shards.iter().map(Shard::from).collect();
        shards.sort_unstable_by_key(|shard| shard.number);
        let rule = match spec.strategy {
            Strategy::Ring => Rule::Ring(Ring::build(names.iter().map(|s| (s.number, &*s.tokens)))),
            Strategy::Modulo => Rule::Modulo(spec.slots.clone().unwrap_or_else(|| plain_slots(&spec.shards))),
            Strategy::Range(order) => Rule::Range(Directory::new(order, ranges)),
        };
        let by_name = names.iter().map(|s| (s.name.clone(), s.number)).collect();
        Ok(Self { name: spec.name, version: spec.version, shards, by_name, pins, rule })
    }

    /// Returns the shard that owns a key.
    ///
    /// `canonical`: the key's canonical text, from [`crate::key`]. Pins come first, then the strategy. No allocation.
    ///
    /// # Errors
    /// [`RouteError::NoActiveShard`]: no shard owns anything. [`RouteError::NotCovered`]: no range holds the key.
    /// [`RouteError::NotAnInteger`]: the ranges are ordered as integers and the key is none.
    pub fn owner(&self, canonical: &[u8]) -> Result<ShardNumber, RouteError> {
        let by_digest = match &self.rule {
            Rule::Range(directory) if self.pins.is_empty() => return self.owner_by_range(directory, canonical),
            _ => md5_u128(canonical),
        };
        if let Some(shard) = self.pins.owner(by_digest, canonical) {
            return Ok(shard);
        }
        match &self.rule {
            Rule::Ring(ring) => ring.owner(Token::from_digest(by_digest)),
            Rule::Modulo(shards) => shards.get(remainder(by_digest, shards.len())).copied(),
            Rule::Range(directory) => return self.owner_by_range(directory, canonical),
        }
        .ok_or_else(|| RouteError::NoActiveShard { keyspace: self.name.clone() })
    }

    /// Returns the shard that owns a position of the ring, pins aside; nothing under another strategy or for no points.
    #[must_use]
    pub fn owner_of_token(&self, token: Token) -> Option<ShardNumber> {
        match &self.rule {
            Rule::Ring(ring) => ring.owner(token),
            Rule::Modulo(_) | Rule::Range(_) => None,
        }
    }

    fn owner_by_range(&self, directory: &Directory, canonical: &[u8]) -> Result<ShardNumber, RouteError> {
        directory.owner(canonical).map_err(|miss| {
            let keyspace = self.name.clone();
            let key = String::from_utf8_lossy(canonical).into_owned();
            match miss {
                Miss::NotCovered => RouteError::NotCovered { keyspace, key },
                Miss::NotAnInteger => RouteError::NotAnInteger { keyspace, key },
            }
        })
    }

    /// Returns the keyspace's name.
    #[must_use]
    pub fn name(&self) -> &KeyspaceName {
        &self.name
    }

    /// Returns the map's version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns how keys are given to shards.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        match &self.rule {
            Rule::Ring(_) => Strategy::Ring,
            Rule::Modulo(_) => Strategy::Modulo,
            Rule::Range(directory) => Strategy::Range(directory.order()),
        }
    }

    /// Returns the shards, in ascending order of their numbers.
    #[must_use]
    pub fn shards(&self) -> impl ExactSizeIterator<Item = &Shard> + Clone {
        self.shards.iter()
    }

    /// Returns how many shards there are, in any state.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.len()
    }

    /// Tells whether there is no shard.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shards.is_empty()
    }

    /// Returns the shard of a number. O(log shards), no allocation.
    #[must_use]
    pub fn shard(&self, number: ShardNumber) -> Option<&Shard> {
        let at = self.shards.binary_search_by_key(&number, |shard| shard.number).ok()?;
        self.shards.get(at)
    }

    /// Returns the shard of a name. O(log shards), no allocation.
    #[must_use]
    pub fn shard_by_name(&self, name: &str) -> Option<&Shard> {
        let at = self.by_name.binary_search_by(|(known, _)| known.as_str().cmp(name)).ok()?;
        self.by_name.get(at).and_then(|(_, number)| self.shard(*number))
    }

    /// Returns the ring's points in ascending order of their tokens; none under another strategy.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        match &self.rule {
            Rule::Ring(ring) => ring.points(),
            Rule::Modulo(_) | Rule::Range(_) => &[],
        }
    }

    /// Returns the owner of each remainder; none under another strategy than `modulo`.
    #[must_use]
    pub fn slots(&self) -> &[ShardNumber] {
        match &self.rule {
            Rule::Modulo(slots) => slots,
            Rule::Ring(_) | Rule::Range(_) => &[],
        }
    }

    /// Returns the length of each arc of the ring, and its owner.
    pub(crate) fn arc_lengths(&self) -> impl Iterator<Item = (u64, ShardNumber)> + '_ {
        let ring = match &self.rule {
            Rule::Ring(ring) => Some(ring),
            Rule::Modulo(_) | Rule::Range(_) => None,
        };
        ring.into_iter().flat_map(Ring::arcs).map(|(after, point)| (distance(after, point.token), point.shard))
    }

    pub(crate) fn rule(&self) -> &Rule {
        &self.rule
    }

    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }
}

impl From<&ShardSpec> for Shard {
    fn from(spec: &ShardSpec) -> Self {
        Self {
            name: spec.name.clone(),
            number: spec.number,
            weight: spec.weight,
            state: spec.state,
            vnodes: spec.tokens.len(),
        }
    }
}

/// Returns `digest` mod `count`, and 0 for no shards. In 32-bit steps, as 128-bit division is several times slower.
#[allow(clippy::cast_possible_truncation)] // count is at most MAX_SLOTS, and a remainder below it
pub(crate) fn remainder(digest: u128, count: usize) -> usize {
    let count = count as u64;
    if count == 0 {
        return 0;
    }
    let (high, low) = ((digest >> 64) as u64, digest as u64);
    let rest = ((high % count) << 32 | low >> 32) % count;
    ((rest << 32 | low & 0xffff_ffff) % count) as usize
}
