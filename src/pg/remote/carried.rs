//! The settings that decide what a statement means, kept equal in a shard's session to those of ours.
//!
//! What always holds: a shard's session is taken to have a setting only after it was sent and nothing was rolled back
//! since. What is planned here on foreign tables has no part that depends on settings, but for values that come as text.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;

/// The session's values, cheap to compare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Carried {
    date_style: i32,
    date_order: i32,
    interval_style: i32,
    float_digits: i32,
    lock_timeout: i32,
    array_nulls: bool,
    quotes_all: bool,
    /// Addresses of values that Postgres keeps for the life of the process.
    time_zone: usize,
    bytea_output: usize,
}

/// Their names.
const NAMES: [&str; 8] = [
    "TimeZone",
    "DateStyle",
    "IntervalStyle",
    "extra_float_digits",
    "bytea_output",
    "lock_timeout",
    "array_nulls",
    "quote_all_identifiers",
];

/// What a statement needs of the settings of its session on the shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Needs {
    Nothing,
    /// Values come or go as text that is read and written in the plain style.
    Plain,
    /// They mean what ours do.
    Ours,
}

impl Carried {
    /// What a session must have that satisfies `needs`, if it has not.
    pub fn missing(needs: Needs, known: Option<Self>) -> Option<Self> {
        let ours = Self::current();
        match (needs, known) {
            (Needs::Nothing | Needs::Plain, Some(known)) if known.lock_timeout != ours.lock_timeout => {
                Some(ours.plain())
            }
            (Needs::Nothing, Some(_)) => None,
            (Needs::Ours, Some(known)) if known == ours => None,
            (Needs::Plain, Some(known)) if known.is_plain() => None,
            (Needs::Ours, _) => Some(ours),
            (Needs::Nothing | Needs::Plain, _) => Some(ours.plain()),
        }
    }

    fn plain(self) -> Self {
        Self {
            date_style: pg_sys::USE_ISO_DATES as i32,
            interval_style: pg_sys::INTSTYLE_POSTGRES as i32,
            float_digits: 3,
            ..self
        }
    }

    fn is_plain(self) -> bool {
        self.date_style == pg_sys::USE_ISO_DATES as i32
            && self.interval_style == pg_sys::INTSTYLE_POSTGRES as i32
            && self.float_digits > 0
    }

    /// As they are now.
    pub fn current() -> Self {
        // SAFETY: variables of this process; the option exists, and its value is one of Postgres' constants.
        unsafe {
            Self {
                date_style: pg_sys::DateStyle,
                date_order: pg_sys::DateOrder,
                interval_style: pg_sys::IntervalStyle,
                float_digits: pg_sys::extra_float_digits,
                lock_timeout: pg_sys::LockTimeout,
                array_nulls: pg_sys::Array_nulls,
                quotes_all: pg_sys::quote_all_identifiers,
                time_zone: pg_sys::session_timezone as usize,
                bytea_output: pg_sys::GetConfigOption(c"bytea_output".as_ptr(), true, false) as usize,
            }
        }
    }
}

/// Names and values, as they are now.
pub fn values() -> Vec<(&'static str, String)> {
    let value = |name: &'static str| {
        let option = CString::new(name).unwrap_or_default();
        // SAFETY: the option exists; its value is copied.
        let value = unsafe { CStr::from_ptr(pg_sys::GetConfigOption(option.as_ptr(), false, false)) };
        (name, value.to_string_lossy().into_owned())
    };
    NAMES.into_iter().map(value).collect()
}

/// What every session of ours has, and a pooler's may lack.
const ALWAYS: [(&str, &str); 2] = [("search_path", "pg_catalog"), ("standard_conforming_strings", "on")];

/// The command that gives them to a session of a shard; `local`: to its transaction, with what a session of ours has.
pub fn command(carried: Carried, local: bool) -> Vec<u8> {
    let ours = carried == Carried::current();
    let set = |(name, value): (&str, String)| {
        let value = match name {
            "DateStyle" if !ours => "ISO".to_owned(),
            "IntervalStyle" if !ours => "postgres".to_owned(),
            "extra_float_digits" if !ours => "3".to_owned(),
            _ => value,
        };
        let value = CString::new(value).unwrap_or_default();
        // SAFETY: a C string; the literal is copied.
        let literal = unsafe { CStr::from_ptr(pg_sys::quote_literal_cstr(value.as_ptr())) };
        format!("pg_catalog.set_config('{name}', {}, {local})", literal.to_string_lossy())
    };
    let always =
        ALWAYS.iter().take(if local { ALWAYS.len() } else { 0 }).map(|(name, value)| (*name, (*value).to_owned()));
    format!("SELECT {}", always.chain(values()).map(set).collect::<Vec<_>>().join(", ")).into_bytes()
}
