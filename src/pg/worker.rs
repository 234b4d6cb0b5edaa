//! Transactions of background workers.
//!
//! What always holds: a step is committed, or rolled back and its failure is the caller's; the worker goes on. Nothing is
//! said about it here: the callers log, and tell in `pg_stat_activity` what they do.

use std::ffi::c_int;
use std::panic::AssertUnwindSafe;

use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use pgrx::{pg_sys, PgTryBuilder};

/// Why a transaction failed.
pub struct Failure {
    pub code: PgSqlErrorCode,
    pub message: String,
}

impl From<CaughtError> for Failure {
    fn from(caught: CaughtError) -> Self {
        let (CaughtError::PostgresError(report)
        | CaughtError::ErrorReport(report)
        | CaughtError::RustPanic { ereport: report, .. }) = caught;
        Self { code: report.sql_error_code(), message: report.message().to_owned() }
    }
}

impl From<spi::Error> for Failure {
    fn from(error: spi::Error) -> Self {
        Self { code: PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, message: error.to_string() }
    }
}

/// Runs `work` in a transaction of its own. `snapshot`: with one snapshot for all that it reads.
///
/// # Errors
/// That of `work`, or what it or the commit raised.
pub fn transaction<T, E: From<CaughtError>>(snapshot: bool, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // SAFETY: begins and ends a transaction in a background worker, outside of any; its isolation is set before its first
    // snapshot. After an error it is rolled back, snapshot and all; commit may raise one as well.
    let outcome = unsafe {
        PgTryBuilder::new(AssertUnwindSafe(|| {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            if snapshot {
                pg_sys::XactIsoLevel = pg_sys::XACT_REPEATABLE_READ as c_int;
            }
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let done = work();
            if done.is_ok() {
                pg_sys::PopActiveSnapshot();
                pg_sys::CommitTransactionCommand();
            }
            done
        }))
        .catch_others(|error| Err(error.into()))
        .execute()
    };
    // SAFETY: as above.
    unsafe {
        if outcome.is_err() {
            pg_sys::AbortCurrentTransaction();
        }
        pg_sys::pgstat_report_stat(true);
    }
    outcome
}

/// Says in `pg_stat_activity` that the worker rests.
pub fn is_idle() {
    // SAFETY: an activity without a text.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, std::ptr::null()) }
}
