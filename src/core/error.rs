//! What the core refuses, as values.
//!
//! Decides message, hint and SQLSTATE of every refusal of a map or of a key. What always holds: the message names what
//! is wrong by name, in Postgres' style; the SQLSTATE is one of Postgres' own list. Only the edge raises them.

use std::error::Error;
use std::fmt;

use crate::ids::{KeyspaceName, ShardName, ShardNumber};

/// Why a [`crate::map::KeyspaceSpec`] is not a map.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are the names in the message
pub enum MapError {
    /// A name that is empty, longer than 63 bytes, or holds a zero byte.
    BadName { keyspace: KeyspaceName, name: String },
    /// Two shards of one name.
    DuplicateShard { keyspace: KeyspaceName, shard: ShardName },
    /// Two shards of one number.
    DuplicateNumber { keyspace: KeyspaceName, number: ShardNumber, first: ShardName, second: ShardName },
    /// A number above [`ShardNumber::MAX`].
    NumberTooLarge { keyspace: KeyspaceName, shard: ShardName, number: ShardNumber },
    /// A weight that is not a finite number above 0.
    BadWeight { keyspace: KeyspaceName, shard: ShardName, weight: f64 },
    /// More tokens than [`crate::ring::MAX_TOKENS`].
    TooManyTokens { keyspace: KeyspaceName, shard: ShardName, tokens: usize },
    /// A pin to a shard that the keyspace does not have.
    UnknownPinShard { keyspace: KeyspaceName, key: String, shard: ShardName },
    /// Two pins of one key.
    DuplicatePin { keyspace: KeyspaceName, key: String },
    /// Ranges in a keyspace of another strategy.
    RangesNotAllowed { keyspace: KeyspaceName },
    /// Owners of remainders in a keyspace of another strategy.
    SlotsNotAllowed { keyspace: KeyspaceName },
    /// No slots, or more than [`crate::slots::MAX_SLOTS`].
    BadSlotCount { keyspace: KeyspaceName, slots: usize },
    /// A slot of a shard that the keyspace does not have, or that is only joining.
    UnknownSlotShard { keyspace: KeyspaceName, number: ShardNumber },
    /// A range of a shard that the keyspace does not have.
    UnknownRangeShard { keyspace: KeyspaceName, range: String, shard: ShardName },
    /// A bound that is no canonical integer, in a keyspace whose ranges are ordered as integers.
    BadBound { keyspace: KeyspaceName, bound: String },
    /// A range whose lower bound is not below its upper bound.
    InvertedRange { keyspace: KeyspaceName, range: String, shard: ShardName },
    /// Two ranges with a key in common.
    OverlappingRanges {
        keyspace: KeyspaceName,
        first: String,
        first_shard: ShardName,
        second: String,
        second_shard: ShardName,
    },
}

