//! What postgres_fdw's planning leaves in a plan, by position. Source: postgres_fdw.c, `FdwScanPrivateIndex`,
//! `FdwModifyPrivateIndex`, `FdwDirectModifyPrivateIndex`; the same from 15 to 18.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::pg::query::tree::{cells, nth};

/// A remote query.
pub struct ScanPlan {
    pub sql: Box<[u8]>,
    /// The column of the scan's row type that each result column is.
    pub retrieved: Vec<i16>,
    pub fetch_size: i32,
}

/// A remote UPDATE or DELETE of all its rows.
pub struct DirectPlan {
    pub sql: Box<[u8]>,
    pub has_returning: bool,
    pub retrieved: Vec<i16>,
    pub counts: bool,
}

/// A remote INSERT, UPDATE or DELETE of one row.
pub struct WritePlan {
    pub sql: Box<[u8]>,
    /// The columns that are given values.
    pub targets: Vec<i16>,
    /// Where the VALUES of the first row end in `sql`; -1 if it has none.
    pub values_end: i32,
    pub has_returning: bool,
    pub retrieved: Vec<i16>,
}

unsafe fn text(list: *const pg_sys::List, at: usize) -> Box<[u8]> {
    nth::<pg_sys::String>(list, at).map_or(Box::default(), |text| CStr::from_ptr((*text).sval).to_bytes().into())
}

unsafe fn flag(list: *const pg_sys::List, at: usize) -> bool {
    nth::<pg_sys::Boolean>(list, at).is_some_and(|flag| (*flag).boolval)
}

unsafe fn integer(list: *const pg_sys::List, at: usize) -> i32 {
    nth::<pg_sys::Integer>(list, at).map_or(0, |number| (*number).ival)
}

/// The numbers of a list of columns.
unsafe fn columns(list: *const pg_sys::List, at: usize) -> Vec<i16> {
    let list = nth::<pg_sys::List>(list, at).unwrap_or(std::ptr::null_mut());
    cells(list).map(|cell| cell.int_value as i16).collect()
}

impl ScanPlan {
    /// # Safety
    /// `private` must be the list of a scan's plan.
    pub unsafe fn read(private: *const pg_sys::List) -> Self {
        Self { sql: text(private, 0), retrieved: columns(private, 1), fetch_size: integer(private, 2).max(1) }
    }
}

impl DirectPlan {
    /// # Safety
    /// `private` must be the list of a direct modification's plan.
    pub unsafe fn read(private: *const pg_sys::List) -> Self {
        Self {
            sql: text(private, 0),
            has_returning: flag(private, 1),
            retrieved: columns(private, 2),
            counts: flag(private, 3),
        }
    }
}

impl WritePlan {
    /// # Safety
    /// `private` must be the list of a row modification's plan.
    pub unsafe fn read(private: *const pg_sys::List) -> Self {
        Self {
            sql: text(private, 0),
            targets: columns(private, 1),
            values_end: integer(private, 2),
            has_returning: flag(private, 3),
            retrieved: columns(private, 4),
        }
    }
}
