//! The hook for statements that are not planned: COPY out of a logical table.
//!
//! Postgres refuses to copy out of a partitioned table, which has no rows of its own. But where row security applies it
//! makes the COPY a SELECT .. FROM ONLY the table before it looks, and writes an empty file without a word. That COPY gets
//! here the error that any other user gets. Everything else is handed on untouched.

use std::ffi::{c_char, CStr};
use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;

use crate::pg::error::Refusal;
use crate::pg::query::tree::cast;
use crate::pg::{catalog, flag};

static PREVIOUS: OnceLock<pg_sys::ProcessUtility_hook_type> = OnceLock::new();

/// Installs the hook. Once per process.
pub fn init() {
    // SAFETY: hooks are changed in _PG_init only, in a single thread.
    unsafe {
        let _ = PREVIOUS.set(pg_sys::ProcessUtility_hook);
        pg_sys::ProcessUtility_hook = Some(process_utility);
    }
}

/// # Safety
/// Called by Postgres with a statement that is not planned.
#[pg_guard]
#[allow(clippy::too_many_arguments)]
unsafe extern "C-unwind" fn process_utility(
    planned: *mut pg_sys::PlannedStmt,
    sql: *const c_char,
    read_only: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    receiver: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    if let Some(copy) = cast::<pg_sys::CopyStmt>((*planned).utilityStmt, pg_sys::NodeTag::T_CopyStmt) {
        refuse_empty_copy(copy);
    }
    // SAFETY: the previous hook may raise an error; the boundary turns it into a panic that pg_guard re-raises.
    match PREVIOUS.get().copied().flatten() {
        Some(previous) => pg_guard_ffi_boundary(|| {
            previous(planned, sql, read_only, context, params, environment, receiver, completion);
        }),
        None => {
            pg_sys::standard_ProcessUtility(planned, sql, read_only, context, params, environment, receiver, completion)
        }
    }
}

/// Refuses COPY .. TO of a logical table by a user to whom its row security applies, who may read some of it.
unsafe fn refuse_empty_copy(copy: *mut pg_sys::CopyStmt) {
    if (*copy).is_from || (*copy).relation.is_null() {
        return;
    }
    let Some(catalog) = catalog::current() else { return };
    let missing_ok = pg_sys::RVROption::RVR_MISSING_OK;
    let relid =
        pg_sys::RangeVarGetRelidExtended((*copy).relation, pg_sys::NoLock as _, missing_ok, None, std::ptr::null_mut());
    if catalog.table(relid).is_none() || !reads_under_row_security(relid) {
        return;
    }
    let name = CStr::from_ptr((*(*copy).relation).relname).to_string_lossy();
    flag::refuse(
        Refusal::new(
            PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
            format!("cannot copy from partitioned table \"{name}\""),
        )
        .hint("Try the COPY (SELECT ...) TO variant."),
    )
}

/// Whether the user may read a column of the table, and would see its rows through policies. Anyone else gets Postgres'
/// own error.
unsafe fn reads_under_row_security(relid: pg_sys::Oid) -> bool {
    let (user, select) = (pg_sys::GetUserId(), pg_sys::ACL_SELECT as pg_sys::AclMode);
    let may_read = pg_sys::pg_class_aclcheck(relid, user, select) == pg_sys::AclResult::ACLCHECK_OK
        || pg_sys::pg_attribute_aclcheck_all(relid, user, select, pg_sys::AclMaskHow::ACLMASK_ANY)
            == pg_sys::AclResult::ACLCHECK_OK;
    may_read
        && pg_sys::row_security
        && pg_sys::check_enable_rls(relid, pg_sys::InvalidOid, true) == pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32
}
