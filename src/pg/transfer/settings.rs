//! The settings under which values are written as text. Source: postgres_fdw's `set_transmission_modes`.
//!
//! What always holds: they are changed only where a value's text depends on them, for a change costs more than the value.

use std::ffi::CStr;

use pgrx::pg_sys;

/// The kinds of settings that a type's text depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Settings {
    dates: bool,
    intervals: bool,
    floats: bool,
    /// regclass and the like are written with their schemas if the search path does not hold these.
    names: bool,
    /// A shard's session always reads the literals of statements so.
    literals: bool,
}

impl Settings {
    pub const ALL: Self = Self { dates: true, intervals: true, floats: true, names: true, literals: true };

    pub fn of(kind: pg_sys::Oid) -> Self {
        let none = Self::default();
        match kind {
            pg_sys::BOOLOID
            | pg_sys::INT2OID
            | pg_sys::INT4OID
            | pg_sys::INT8OID
            | pg_sys::OIDOID
            | pg_sys::NUMERICOID
            | pg_sys::TEXTOID
            | pg_sys::VARCHAROID
            | pg_sys::BPCHAROID
            | pg_sys::NAMEOID
            | pg_sys::JSONOID
            | pg_sys::JSONBOID
            | pg_sys::UUIDOID
            | pg_sys::BYTEAOID
            | pg_sys::BITOID
            | pg_sys::VARBITOID
            | pg_sys::INETOID
            | pg_sys::CIDROID
            | pg_sys::TIMEOID
            | pg_sys::TIMETZOID => none,
            pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID => Self { dates: true, ..none },
            pg_sys::INTERVALOID => Self { intervals: true, ..none },
            pg_sys::FLOAT4OID | pg_sys::FLOAT8OID => Self { floats: true, ..none },
            // SAFETY: system cache look-ups.
            _ => unsafe {
                let element = pg_sys::get_element_type(kind);
                if element != pg_sys::InvalidOid {
                    return Self::of(element);
                }
                match pg_sys::get_typtype(kind) as u8 {
                    pg_sys::TYPTYPE_ENUM => none,
                    _ => Self::ALL,
                }
            },
        }
    }

    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            dates: self.dates || other.dates,
            intervals: self.intervals || other.intervals,
            floats: self.floats || other.floats,
            names: self.names || other.names,
            literals: self.literals || other.literals,
        }
    }
}

/// Settings that were changed, until it is dropped.
pub struct PlainOutput(i32);

impl PlainOutput {
    /// Changes those that are not as they must be.
    pub fn begin(settings: Settings) -> Option<Self> {
        // SAFETY: variables of this process; a nesting level of settings; the names and values are constants.
        unsafe {
            let dates = settings.dates && pg_sys::DateStyle != pg_sys::USE_ISO_DATES as i32;
            let intervals = settings.intervals && pg_sys::IntervalStyle != pg_sys::INTSTYLE_POSTGRES as i32;
            // From 1 on all digits are written.
            let floats = settings.floats && pg_sys::extra_float_digits < 1;
            let literals = settings.literals && !pg_sys::standard_conforming_strings;
            let changes = [
                (dates, c"datestyle", c"ISO"),
                (intervals, c"intervalstyle", c"postgres"),
                (floats, c"extra_float_digits", c"3"),
                (literals, c"standard_conforming_strings", c"on"),
                (settings.names, c"search_path", c"pg_catalog"),
            ];
            if changes.iter().all(|(needed, ..)| !needed) {
                return None;
            }
            let level = pg_sys::NewGUCNestLevel();
            changes.iter().filter(|(needed, ..)| *needed).for_each(|(_, name, value)| set(name, value));
            Some(Self(level))
        }
    }
}

unsafe fn set(name: &CStr, value: &CStr) {
    pg_sys::set_config_option(
        name.as_ptr(),
        value.as_ptr(),
        pg_sys::GucContext::PGC_USERSET,
        pg_sys::GucSource::PGC_S_SESSION,
        pg_sys::GucAction::GUC_ACTION_SAVE,
        true,
        0,
        false,
    );
}

impl Drop for PlainOutput {
    fn drop(&mut self) {
        // SAFETY: the level that `begin` has opened; an error has closed it with its transaction.
        unsafe { pg_sys::AtEOXact_GUC(true, self.0) }
    }
}
