//! Functions in C's calling convention, for calls that must cost little: arguments are looked at where they lie.
//!
//! Read next: [`super::owner`], whose functions are such.

use pgrx::pg_sys;

use crate::pg::encoding;

/// A NULL-safe view of a C function's arguments.
pub struct Arguments(pub pg_sys::FunctionCallInfo);

impl Arguments {
    /// Argument `at`, or `None` if it is NULL.
    ///
    /// # Safety
    /// The function must have been called with more than `at` arguments.
    pub unsafe fn get(&self, at: usize) -> Option<pg_sys::Datum> {
        let args = (*self.0).args.as_slice((*self.0).nargs as usize);
        (!args[at].isnull).then_some(args[at].value)
    }

    /// # Safety
    /// The function must have been called through an FmgrInfo, argument `at` must have a known type.
    pub unsafe fn type_of(&self, at: i32) -> pg_sys::Oid {
        pg_sys::get_fn_expr_argtype((*self.0).flinfo, at)
    }

    /// The function's result NULL.
    ///
    /// # Safety
    /// Inside the call.
    pub unsafe fn null(&self) -> pg_sys::Datum {
        (*self.0).isnull = true;
        pg_sys::Datum::from(0)
    }
}

/// A text in UTF-8 as Postgres' own.
///
/// # Safety
/// Inside a memory context whose results outlive the function call.
pub unsafe fn text(value: &[u8]) -> pg_sys::Datum {
    let value = encoding::server_bytes(value);
    pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(value.as_ptr().cast(), value.len() as i32))
}

/// Declares a function in C's calling convention, with the record by which Postgres knows it.
macro_rules! c_function {
    ($(#[$doc:meta])* $name:ident, $info:ident, $body:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Called by Postgres' function manager with the arguments that sql/routing.sql declares.
        #[no_mangle]
        #[pg_guard]
        pub unsafe extern "C-unwind" fn $name(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
            let body: unsafe fn(Arguments) -> pg_sys::Datum = $body;
            body(Arguments(fcinfo))
        }

        #[no_mangle]
        #[doc(hidden)]
        pub extern "C" fn $info() -> &'static pg_sys::Pg_finfo_record {
            const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
            &RECORD
        }
    };
}

pub(crate) use c_function;
