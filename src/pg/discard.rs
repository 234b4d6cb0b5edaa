//! DISCARD ALL, with which poolers hand a session on to their next client, who is to inherit nothing of the one before.
//!
//! Decides what goes: what the session has written, seen and observed, from which replica it has read, the commits that its tokens
//! would have to wait for, and the shards' sessions in which an administrator's own statements have run. What always holds: it goes
//! after Postgres has discarded its own; settings are reset by Postgres; what is known of servers stays, as do the connections, which are nobody's.

use std::ffi::c_char;
use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::query::tree::cast;
use crate::pg::{reads, remote};

static PREVIOUS: OnceLock<pg_sys::ProcessUtility_hook_type> = OnceLock::new();

/// Installs the hook. Once per process.
pub fn init() {
    // SAFETY: hooks are changed in _PG_init only, in a single thread.
    unsafe {
        let _ = PREVIOUS.set(pg_sys::ProcessUtility_hook);
        pg_sys::ProcessUtility_hook = Some(run);
    }
}

unsafe extern "C-unwind" {
    // Source: tcop/utility.h. Called without the guard that pgrx puts around it.
    fn standard_ProcessUtility(
        planned: *mut pg_sys::PlannedStmt,
        sql: *const c_char,
        read_only_tree: bool,
        context: pg_sys::ProcessUtilityContext::Type,
        params: pg_sys::ParamListInfo,
        environment: *mut pg_sys::QueryEnvironment,
        dest: *mut pg_sys::DestReceiver,
        completion: *mut pg_sys::QueryCompletion,
    );
}

/// No `pg_guard`: an error of a statement that is none of ours keeps its position, constraint and table, which a panic
/// does not carry. It passes by as Postgres raises it: nothing here is left to be dropped.
///
/// # Safety
/// Called by Postgres with a utility statement.
#[allow(clippy::too_many_arguments)] // Postgres' own
unsafe extern "C-unwind" fn run(
    planned: *mut pg_sys::PlannedStmt,
    sql: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    dest: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    let discards_all = cast::<pg_sys::DiscardStmt>((*planned).utilityStmt, pg_sys::NodeTag::T_DiscardStmt)
        .is_some_and(|discard| (*discard).target == pg_sys::DiscardMode::DISCARD_ALL);
    let next = PREVIOUS.get().copied().flatten().unwrap_or(standard_ProcessUtility);
    next(planned, sql, read_only_tree, context, params, environment, dest, completion);
    if discards_all {
        forget();
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn forget() {
    reads::session::forget();
    reads::doubt::forget();
    remote::forget_lent();
}
