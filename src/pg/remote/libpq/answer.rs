//! A result of libpq.

use std::ffi::c_int;
use std::marker::PhantomData;

use pgrx::pg_sys;

use super::{owned, pq, PGresult};

/// Source: libpq-fe.h, `ExecStatusType`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AnswerKind {
    /// A command that returns no rows, or an empty query.
    Command,
    Rows,
    /// One row, in single-row mode.
    Row,
    CopyIn,
    CopyOut,
    Error,
}

/// A PGresult.
pub struct Answer {
    raw: *mut PGresult,
    _not_send: PhantomData<*const ()>,
}

impl Answer {
    pub(super) fn new(raw: *mut PGresult) -> Option<Self> {
        (!raw.is_null()).then_some(Self { raw, _not_send: PhantomData })
    }

    pub fn kind(&self) -> AnswerKind {
        // SAFETY: `raw` is a live result, here and in every method below.
        match unsafe { (pq().PQresultStatus)(self.raw) } {
            0 | 1 => AnswerKind::Command,
            2 => AnswerKind::Rows,
            9 => AnswerKind::Row,
            4 => AnswerKind::CopyIn,
            3 | 8 => AnswerKind::CopyOut,
            _ => AnswerKind::Error,
        }
    }

    /// The command tag, such as `INSERT 0 3`.
    pub fn tag(&self) -> String {
        // SAFETY: see kind; the text is copied.
        unsafe { owned((pq().PQcmdStatus)(self.raw)) }.unwrap_or_default()
    }

    /// A field of an error by its protocol letter.
    pub fn error_field(&self, code: u8) -> Option<String> {
        // SAFETY: see kind; the text is copied.
        unsafe { owned((pq().PQresultErrorField)(self.raw, c_int::from(code))) }
    }

    pub fn rows(&self) -> usize {
        // SAFETY: see kind.
        unsafe { (pq().PQntuples)(self.raw) as usize }
    }

    pub fn columns(&self) -> usize {
        // SAFETY: see kind.
        unsafe { (pq().PQnfields)(self.raw) as usize }
    }

    pub fn column_name(&self, column: usize) -> String {
        // SAFETY: see kind; libpq gives null for a column out of range.
        unsafe { owned((pq().PQfname)(self.raw, column as c_int)) }.unwrap_or_default()
    }

    pub fn column_type(&self, column: usize) -> pg_sys::Oid {
        // SAFETY: see kind.
        unsafe { (pq().PQftype)(self.raw, column as c_int) }
    }

    /// A value's text in the database's encoding; `None` is NULL.
    pub fn value(&self, row: usize, column: usize) -> Option<&[u8]> {
        if row >= self.rows() || column >= self.columns() {
            return None;
        }
        let (row, column) = (row as c_int, column as c_int);
        // SAFETY: see kind; both are in range, and the bytes live as long as the result.
        unsafe {
            if (pq().PQgetisnull)(self.raw, row, column) == 1 {
                return None;
            }
            let length = (pq().PQgetlength)(self.raw, row, column) as usize;
            Some(std::slice::from_raw_parts((pq().PQgetvalue)(self.raw, row, column).cast(), length))
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe { (pq().PQclear)(self.raw) }
    }
}
