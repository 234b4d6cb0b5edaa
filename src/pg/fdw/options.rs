//! The options of servers, user mappings and foreign tables: postgres_fdw's, but for those that we do not honour, and
//! `pooler`, `peer_host` and `peer_port` of servers.

use std::ffi::CStr;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::error::Refusal;
use crate::pg::query::tree::items;
use crate::pg::remote::pooler::{self, Pooler};
use crate::pg::remote::target::{PEER_HOST, PEER_PORT};

/// Planning would ask the shard over a connection of postgres_fdw's own, which neither sees what the transaction has
/// written nor waits for anything but itself.
const REMOTE_ESTIMATE: &CStr = c"use_remote_estimate";

/// An option of a list, if it is set.
///
/// # Safety
/// `options` must be NIL or a valid list of DefElem.
pub unsafe fn find(options: *const pg_sys::List, name: &CStr) -> Option<*const std::ffi::c_char> {
    items::<pg_sys::DefElem>(options)
        .find(|option| CStr::from_ptr((**option).defname) == name)
        .map(|option| pg_sys::defGetString(option).cast_const())
}

/// The validator of `shardmap_fdw`.
///
/// # Safety
/// Called by Postgres with the options as a text[], and the catalog that they belong to.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_fdw_validator(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    let argument = |at: usize| (*fcinfo).args.as_slice(2)[at].value;
    let options = pg_sys::untransformRelOptions(argument(0));
    let mut theirs = Vec::new();
    for option in items::<pg_sys::DefElem>(options) {
        if CStr::from_ptr((*option).defname) == pooler::OPTION {
            check_pooler(option, argument(1));
            continue;
        }
        if [PEER_HOST, PEER_PORT].contains(&CStr::from_ptr((*option).defname)) {
            check_peer(option, argument(1));
            continue;
        }
        let value = CStr::from_ptr(pg_sys::defGetString(option)).to_bytes();
        let text = [CStr::from_ptr((*option).defname).to_bytes(), b"=", value].concat();
        theirs.push(pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(text.as_ptr().cast(), text.len() as i32)));
        if CStr::from_ptr((*option).defname) == REMOTE_ESTIMATE && pg_sys::defGetBoolean(option) {
            Refusal::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                "option \"use_remote_estimate\" is not supported for shards",
            )
            .hint("ANALYZE the logical table: plans are made by the statistics here.")
            .raise()
        }
    }
    let validate = pg_sys::load_external_function(
        c"$libdir/postgres_fdw".as_ptr(),
        c"postgres_fdw_validator".as_ptr(),
        true,
        std::ptr::null_mut(),
    );
    let validate: unsafe extern "C-unwind" fn(pg_sys::FunctionCallInfo) -> pg_sys::Datum =
        std::mem::transmute(validate);
    let count = theirs.len() as i32;
    let theirs = pg_sys::construct_array(theirs.as_mut_ptr(), count, pg_sys::TEXTOID, -1, false, b'i' as _);
    pg_sys::DirectFunctionCall2Coll(Some(validate), pg_sys::InvalidOid, pg_sys::Datum::from(theirs), argument(1))
}

/// Refuses another place for the option than a server.
unsafe fn check_place(option: *mut pg_sys::DefElem, catalog: pg_sys::Datum) {
    if catalog != pg_sys::Datum::from(pg_sys::ForeignServerRelationId) {
        let name = CStr::from_ptr((*option).defname).to_string_lossy();
        Refusal::new(PgSqlErrorCode::ERRCODE_FDW_INVALID_OPTION_NAME, format!("invalid option \"{name}\""))
            .hint("It is an option of foreign servers.")
            .raise()
    }
}

/// Refuses a value that the option does not have; `hint`: which it has.
unsafe fn check_value(option: *mut pg_sys::DefElem, is_valid: impl Fn(&CStr) -> bool, hint: &str) {
    let value = CStr::from_ptr(pg_sys::defGetString(option));
    if !is_valid(value) {
        let (name, value) = (CStr::from_ptr((*option).defname).to_string_lossy(), value.to_string_lossy());
        Refusal::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("invalid value for option \"{name}\": \"{value}\""),
        )
        .hint(hint)
        .raise()
    }
}

unsafe fn check_peer(option: *mut pg_sys::DefElem, catalog: pg_sys::Datum) {
    check_place(option, catalog);
    if CStr::from_ptr((*option).defname) == PEER_PORT {
        let is_port = |value: &CStr| value.to_str().is_ok_and(|value| value.parse::<u16>().is_ok());
        check_value(option, is_port, "It is a port, 1 to 65535.");
    }
}

unsafe fn check_pooler(option: *mut pg_sys::DefElem, catalog: pg_sys::Datum) {
    check_place(option, catalog);
    check_value(option, |value| Pooler::parse(value).is_some(), "It is none, transaction or transaction_prepared.");
}

#[no_mangle]
#[doc(hidden)]
pub extern "C" fn pg_finfo_shardmap_fdw_validator() -> &'static pg_sys::Pg_finfo_record {
    const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &RECORD
}
