//! Shard maps as JSON, so that further coordinators hold the same map.
//!
//! Decides the layout. What always holds: a document names its layout's version; what was exported is imported exactly,
//! weights bit by bit; what is imported is a valid map. Connection options are copied as they are: leave secrets out.
//! Refuses other layouts, unknown fields, and maps that [`crate::map`] refuses.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use crate::alloc::Allocation;
use crate::error::MapError;
use crate::ids::{KeyspaceName, ShardName, ShardNumber};
use crate::map::{KeyspaceMap, KeyspaceSpec, RangeOrder, RangeSpec, ShardSpec, ShardState, Strategy};

/// Version of the layout that this code writes and reads. A changed layout is a new number.
pub const LAYOUT: u64 = 1;

/// A keyspace with all that a coordinator needs to hold it.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyspaceExport {
    /// The map.
    pub spec: KeyspaceSpec,
    /// Vnodes of a shard of weight 1.
    pub vnodes: u32,
    /// How new shards get their tokens.
    pub allocation: Allocation,
    /// Connection options of each shard.
    pub options: BTreeMap<ShardName, BTreeMap<String, String>>,
    /// Ring positions that shards should have, where these are not those that they have.
    pub wanted_tokens: BTreeMap<ShardName, Vec<u32>>,
    /// Owners that the remainders should have; nothing: the shards that take part, one after the other.
    pub wanted_slots: Option<Vec<ShardNumber>>,
}

/// Why a document is not imported.
#[derive(Clone, Debug, PartialEq)]
pub enum ExportError {
    /// It is no JSON, or its fields are not those of the layout. SQLSTATE 22023.
    Malformed(String),
    /// It names no layout, or another one. SQLSTATE 0A000.
    UnknownLayout(Option<u64>),
    /// Two keyspaces of one name. SQLSTATE 42710.
    DuplicateKeyspace(KeyspaceName),
    /// Connection options of a shard that the keyspace does not have. SQLSTATE 42704.
    UnknownShard(KeyspaceName, ShardName),
    /// A keyspace is no valid map.
    Map(MapError),
}

impl ExportError {
    /// SQLSTATE of the error.
    #[must_use]
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "22023",
            Self::UnknownLayout(_) => "0A000",
            Self::DuplicateKeyspace(_) => "42710",
            Self::UnknownShard(..) => "42704",
            Self::Map(error) => error.sqlstate(),
        }
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(reason) => write!(f, "exported map is malformed: {reason}"),
            Self::UnknownLayout(Some(found)) => {
                write!(f, "exported map has layout {found}, but this version reads layout {LAYOUT}")
            }
            Self::UnknownLayout(None) => write!(f, "exported map names no layout"),
            Self::DuplicateKeyspace(name) => {
                write!(f, "exported map has keyspace \"{name}\" twice")
            }
            Self::UnknownShard(keyspace, shard) => {
                write!(f, "keyspace \"{keyspace}\" has connection options of shard \"{shard}\", but no such shard")
            }
            Self::Map(error) => error.fmt(f),
        }
    }
}

impl Error for ExportError {}

/// Returns keyspaces as JSON, in the given order.
///
/// # Errors
/// [`ExportError::Map`]: a keyspace is no valid map. [`ExportError::UnknownShard`], [`ExportError::DuplicateKeyspace`].
pub fn to_json(keyspaces: &[KeyspaceExport]) -> Result<String, ExportError> {
    check(keyspaces)?;
    let document = Document { layout: LAYOUT, keyspaces: keyspaces.iter().map(Keyspace::from).collect() };
    serde_json::to_string(&document).map_err(malformed)
}

/// Returns the keyspaces of a JSON document, in its order.
///
/// # Errors
/// [`ExportError`]: the document is of another layout, malformed, or holds what is no valid map.
pub fn from_json(json: &str) -> Result<Vec<KeyspaceExport>, ExportError> {
    let value: Value = serde_json::from_str(json).map_err(malformed)?;
    // The layout first: the fields of another one would only say something odd.
    match value.get("layout").map(Value::as_u64) {
        Some(Some(LAYOUT)) => {}
        Some(found) => return Err(ExportError::UnknownLayout(found)),
        None => return Err(ExportError::UnknownLayout(None)),
    }
    let document: Document = serde_json::from_value(value).map_err(malformed)?;
    let keyspaces: Vec<KeyspaceExport> =
        document.keyspaces.into_iter().map(KeyspaceExport::try_from).collect::<Result<_, _>>()?;
    check(&keyspaces)?;
    Ok(keyspaces)
}

