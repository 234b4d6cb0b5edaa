//! Conditions that must not see a row before row security does.
//!
//! Postgres keeps the order by levels: a condition of the user's that could tell what it sees (by an error, say) is
//! evaluated after the policies. postgres_fdw does not look at levels: it sends every condition that it can, and the shard
//! evaluates them in any order. So such a condition is made one that it cannot send, and is evaluated here, in order.

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::query::tree::items;
use crate::pg::raw::name_list;

/// Wraps the relation's conditions that may leak, if there are conditions of security before them.
///
/// # Safety
/// Called by the planner, before the conditions are looked at.
pub unsafe fn keep_leaky_conditions(baserel: *mut pg_sys::RelOptInfo) {
    let first = (*baserel).baserestrict_min_security;
    for condition in items::<pg_sys::RestrictInfo>((*baserel).baserestrictinfo) {
        if (*condition).security_level > first && !(*condition).leakproof {
            (*condition).clause = kept_here((*condition).clause);
        }
    }
}

/// `shardmap.keep_here(condition)`, which is worth what the condition is worth.
unsafe fn kept_here(condition: *mut pg_sys::Expr) -> *mut pg_sys::Expr {
    let kinds = [pg_sys::BOOLOID];
    let function = pg_sys::LookupFuncName(name_list(c"shardmap", c"keep_here"), 1, kinds.as_ptr(), false);
    let arguments = pg_sys::lappend(std::ptr::null_mut(), condition.cast());
    pg_sys::makeFuncExpr(
        function,
        pg_sys::BOOLOID,
        arguments,
        pg_sys::InvalidOid,
        pg_sys::InvalidOid,
        pg_sys::CoercionForm::COERCE_EXPLICIT_CALL,
    )
    .cast()
}

/// Returns its argument. Not built in, so that it is not sent to shards.
///
/// # Safety
/// Called by Postgres with one boolean.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_keep_here(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    (*fcinfo).args.as_slice(1)[0].value
}

#[no_mangle]
#[doc(hidden)]
pub extern "C" fn pg_finfo_shardmap_keep_here() -> &'static pg_sys::Pg_finfo_record {
    const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &RECORD
}
