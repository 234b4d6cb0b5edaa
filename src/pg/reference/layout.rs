//! How a reference table's rows are written for its copies: as text, a column's values in one array.
//!
//! What always holds: the statements are the same whatever the number of rows, so that shards keep them prepared; rows
//! take effect in the order of the arrays; values are read back as what they were, whatever the session's settings.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use crate::pg::raw::attribute;
use crate::pg::remote::failure::{Failure, Result};
use crate::pg::remote::wire::encode::Values;
use crate::pg::transfer::encode::Parameter;
use crate::pg::transfer::settings::{PlainOutput, Settings};

/// A row's values as elements of arrays, those of one column after the other's.
pub type Texts = Vec<Vec<u8>>;

struct Column {
    number: i16,
    name: Vec<u8>,
    /// Its type, qualified.
    kind: Vec<u8>,
    /// The operator that is the primary key's equality.
    equality: Vec<u8>,
    parameter: std::cell::RefCell<Parameter>,
}

/// A reference table's columns.
pub struct Layout {
    /// All but generated ones.
    columns: Vec<Column>,
    key: Vec<Column>,
    index: pg_sys::Oid,
    table: Vec<u8>,
    settings: Settings,
    pub put: Box<[u8]>,
    pub r#move: Box<[u8]>,
    pub delete: Box<[u8]>,
}

fn bytes(text: *const std::ffi::c_char) -> Vec<u8> {
    // SAFETY: a NUL-terminated string of Postgres'.
    unsafe { CStr::from_ptr(text) }.to_bytes().to_vec()
}

fn join(parts: impl Iterator<Item = Vec<u8>>, separator: &str) -> Vec<u8> {
    parts.collect::<Vec<_>>().join(separator.as_bytes())
}

