//! A token: what its bearer has written or seen, as an opaque text that is safe in URLs and headers.
//!
//! Layout before base64url without padding: version (1 byte), cluster (8), number of entries (2), the entries in the order
//! of their shards (shard 4, system 4, timeline 4, LSN 8), checksum (4); numbers with the most significant byte first.
//! What always holds: a token that was changed on its way is not read; it means nothing to another cluster; tokens of 64
//! shards have at most [`MAX_TEXT_OF_64`] characters; merging is commutative, associative and never forgets. It hides
//! nothing and proves nothing: who forges one makes his own reads slower or staler.

use std::collections::BTreeMap;
use std::fmt;

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;

use super::position::{Lsn, Position, Timeline};
use crate::hash::md5_u128;

const VERSION: u8 = 1;
const HEAD: usize = 11;
const ENTRY: usize = 20;
const CHECKSUM: usize = 4;
/// A token names at most so many shards.
pub const MAX_SHARDS: usize = 4096;
/// The length of a token of 64 shards.
pub const MAX_TEXT_OF_64: usize = 1727;

/// The servers that tokens belong to: a database of a coordinator, and whoever takes its place after a failover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster(pub u64);

impl Cluster {
    /// The cluster of a database, by the coordinator's system identifier and the database's OID.
    #[must_use]
    pub fn of(system: u64, database: u32) -> Self {
        Self((md5_u128(format!("{system}/{database}").as_bytes()) >> 64) as u64)
    }
}

/// A shard, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardPrint(pub u32);

impl ShardPrint {
    /// The first four bytes of the MD5 of its name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self((md5_u128(name.as_bytes()) >> 96) as u32)
    }
}

/// The write-ahead log that a position is in: a primary and its replicas share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct System(pub u32);

impl System {
    /// Of Postgres' system identifier.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // folded on purpose
    pub fn of(identifier: u64) -> Self {
        Self((identifier ^ identifier >> 32) as u32)
    }
}

/// What is known of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Whose log.
    pub system: System,
    /// Where in it.
    pub position: Position,
}

impl Mark {
    /// A mark that no replica has, for two that cannot be compared.
    const NOBODY: Self =
        Self { system: System(0), position: Position { timeline: Timeline(u32::MAX), lsn: Lsn(u64::MAX) } };

    /// What stands for both.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        match self.system == other.system {
            true => Self { system: self.system, position: self.position.max(other.position) },
            false => Self::NOBODY,
        }
    }
}

/// A token, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadToken {
    cluster: Cluster,
    marks: BTreeMap<ShardPrint, Mark>,
}

/// Why a text is no token, or not one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenError {
    /// It has other characters than a token, or too few or too many.
    NoToken,
    /// The checksum does not fit: it was cut off or changed.
    Damaged,
    /// Of a later version of the extension, or none.
    Version(u8),
    /// Of another cluster.
    Foreign,
    /// It would name too many shards.
    TooMany,
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoToken => f.write_str("It is not a token as shardmap.write_token() gives it."),
            Self::Damaged => f.write_str("The token was cut off or changed on its way."),
            Self::Version(version) => write!(f, "The token has version {version}, not {VERSION}."),
            Self::Foreign => f.write_str("The token is of another cluster or database."),
            Self::TooMany => write!(f, "A token names at most {MAX_SHARDS} shards."),
        }
    }
}

impl std::error::Error for TokenError {}

impl ReadToken {
    /// A token that asks for nothing.
    #[must_use]
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, marks: BTreeMap::new() }
    }

    /// Reads a token of `cluster`.
    ///
    /// # Errors
    /// Any [`TokenError`] (SQLSTATE 22023).
    pub fn decode(text: &str, cluster: Cluster) -> Result<Self, TokenError> {
        let token = Self::decode_any(text)?;
        match token.cluster == cluster {
            true => Ok(token),
            false => Err(TokenError::Foreign),
        }
    }

    /// Reads a token of whatever cluster.
    ///
    /// # Errors
    /// Any [`TokenError`] but [`TokenError::Foreign`].
    pub fn decode_any(text: &str) -> Result<Self, TokenError> {
        if text.len() > (HEAD + ENTRY * MAX_SHARDS + CHECKSUM).div_ceil(3) * 4 {
            return Err(TokenError::NoToken);
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| TokenError::NoToken)?;
        let (content, sum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(TokenError::NoToken)?;
        if *sum != checksum(content) {
            return Err(TokenError::Damaged);
        }
        let mut reader = Reader(content);
        match reader.take::<1>()? {
            [VERSION] => {}
            [other] => return Err(TokenError::Version(other)),
        }
        let cluster = Cluster(u64::from_be_bytes(reader.take()?));
        let count = u16::from_be_bytes(reader.take()?);
        let mut token = Self::new(cluster);
        let mut last = None;
        for _ in 0..count {
            let shard = ShardPrint(u32::from_be_bytes(reader.take()?));
            let system = System(u32::from_be_bytes(reader.take()?));
            let timeline = Timeline(u32::from_be_bytes(reader.take()?));
            let lsn = Lsn(u64::from_be_bytes(reader.take()?));
            if last.replace(shard).is_some_and(|last| last >= shard) {
                return Err(TokenError::NoToken);
            }
            token.marks.insert(shard, Mark { system, position: Position { timeline, lsn } });
        }
        match reader.0.is_empty() && token.marks.len() <= MAX_SHARDS {
            true => Ok(token),
            false => Err(TokenError::NoToken),
        }
    }

    /// The token as text: letters, digits, `-` and `_`.
    ///
    /// # Errors
    /// [`TokenError::TooMany`] (SQLSTATE 54000).
    pub fn encode(&self) -> Result<String, TokenError> {
        let count = u16::try_from(self.marks.len()).map_err(|_| TokenError::TooMany)?;
        if self.marks.len() > MAX_SHARDS {
            return Err(TokenError::TooMany);
        }
        let mut bytes = Vec::with_capacity(HEAD + ENTRY * self.marks.len() + CHECKSUM);
        bytes.push(VERSION);
        bytes.extend(self.cluster.0.to_be_bytes());
        bytes.extend(count.to_be_bytes());
        for (shard, mark) in &self.marks {
            bytes.extend(shard.0.to_be_bytes());
            bytes.extend(mark.system.0.to_be_bytes());
            bytes.extend(mark.position.timeline.0.to_be_bytes());
            bytes.extend(mark.position.lsn.0.to_be_bytes());
        }
        let sum = checksum(&bytes);
        bytes.extend(sum);
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Raises what is known of a shard to `mark`.
    pub fn raise(&mut self, shard: ShardPrint, mark: Mark) {
        self.marks.entry(shard).and_modify(|own| *own = own.merge(mark)).or_insert(mark);
    }

    /// Raises all that `other` knows.
    pub fn merge(&mut self, other: &Self) {
        for (shard, mark) in &other.marks {
            self.raise(*shard, *mark);
        }
    }

    /// What is known of a shard.
    #[must_use]
    pub fn mark(&self, shard: ShardPrint) -> Option<Mark> {
        self.marks.get(&shard).copied()
    }

    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM] {
    let [first, second, third, fourth, ..] = md5_u128(content).to_be_bytes();
    [first, second, third, fourth]
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], TokenError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(TokenError::NoToken)?;
        self.0 = rest;
        Ok(*taken)
    }
}
