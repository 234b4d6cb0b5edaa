//! What follows a table's name in ALTER TABLE, looked at before it is run: by Postgres' own parser.
//!
//! Decides whether a text is one statement that alters one table. What always holds: nothing is looked up or run here.
//! Refuses further statements, other kinds of statement, and texts that make another name of the table's. Read next:
//! `shardmap.alter_reference()` in `sql/reference_copies.sql`.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::query::tree::{cast, items};

/// Whether `sql` is one statement that alters table `schema`.`table`, or its columns, name or schema.
///
/// # Errors
/// Postgres' own, if it cannot be parsed.
#[pg_extern(sql = false)]
fn is_alter_table(sql: &[u8], schema: &[u8], table: &[u8]) -> bool {
    let Ok(sql) = CString::new(sql) else { return false };
    // SAFETY: a NUL-terminated text in the server's encoding; the tree lives in the current memory context.
    unsafe {
        let statements = pg_sys::raw_parser(sql.as_ptr(), pg_sys::RawParseMode::RAW_PARSE_DEFAULT);
        let mut statements = items::<pg_sys::RawStmt>(statements);
        match (statements.next(), statements.next()) {
            (Some(only), None) => altered((*only).stmt).is_some_and(|relation| is_named(&*relation, schema, table)),
            _ => false,
        }
    }
}

/// The table that a statement alters.
unsafe fn altered(statement: *mut pg_sys::Node) -> Option<*mut pg_sys::RangeVar> {
    use pg_sys::NodeTag::{T_AlterObjectSchemaStmt, T_AlterTableStmt, T_RenameStmt};
    use pg_sys::ObjectType::{OBJECT_COLUMN, OBJECT_TABCONSTRAINT, OBJECT_TABLE};
    if let Some(change) = cast::<pg_sys::AlterTableStmt>(statement, T_AlterTableStmt) {
        return ((*change).objtype == OBJECT_TABLE).then_some((*change).relation);
    }
    if let Some(change) = cast::<pg_sys::RenameStmt>(statement, T_RenameStmt) {
        let is_table = [OBJECT_TABLE, OBJECT_COLUMN, OBJECT_TABCONSTRAINT].contains(&(*change).renameType);
        return is_table.then_some((*change).relation);
    }
    cast::<pg_sys::AlterObjectSchemaStmt>(statement, T_AlterObjectSchemaStmt)
        .and_then(|change| ((*change).objectType == OBJECT_TABLE).then_some((*change).relation))
}

unsafe fn is_named(relation: &pg_sys::RangeVar, schema: &[u8], table: &[u8]) -> bool {
    let is = |name: *const std::ffi::c_char, want: &[u8]| !name.is_null() && CStr::from_ptr(name).to_bytes() == want;
    relation.catalogname.is_null() && is(relation.schemaname, schema) && is(relation.relname, table)
}