fn concat(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

/// Schema and name, quoted.
///
/// # Safety
/// `relation` must be open.
pub unsafe fn qualified(relation: pg_sys::Relation) -> Vec<u8> {
    let class = (*relation).rd_rel;
    let schema = pg_sys::get_namespace_name((*class).relnamespace);
    bytes(pg_sys::quote_qualified_identifier(schema, (*class).relname.data.as_ptr()))
}

impl Column {
    /// # Safety
    /// `relation` must be open and have the column. The result lives in the current memory context.
    unsafe fn of(relation: pg_sys::Relation, number: i16) -> Self {
        let column = attribute((*relation).rd_att, number as usize - 1);
        let flags = pg_sys::FORMAT_TYPE_TYPEMOD_GIVEN | pg_sys::FORMAT_TYPE_FORCE_QUALIFY;
        Self {
            number,
            name: bytes(pg_sys::quote_identifier(column.attname.data.as_ptr())),
            kind: bytes(pg_sys::format_type_extended(column.atttypid, column.atttypmod, flags as _)),
            equality: Vec::new(),
            parameter: std::cell::RefCell::new(Parameter::text(column.atttypid)),
        }
    }

    /// The value in array `letter`.
    fn value(&self, letter: &str, at: usize) -> Vec<u8> {
        concat(&[format!("v.{letter}{at}::").as_bytes(), &self.kind])
    }
}

/// `ROWS FROM (unnest($1), ...) AS v(letter1, ...)`, for lists of letters and numbers of arrays.
fn arrays(lists: &[(&str, usize)]) -> Vec<u8> {
    let count = lists.iter().map(|(_, count)| count).sum::<usize>();
    let params = (1..=count).map(|number| format!("pg_catalog.unnest(${number})").into_bytes());
    let names =
        lists.iter().flat_map(|(letter, count)| (1..=*count).map(move |at| format!("{letter}{at}").into_bytes()));
    concat(&[b"ROWS FROM (", &join(params, ", "), b") AS v(", &join(names, ", "), b")"])
}

impl Layout {
    /// # Safety
    /// `relation` must be open. The result lives in the current memory context.
    pub unsafe fn of(relation: pg_sys::Relation) -> Result<Self> {
        let index = pg_sys::RelationGetIndexList(relation);
        pg_sys::list_free(index);
        let index = (*relation).rd_pkindex;
        if index == pg_sys::InvalidOid {
            return Err(without_key(relation));
        }
        let desc = (*relation).rd_att;
        let kept = (0..(*desc).natts as usize).filter(|at| {
            let column = attribute(desc, *at);
            !column.attisdropped && column.attgenerated == 0
        });
        let columns: Vec<_> = kept.map(|at| Column::of(relation, at as i16 + 1)).collect();
        let key = key_columns(relation, index);
        let settings = columns.iter().chain(&key).map(|column| column.parameter.borrow().settings());
        let settings = settings.fold(Settings::default(), Settings::and);
        let mut layout = Self {
            columns,
            key,
            index,
            table: qualified(relation),
            settings,
            put: Box::default(),
            r#move: Box::default(),
            delete: Box::default(),
        };
        layout.put = layout.put_statement().into();
        layout.r#move = layout.move_statement().into();
        layout.delete = layout.delete_statement().into();
        Ok(layout)
    }

    fn put_statement(&self) -> Vec<u8> {
        let names = join(self.columns.iter().map(|column| column.name.clone()), ", ");
        let values = join(self.columns.iter().zip(1..).map(|(column, at)| column.value("c", at)), ", ");
        let key = join(self.key.iter().map(|column| column.name.clone()), ", ");
        let others = self.columns.iter().filter(|column| self.key.iter().all(|key| key.number != column.number));
        let set = join(others.map(|column| concat(&[&column.name, b" = EXCLUDED.", &column.name])), ", ");
        let action = match set.is_empty() {
            true => b"NOTHING".to_vec(),
            false => concat(&[b"UPDATE SET ", &set]),
        };
        concat(&[
            b"INSERT INTO ",
            &self.table,
            b" (",
            &names,
            b") OVERRIDING SYSTEM VALUE SELECT ",
            &values,
            b" FROM ",
            &arrays(&[("c", self.columns.len())]),
            b" ON CONFLICT (",
            &key,
            b") DO ",
            &action,
        ])
    }

    fn move_statement(&self) -> Vec<u8> {
        let set = self.columns.iter().zip(1..);
        let set = join(set.map(|(column, at)| concat(&[&column.name, b" = ", &column.value("c", at)])), ", ");
        let arrays = arrays(&[("c", self.columns.len()), ("k", self.key.len())]);
        concat(&[b"UPDATE ", &self.table, b" AS t SET ", &set, b" FROM ", &arrays, b" WHERE ", &self.has_key()])
    }

    fn delete_statement(&self) -> Vec<u8> {
        let arrays = arrays(&[("k", self.key.len())]);
        concat(&[b"DELETE FROM ", &self.table, b" AS t USING ", &arrays, b" WHERE ", &self.has_key()])
    }

    fn has_key(&self) -> Vec<u8> {
        let equal = |(column, at): (&Column, usize)| {
            concat(&[b"t.", &column.name, b" OPERATOR(", &column.equality, b") ", &column.value("k", at)])
        };
        join(self.key.iter().zip(1..).map(equal), " AND ")
    }

    /// Whether a row that is put is always counted by the shard.
    pub fn counts_put(&self) -> bool {
        self.columns.iter().any(|column| self.key.iter().all(|key| key.number != column.number))
    }

    /// The arrays that a change of this kind fills: those of the row, those of the old key.
    pub fn widths(&self) -> (usize, usize) {
        (self.columns.len(), self.key.len())
    }

    /// The values of a row.
    ///
    /// # Safety
    /// `slot` must hold a row of the table.
    pub unsafe fn row(&self, slot: *mut pg_sys::TupleTableSlot) -> Texts {
        self.texts(&self.columns, slot)
    }

    /// The values of its primary key.
    ///
    /// # Safety
    /// As [`Layout::row`].
    pub unsafe fn key(&self, slot: *mut pg_sys::TupleTableSlot) -> Texts {
        self.texts(&self.key, slot)
    }

    unsafe fn texts(&self, columns: &[Column], slot: *mut pg_sys::TupleTableSlot) -> Texts {
        let plain = PlainOutput::begin(self.settings);
        let texts = columns.iter().map(|column| {
            let mut element = Element::default();
            let mut is_null = false;
            let value = pg_sys::slot_getattr(slot, column.number.into(), &mut is_null);
            column.parameter.borrow_mut().push((!is_null).then_some(value), &mut element);
            element.0
        });
        let texts = texts.collect();
        drop(plain);
        texts
    }

    /// The row here that has the key of the one in `slot` now.
    ///
    /// # Safety
    /// As [`Layout::row`]; `relation` must be the table.
    pub unsafe fn find(&self, relation: pg_sys::Relation, slot: *mut pg_sys::TupleTableSlot) -> Option<Found> {
        let found = Found(pg_sys::table_slot_create(relation, std::ptr::null_mut()));
        let mode = pg_sys::LockTupleMode::LockTupleKeyShare;
        pg_sys::RelationFindReplTupleByIndex(relation, self.index, mode, slot, found.0).then_some(found)
    }
}

/// A row in a slot of its own.
pub struct Found(pub *mut pg_sys::TupleTableSlot);

impl Drop for Found {
    fn drop(&mut self) {
        // After an error Postgres gives the slot back with what it was made in.
        if !std::thread::panicking() {
            // SAFETY: a slot that was made for this value.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(self.0) }
        }
    }
}

/// The columns of the primary key, with its operators.
unsafe fn key_columns(relation: pg_sys::Relation, index: pg_sys::Oid) -> Vec<Column> {
    let index = pg_sys::index_open(index, pg_sys::AccessShareLock as _);
    let form = (*index).rd_index;
    let numbers = (*form).indkey.values.as_slice((*form).indnkeyatts as usize);
    let column = |(at, number): (usize, &i16)| {
        let (family, kind) = (*(*index).rd_opfamily.add(at), *(*index).rd_opcintype.add(at));
        let equality = pg_sys::get_opfamily_member(family, kind, kind, pg_sys::BTEqualStrategyNumber as i16);
        Column { equality: operator(equality), ..Column::of(relation, *number) }
    };
    let columns = numbers.iter().enumerate().map(column).collect();
    pg_sys::index_close(index, pg_sys::AccessShareLock as _);
    columns
}

/// An operator's name, qualified.
unsafe fn operator(oid: pg_sys::Oid) -> Vec<u8> {
    let cache = pg_sys::SysCacheIdentifier::OPEROID as i32;
    let tuple = pg_sys::SearchSysCache1(cache, oid.into());
    if tuple.is_null() {
        return b"pg_catalog.=".to_vec();
    }
    let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_operator>();
    let schema = pg_sys::get_namespace_name((*form).oprnamespace);
    let name = concat(&[&bytes(pg_sys::quote_identifier(schema)), b".", &bytes((*form).oprname.data.as_ptr())]);
    pg_sys::ReleaseSysCache(tuple);
    name
}

unsafe fn without_key(relation: pg_sys::Relation) -> Failure {
    let name = String::from_utf8_lossy(&qualified(relation)).into_owned();
    Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("reference table {name} has no primary key"),
    )
    .hint("Give it the primary key again that it was distributed with.")
}

/// A value as an element of an array's text.
#[derive(Default)]
struct Element(Vec<u8>);

impl Values for Element {
    fn push_text(&mut self, value: Option<&[u8]>) {
        let Some(value) = value else { return self.0.extend_from_slice(b"NULL") };
        self.0.reserve(value.len() + 2);
        self.0.push(b'"');
        for byte in value {
            if matches!(byte, b'"' | b'\\') {
                self.0.push(b'\\');
            }
            self.0.push(*byte);
        }
        self.0.push(b'"');
    }

    /// Values come as text.
    fn push_binary(&mut self, value: Option<&[u8]>) {
        self.push_text(value);
    }
}

/// A message's text in the database's encoding, for the simple protocol.
pub fn c_statement(sql: Vec<u8>) -> CString {
    CString::new(sql).unwrap_or_default()
}
