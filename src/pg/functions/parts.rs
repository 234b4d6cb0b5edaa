//! Parts of a keyspace that change hands, and the keyspace as it should be, for `sql/map_parts.sql`.
//!
//! Decides nothing: takes keyspaces as exported JSON and lets the core find, give and wish. Refuses documents that hold no
//! valid map, and parts that are none. Read next: `shardmap_core::parts`, `shardmap_core::reassign`.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::error::MapError;
use shardmap_core::export::{to_json, KeyspaceExport};
use shardmap_core::ids::ShardName;
use shardmap_core::parts::{parts, Keys, PartsError};
use shardmap_core::reassign::{reassign, wanted, ReassignError};

use super::export::only;
use super::preview::{map, text};
use crate::pg::encoding;
use crate::pg::error::{sqlstate, Refusal};

impl From<PartsError> for Refusal {
    fn from(error: PartsError) -> Self {
        Self::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint())
    }
}

impl From<ReassignError> for Refusal {
    fn from(error: ReassignError) -> Self {
        Self::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint())
    }
}

pub fn json(keyspace: KeyspaceExport) -> Vec<u8> {
    let json = to_json(&[keyspace]).unwrap_or_else(|error| Refusal::from(error).raise());
    encoding::server(&json).into_owned()
}

/// A row: giver, gainer, bounds of arcs in a row, modulus, remainders, bounds of a range.
type Row = (Vec<u8>, Vec<u8>, Option<Vec<i64>>, Option<i32>, Option<Vec<i32>>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Which keys change owner from one map to another.
#[pg_extern(sql = false)]
fn map_part_rows(
    before: &[u8],
    after: &[u8],
) -> TableIterator<
    'static,
    (
        name!(giver, Vec<u8>),
        name!(gainer, Vec<u8>),
        name!(arcs, Option<Vec<i64>>),
        name!(modulus, Option<i32>),
        name!(remainders, Option<Vec<i32>>),
        name!(lower, Option<Vec<u8>>),
        name!(upper, Option<Vec<u8>>),
    ),
> {
    let found = parts(&map(before), &map(after)).unwrap_or_else(|error| Refusal::from(error).raise());
    TableIterator::new(found.into_iter().map(|part| -> Row {
        let (giver, gainer) = (text(part.giver.as_str()), text(part.gainer.as_str()));
        match part.keys {
            Keys::Arcs(arcs) => {
                let bounds = arcs.into_iter().flat_map(|(from, to)| [from, to]);
                let bounds = bounds.map(|bound| i64::try_from(bound).unwrap_or(i64::MAX)).collect();
                (giver, gainer, Some(bounds), None, None, None, None)
            }
            Keys::Remainders { modulus, remainders } => {
                let integer = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
                let remainders = remainders.into_iter().map(integer).collect();
                (giver, gainer, None, Some(integer(modulus)), Some(remainders), None, None)
            }
            Keys::Range { lower, upper } => {
                let bound = |bound: Option<String>| bound.map(|bound| text(&bound));
                (giver, gainer, None, None, None, bound(lower), bound(upper))
            }
        }
    }))
}

/// The map as it should be by states and wanted tokens and slots.
#[pg_extern(sql = false)]
fn wanted_map(map: &[u8]) -> Vec<u8> {
    let refuse =
        |error: MapError| Refusal::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint()).raise();
    json(wanted(&only(map)).unwrap_or_else(refuse).0)
}

/// The map with a part given to shard `target`.
#[pg_extern(sql = false)]
fn reassigned_map(
    map: &[u8],
    target: &[u8],
    arcs: Option<Vec<i64>>,
    modulus: Option<i32>,
    remainders: Option<Vec<i32>>,
) -> Vec<u8> {
    let space = only(map);
    let keys = match (arcs, modulus, remainders) {
        (Some(bounds), None, None) => {
            // What is negative is beyond the ring, which the core refuses.
            let bound = |bound: &i64| u64::try_from(*bound).unwrap_or(u64::MAX);
            Keys::Arcs(
                bounds.chunks(2).map(|arc| (arc.first().map_or(0, bound), arc.last().map_or(0, bound))).collect(),
            )
        }
        (None, Some(modulus), Some(remainders)) => {
            let number = |number: i32| u32::try_from(number).unwrap_or(u32::MAX);
            Keys::Remainders {
                modulus: u32::try_from(modulus).unwrap_or(0),
                remainders: remainders.into_iter().map(number).collect(),
            }
        }
        _ => Refusal::from(ReassignError::BadPart { keyspace: space.spec.name.clone() }).raise(),
    };
    let target = ShardName::from(&*encoding::utf8(target));
    json(reassign(&space, &target, &keys).unwrap_or_else(|error| Refusal::from(error).raise()))
}
