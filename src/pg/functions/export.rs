//! Maps as JSON: read, checked and written by the core.
//!
//! What always holds: a document that passes here holds valid maps, in the one form that the core writes. Refuses other
//! layouts and maps that are not valid, by name. Read next: `shardmap_core::export`, `sql/export.sql`.

use pgrx::prelude::*;
use shardmap_core::export::{from_json, to_json, ExportError, KeyspaceExport};

use crate::pg::encoding;
use crate::pg::error::{sqlstate, Refusal};

impl From<ExportError> for Refusal {
    fn from(error: ExportError) -> Self {
        let refusal = Self::new(sqlstate(error.sqlstate()), error.to_string());
        match error {
            ExportError::Map(error) => refusal.hint(error.hint()),
            _ => refusal.hint("Import what shardmap.export_map returned, unchanged."),
        }
    }
}

/// The keyspaces of an exported document, which is a text of the database.
pub fn keyspaces(json: &[u8]) -> Vec<KeyspaceExport> {
    from_json(&encoding::utf8(json)).unwrap_or_else(|error| Refusal::from(error).raise())
}

/// The document's only keyspace.
pub fn only(json: &[u8]) -> KeyspaceExport {
    keyspaces(json).pop().unwrap_or_else(|| {
        Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, "exported map has no keyspace").raise()
    })
}

/// Returns the document as the core writes it; raises an error if it does not hold valid maps.
#[pg_extern(sql = false)]
fn check_export(json: &[u8]) -> Vec<u8> {
    let json = to_json(&keyspaces(json)).unwrap_or_else(|error| Refusal::from(error).raise());
    encoding::server(&json).into_owned()
}