fn check(keyspaces: &[KeyspaceExport]) -> Result<(), ExportError> {
    let mut names: Vec<&KeyspaceName> = keyspaces.iter().map(|keyspace| &keyspace.spec.name).collect();
    names.sort_unstable();
    if let Some((name, _)) = names.iter().zip(names.iter().skip(1)).find(|(a, b)| a == b) {
        return Err(ExportError::DuplicateKeyspace((*name).clone()));
    }
    for keyspace in keyspaces {
        let map = KeyspaceMap::build(keyspace.spec.clone()).map_err(ExportError::Map)?;
        if let Some(shard) = keyspace.options.keys().find(|shard| map.shard_by_name(shard.as_str()).is_none()) {
            return Err(ExportError::UnknownShard(map.name().clone(), shard.clone()));
        }
    }
    Ok(())
}

fn malformed(error: impl fmt::Display) -> ExportError {
    ExportError::Malformed(error.to_string())
}

// The layout, apart from the types of the program, so that these can change and that cannot.

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    layout: u64,
    keyspaces: Vec<Keyspace>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Keyspace {
    name: KeyspaceName,
    strategy: StrategyName,
    range_order: Option<RangeOrder>,
    version: u64,
    vnodes: u32,
    allocation: Allocation,
    shards: Vec<Shard>,
    pins: Vec<Pin>,
    ranges: Vec<Range>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slots: Option<Vec<ShardNumber>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wanted_slots: Option<Vec<ShardNumber>>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StrategyName {
    Ring,
    Modulo,
    Range,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shard {
    name: ShardName,
    number: ShardNumber,
    weight: f64,
    state: ShardState,
    tokens: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wanted_tokens: Option<Vec<u32>>,
    options: Option<BTreeMap<String, String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    key: String,
    shard: ShardName,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    lower: Option<String>,
    upper: Option<String>,
    shard: ShardName,
    version: u64,
}

impl From<&KeyspaceExport> for Keyspace {
    fn from(export: &KeyspaceExport) -> Self {
        let spec = &export.spec;
        let (strategy, range_order) = match spec.strategy {
            Strategy::Ring => (StrategyName::Ring, None),
            Strategy::Modulo => (StrategyName::Modulo, None),
            Strategy::Range(order) => (StrategyName::Range, Some(order)),
        };
        let shard = |shard: &ShardSpec| Shard {
            name: shard.name.clone(),
            number: shard.number,
            weight: shard.weight,
            state: shard.state,
            tokens: shard.tokens.clone(),
            wanted_tokens: export.wanted_tokens.get(&shard.name).cloned(),
            options: export.options.get(&shard.name).cloned(),
        };
        let pin = |(key, shard): &(String, ShardName)| Pin { key: key.clone(), shard: shard.clone() };
        let range = |range: &RangeSpec| Range {
            lower: range.lower.clone(),
            upper: range.upper.clone(),
            shard: range.shard.clone(),
            version: range.version,
        };
        Self {
            name: spec.name.clone(),
            strategy,
            range_order,
            version: spec.version,
            vnodes: export.vnodes,
            allocation: export.allocation,
            shards: spec.shards.iter().map(shard).collect(),
            pins: spec.pins.iter().map(pin).collect(),
            ranges: spec.ranges.iter().map(range).collect(),
            slots: spec.slots.clone(),
            wanted_slots: export.wanted_slots.clone(),
        }
    }
}

impl TryFrom<Keyspace> for KeyspaceExport {
    type Error = ExportError;

    fn try_from(keyspace: Keyspace) -> Result<Self, ExportError> {
        let strategy = match (keyspace.strategy, keyspace.range_order) {
            (StrategyName::Ring, None) => Strategy::Ring,
            (StrategyName::Modulo, None) => Strategy::Modulo,
            (StrategyName::Range, Some(order)) => Strategy::Range(order),
            _ => return Err(malformed("range_order is for strategy \"range\", which needs it")),
        };
        let mut options = BTreeMap::new();
        let mut wanted_tokens = BTreeMap::new();
        let shards = keyspace.shards.into_iter().map(|shard| {
            if let Some(given) = shard.options {
                options.insert(shard.name.clone(), given);
            }
            if let Some(wanted) = shard.wanted_tokens {
                wanted_tokens.insert(shard.name.clone(), wanted);
            }
            let Shard { name, number, weight, state, tokens, .. } = shard;
            ShardSpec { name, number, weight, state, tokens }
        });
        let shards = shards.collect();
        let range = |range: Range| {
            let Range { lower, upper, shard, version } = range;
            RangeSpec { lower, upper, shard, version }
        };
        let spec = KeyspaceSpec {
            name: keyspace.name,
            strategy,
            version: keyspace.version,
            shards,
            pins: keyspace.pins.into_iter().map(|pin| (pin.key, pin.shard)).collect(),
            ranges: keyspace.ranges.into_iter().map(range).collect(),
            slots: keyspace.slots,
        };
        let (vnodes, allocation, wanted_slots) = (keyspace.vnodes, keyspace.allocation, keyspace.wanted_slots);
        Ok(Self { spec, vnodes, allocation, options, wanted_tokens, wanted_slots })
    }
}
