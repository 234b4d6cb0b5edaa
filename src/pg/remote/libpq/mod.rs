//! libpq as safe Rust: a table of functions found in the running process, a connection, a result, a cancel request.
//!
//! Decides nothing. The library is not linked: postgres_fdw's is loaded, which brings libpq with it, and the functions
//! are looked up in the process, so that both use the same libpq. What always holds: a connection is in non-blocking
//! mode once made, no call here waits for the network except [`Cancelling::wait`], which has a limit, and every PGconn
//! and PGresult is freed exactly once. Functions of libpq accept a null connection, so a closed [`Conn`] answers every
//! question as a broken one does.
//!
//! Read next: `link` for how these calls make a conversation.

mod answer;
mod cancel;
mod conn;

use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr;
use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

pub use answer::{Answer, AnswerKind};
pub use cancel::{cancel_running, Cancelling};
pub use conn::{Conn, Notice, Poll, TransactionStatus};

use crate::pg::error::Refusal;

#[repr(C)]
struct PGconn([u8; 0]);
#[repr(C)]
struct PGresult([u8; 0]);
#[repr(C)]
struct PGcancel([u8; 0]);
/// Source: libpq-fe.h, `PQconninfoOption`, unchanged since 7.0.
#[repr(C)]
struct ConninfoOption {
    keyword: *mut c_char,
    envvar: *mut c_char,
    compiled: *mut c_char,
    val: *mut c_char,
    label: *mut c_char,
    dispchar: *mut c_char,
    dispsize: c_int,
}
type NoticeReceiver = unsafe extern "C" fn(*mut c_void, *const PGresult);

/// Declares the table of libpq's functions and the look-up that fills it.
macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* }

        impl Functions {
            fn find() -> Result<Self, &'static str> {
                Ok(Self { $($name: {
                    let symbol = concat!(stringify!($name), "\0");
                    // SAFETY: dlsym reads a NUL-terminated name.
                    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr().cast()) };
                    if address.is_null() {
                        return Err(stringify!($name));
                    }
                    // SAFETY: libpq's ABI gives the function of this name the type declared here.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(address) }
                },)* })
            }
        }
    };
}

functions! {
    PQconnectStartParams(*const *const c_char, *const *const c_char, c_int) -> *mut PGconn;
    PQconnectPoll(*mut PGconn) -> c_int;
    PQconndefaults() -> *mut ConninfoOption;
    PQconninfoFree(*mut ConninfoOption);
    PQconnectionUsedPassword(*const PGconn) -> c_int;
    PQfinish(*mut PGconn);
    PQstatus(*const PGconn) -> c_int;
    PQtransactionStatus(*const PGconn) -> c_int;
    PQsocket(*const PGconn) -> c_int;
    PQbackendPID(*const PGconn) -> c_int;
    PQparameterStatus(*const PGconn, *const c_char) -> *const c_char;
    PQerrorMessage(*const PGconn) -> *const c_char;
    PQsetErrorVerbosity(*mut PGconn, c_int) -> c_int;
    PQsetnonblocking(*mut PGconn, c_int) -> c_int;
    PQsetNoticeReceiver(*mut PGconn, NoticeReceiver, *mut c_void) -> Option<NoticeReceiver>;
    PQsendQuery(*mut PGconn, *const c_char) -> c_int;
    PQsetSingleRowMode(*mut PGconn) -> c_int;
    PQflush(*mut PGconn) -> c_int;
    PQconsumeInput(*mut PGconn) -> c_int;
    PQisBusy(*mut PGconn) -> c_int;
    PQgetResult(*mut PGconn) -> *mut PGresult;
    PQsslInUse(*mut PGconn) -> c_int;
    PQsslStruct(*mut PGconn, *const c_char) -> *mut c_void;
    PQgssEncInUse(*mut PGconn) -> c_int;
    PQclear(*mut PGresult);
    PQresultStatus(*const PGresult) -> c_int;
    PQresultErrorField(*const PGresult, c_int) -> *const c_char;
    PQcmdStatus(*mut PGresult) -> *const c_char;
    PQntuples(*const PGresult) -> c_int;
    PQnfields(*const PGresult) -> c_int;
    PQfname(*const PGresult, c_int) -> *const c_char;
    PQftype(*const PGresult, c_int) -> pg_sys::Oid;
    PQgetisnull(*const PGresult, c_int, c_int) -> c_int;
    PQgetlength(*const PGresult, c_int, c_int) -> c_int;
    PQgetvalue(*const PGresult, c_int, c_int) -> *const c_char;
    PQgetCancel(*mut PGconn) -> *mut PGcancel;
    PQcancel(*mut PGcancel, *mut c_char, c_int) -> c_int;
    PQfreeCancel(*mut PGcancel);
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Loads libpq if the process does not have it yet.
///
/// # Errors
/// 58P01 if a function is missing. Raises Postgres' own error if postgres_fdw's library is not installed.
pub fn load() -> Result<(), Refusal> {
    if FUNCTIONS.get().is_some() {
        return Ok(());
    }
    // SAFETY: both names are NUL-terminated; an error of the loader becomes a panic.
    unsafe {
        let (library, function) = (c"$libdir/postgres_fdw", c"postgres_fdw_handler");
        pg_sys::load_external_function(library.as_ptr(), function.as_ptr(), true, ptr::null_mut());
    }
    let found = Functions::find().map_err(|missing| {
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_FILE, format!("function {missing} of libpq was not found"))
            .hint("The postgres_fdw library of this server must be linked with libpq 15 or later.")
    })?;
    let _ = FUNCTIONS.set(found);
    Ok(())
}

/// The table. Every [`Conn`] is made after [`load`], and everything else is reached through a [`Conn`].
fn pq() -> &'static Functions {
    FUNCTIONS.get().expect("libpq is loaded before it is used")
}

/// A copy of a C string, or `None` for a null pointer.
///
/// # Safety
/// `text` is null or NUL-terminated.
unsafe fn owned(text: *const c_char) -> Option<String> {
    (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
}

/// The connection options of this libpq that a foreign server or a user mapping may set. Call [`load`] first.
pub fn option_names() -> Vec<String> {
    let mut names = Vec::new();
    // SAFETY: the array ends with a null keyword and is freed by libpq's own function.
    unsafe {
        let all = (pq().PQconndefaults)();
        let mut at = all;
        while !at.is_null() && !(*at).keyword.is_null() {
            let debug = owned((*at).dispchar).is_some_and(|shown| shown.contains('D'));
            let name = owned((*at).keyword).unwrap_or_default();
            if !debug && name != "fallback_application_name" && name != "client_encoding" {
                names.push(name);
            }
            at = at.add(1);
        }
        (pq().PQconninfoFree)(all);
    }
    names
}
