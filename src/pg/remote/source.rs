//! Reading a local query in chunks, every value as the text of its type's output function.
//!
//! What always holds: memory is bounded by one chunk; row security that would hide rows is an error, not a loss; the text
//! of a value does not depend on the session's settings. On an error nothing is cleaned up here: Postgres does it when
//! it ends the transaction or the savepoint.

use std::ffi::{c_char, CStr, CString};
use std::ptr;

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Result};
use crate::pg::encoding;

/// Rows fetched at once.
const CHUNK: i64 = 2000;
const SETTINGS: [(&CStr, &CStr); 5] = [
    (c"datestyle", c"ISO"),
    (c"intervalstyle", c"postgres"),
    (c"extra_float_digits", c"3"),
    (c"search_path", c"pg_catalog"),
    (c"row_security", c"off"),
];

/// A name as SQL reads it back.
pub fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Schema and name of an ordinary table.
///
/// # Errors
/// 42P01 or 42809: it is no ordinary table, or not there any more.
pub fn table_name(relation: pg_sys::Oid) -> Result<(String, String)> {
    // SAFETY: system cache look-ups; null or a palloc'd string.
    unsafe {
        let name = pg_sys::get_rel_name(relation);
        if name.is_null() {
            let message = format!("relation with OID {relation} does not exist");
            return Err(Failure::new(PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE, message));
        }
        let name = encoding::utf8_string(name);
        if pg_sys::get_rel_relkind(relation) as u8 != pg_sys::RELKIND_RELATION {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
                format!("\"{name}\" is not an ordinary table"),
            )
            .hint("Only the rows of an ordinary table can be copied to the shards."));
        }
        let schema = pg_sys::get_namespace_name(pg_sys::get_rel_namespace(relation));
        Ok((encoding::utf8_string(schema), name))
    }
}

/// Runs `query` with `parameter` as $1 and gives each row to `each`, and the end of each chunk to `pause`.
pub fn for_each_row(
    query: &CStr,
    parameter: &CStr,
    mut each: impl FnMut(&[Option<&[u8]>]) -> Result<()>,
    mut pause: impl FnMut(),
) -> Result<()> {
    // SAFETY: SPI is used as its manual says: connect, open, fetch, free, close, finish; the tuple table is read before it
    // is freed; the scratch context is this function's own, and every value lives in it until its row is done with.
    unsafe {
        let nest_level = pg_sys::NewGUCNestLevel();
        for (name, value) in SETTINGS {
            let (context, source) = (pg_sys::GucContext::PGC_USERSET, pg_sys::GucSource::PGC_S_SESSION);
            let action = pg_sys::GucAction::GUC_ACTION_SAVE;
            pg_sys::set_config_option(name.as_ptr(), value.as_ptr(), context, source, action, true, 0, false);
        }
        pg_sys::SPI_connect();
        let portal = open(query, parameter);
        let scratch = pg_sys::AllocSetContextCreateInternal(
            pg_sys::CurrentMemoryContext,
            c"pg_shardmap rows".as_ptr(),
            pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
        );
        loop {
            pg_sys::SPI_cursor_fetch(portal, true, CHUNK as _);
            let (table, rows) = (pg_sys::SPI_tuptable, pg_sys::SPI_processed as usize);
            if table.is_null() || rows == 0 {
                break;
            }
            let description = (*table).tupdesc;
            let columns = (*description).natts as usize;
            let mut values: Vec<Option<&[u8]>> = Vec::with_capacity(columns);
            for row in 0..rows {
                let before = pg_sys::MemoryContextSwitchTo(scratch);
                values.clear();
                for column in 1..=columns {
                    let text: *const c_char = pg_sys::SPI_getvalue(*(*table).vals.add(row), description, column as i32);
                    values.push((!text.is_null()).then(|| CStr::from_ptr(text).to_bytes()));
                }
                each(&values)?;
                pg_sys::MemoryContextSwitchTo(before);
                values.clear();
                pg_sys::MemoryContextReset(scratch);
            }
            pg_sys::SPI_freetuptable(table);
            pgrx::check_for_interrupts!();
            pause();
        }
        pg_sys::SPI_cursor_close(portal);
        pg_sys::SPI_finish();
        pg_sys::AtEOXact_GUC(true, nest_level);
    }
    Ok(())
}

/// # Safety
/// SPI is connected.
unsafe fn open(query: &CStr, parameter: &CStr) -> pg_sys::Portal {
    let mut types = [pg_sys::TEXTOID];
    let mut values = [pg_sys::Datum::from(pg_sys::cstring_to_text(parameter.as_ptr()))];
    pg_sys::SPI_cursor_open_with_args(
        ptr::null(),
        query.as_ptr(),
        1,
        types.as_mut_ptr(),
        values.as_mut_ptr(),
        ptr::null(),
        false,
        0,
    )
}

/// A text of ours as C wants it; a NUL byte, which Postgres' own texts never hold, ends it.
pub fn c_string(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes: Vec<u8> = text.into();
    bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
    CString::new(bytes).unwrap_or_default()
}