impl MapError {
    /// SQLSTATE of the error.
    #[must_use]
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::BadName { .. } => "42602",
            Self::DuplicateShard { .. } | Self::DuplicateNumber { .. } | Self::DuplicatePin { .. } => "42710",
            Self::NumberTooLarge { .. } | Self::TooManyTokens { .. } | Self::BadSlotCount { .. } => "54000",
            Self::BadWeight { .. } => "22023",
            Self::UnknownPinShard { .. } | Self::UnknownRangeShard { .. } | Self::UnknownSlotShard { .. } => "42704",
            Self::RangesNotAllowed { .. } | Self::SlotsNotAllowed { .. } => "55000",
            Self::BadBound { .. } => "22P02",
            Self::InvertedRange { .. } | Self::OverlappingRanges { .. } => "42P17",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::BadName { .. } => "Use a name of 1 to 63 bytes.",
            Self::DuplicateShard { .. } => "Give every shard a name of its own.",
            Self::DuplicateNumber { .. } => "Give every shard of a keyspace a number of its own.",
            Self::NumberTooLarge { .. } => "A keyspace has at most 1024 shards, numbered 0 to 1023.",
            Self::BadWeight { .. } => "A weight is a finite number greater than 0; 1 is the ordinary one.",
            Self::TooManyTokens { .. } => "Use a smaller weight or fewer vnodes.",
            Self::UnknownPinShard { .. } => "Add the shard first, or pin the key to another one.",
            Self::DuplicatePin { .. } => "Remove the existing pin first.",
            Self::RangesNotAllowed { .. } => "Create the keyspace with strategy \"range\".",
            Self::SlotsNotAllowed { .. } => "Create the keyspace with strategy \"modulo\".",
            Self::BadSlotCount { .. } => "A keyspace has 1 to 65536 slots.",
            Self::UnknownSlotShard { .. } => "Give every slot to a shard of the keyspace that is not just joining.",
            Self::UnknownRangeShard { .. } => "Add the shard first, or give the range to another one.",
            Self::BadBound { .. } => {
                "Write the bound as a plain integer of at most 64 bits, without sign \"+\" or leading zeros."
            }
            Self::InvertedRange { .. } => "A range holds its lower bound and ends before its upper bound.",
            Self::OverlappingRanges { .. } => "Split or merge the existing ranges first.",
        }
    }
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName { keyspace, name } => write!(f, "name \"{name}\" in keyspace \"{keyspace}\" is not valid"),
            Self::DuplicateShard { keyspace, shard } => {
                write!(f, "keyspace \"{keyspace}\" has shard \"{shard}\" twice")
            }
            Self::DuplicateNumber { keyspace, number, first, second } => {
                write!(f, "shards \"{first}\" and \"{second}\" of keyspace \"{keyspace}\" both have number {number}")
            }
            Self::NumberTooLarge { keyspace, shard, number } => {
                write!(f, "number {number} of shard \"{shard}\" in keyspace \"{keyspace}\" is out of range")
            }
            Self::BadWeight { keyspace, shard, weight } => {
                write!(f, "weight {weight} of shard \"{shard}\" in keyspace \"{keyspace}\" is not valid")
            }
            Self::TooManyTokens { keyspace, shard, tokens } => {
                write!(f, "shard \"{shard}\" in keyspace \"{keyspace}\" would have {tokens} tokens")
            }
            Self::UnknownPinShard { keyspace, key, shard } => {
                write!(f, "key \"{key}\" is pinned to shard \"{shard}\", which keyspace \"{keyspace}\" does not have")
            }
            Self::DuplicatePin { keyspace, key } => {
                write!(f, "key \"{key}\" of keyspace \"{keyspace}\" is pinned twice")
            }
            Self::RangesNotAllowed { keyspace } => write!(f, "keyspace \"{keyspace}\" does not use ranges"),
            Self::SlotsNotAllowed { keyspace } => write!(f, "keyspace \"{keyspace}\" does not use slots"),
            Self::BadSlotCount { keyspace, slots } => {
                write!(f, "keyspace \"{keyspace}\" would have {slots} slots")
            }
            Self::UnknownSlotShard { keyspace, number } => {
                write!(
                    f,
                    "a slot of keyspace \"{keyspace}\" belongs to shard number {number}, which takes no part in it"
                )
            }
            Self::UnknownRangeShard { keyspace, range, shard } => {
                write!(f, "range {range} belongs to shard \"{shard}\", which keyspace \"{keyspace}\" does not have")
            }
            Self::BadBound { keyspace, bound } => {
                write!(f, "range bound \"{bound}\" of keyspace \"{keyspace}\" is not an integer")
            }
            Self::InvertedRange { keyspace, range, shard } => {
                write!(f, "range {range} of shard \"{shard}\" in keyspace \"{keyspace}\" holds no key")
            }
            Self::OverlappingRanges { keyspace, first, first_shard, second, second_shard } => write!(
                f,
                "range {first} of shard \"{first_shard}\" and range {second} of shard \"{second_shard}\" in keyspace \
                 \"{keyspace}\" overlap"
            ),
        }
    }
}

impl Error for MapError {}

/// Why a key has no owner.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the names in the message
pub enum RouteError {
    /// No shard of the keyspace owns anything.
    NoActiveShard { keyspace: KeyspaceName },
    /// No range holds the key.
    NotCovered { keyspace: KeyspaceName, key: String },
    /// The ranges are ordered as integers and the key is none.
    NotAnInteger { keyspace: KeyspaceName, key: String },
}

impl RouteError {
    /// SQLSTATE of the error.
    #[must_use]
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::NoActiveShard { .. } => "55000",
            Self::NotCovered { .. } => "23514",
            Self::NotAnInteger { .. } => "22P02",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoActiveShard { .. } => "Add a shard to the keyspace.",
            Self::NotCovered { .. } => "Give the key's range to a shard, or pin the key.",
            Self::NotAnInteger { .. } => "Order the keyspace's ranges by bytes, or use an integer key.",
        }
    }
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoActiveShard { keyspace } => {
                write!(f, "keyspace \"{keyspace}\" has no active shard")
            }
            Self::NotCovered { keyspace, key } => {
                write!(f, "no range of keyspace \"{keyspace}\" holds key \"{key}\"")
            }
            Self::NotAnInteger { keyspace, key } => {
                write!(f, "key \"{key}\" is not an integer, as the ranges of keyspace \"{keyspace}\" require")
            }
        }
    }
}

impl Error for RouteError {}
