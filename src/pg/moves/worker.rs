//! The background worker that runs one move, as the role that planned it.
//!
//! Decides nothing of the move: it takes steps, `shardmap._move_step`, each in a transaction of its own, until there is none
//! left, it fails, or it is told to stop. What always holds: at most `shardmap.max_move_workers` run in a database; a
//! failure ends the worker, is noted with the move and in the log, and the launcher starts another when its time has come;
//! a signal to stop is obeyed at once, wherever the step is. Read `launch.rs` for who starts it.

use std::ffi::c_int;

use pgrx::bgworkers::BackgroundWorker;
use pgrx::pg_sys;
use pgrx::prelude::*;

use super::{hold, launch, settings};
use crate::pg::resolver;
use crate::pg::worker::{transaction, Failure};

pub const NAME: &str = "pg_shardmap mover";
/// Whoever wants a lock that this one is in the way of, DROP EXTENSION say, is not to fail by a deadlock.
const LOCK_TIMEOUT: &std::ffi::CStr = c"500ms";

const BEGIN: &str = "SELECT shardmap._begin_run($1)";
const STEP: &str = "SELECT shardmap._move_step($1)";
const NOTE: &str = "SELECT shardmap._note_failure($1, $2)";

fn ask(snapshot: bool, sql: &str, id: i64) -> Result<Option<String>, Failure> {
    transaction(snapshot, || Ok(Spi::get_one_with_args::<String>(sql, &[id.into()])?))
}

/// Takes steps until there is none, or one fails.
fn run(id: i64) -> Result<(), Failure> {
    let slots = settings::max_workers();
    if !transaction(false, || Ok::<_, Failure>(hold::take_slot(slots)))? {
        return Ok(());
    }
    let mut next = ask(false, BEGIN, id)?;
    while let Some(kind) = next {
        // SAFETY: flags that signal handlers set; a reload is done where no transaction runs.
        unsafe {
            pgrx::check_for_interrupts!();
            if pg_sys::ConfigReloadPending != 0 {
                pg_sys::ConfigReloadPending = 0;
                pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
            }
        }
        next = match ask(kind == "snapshot", STEP, id) {
            // Somebody has changed the move meanwhile, by a wish for instance: again.
            Err(failure) if failure.code == PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE => Some(kind),
            other => other?,
        };
    }
    Ok(())
}

fn note(id: i64, failure: &Failure) {
    log!("move {id} has stopped: {}", failure.message);
    // Another session that runs it is no failure of the move.
    if failure.code == PgSqlErrorCode::ERRCODE_OBJECT_IN_USE {
        return;
    }
    let noted = transaction(false, || {
        Ok::<_, Failure>(Spi::run_with_args(NOTE, &[id.into(), failure.message.as_str().into()])?)
    });
    if let Err(failure) = noted {
        log!("pg_shardmap could not note that: {}", failure.message);
    }
}

/// Lets the launcher look for the next move, or at this one again.
#[pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: c_int, _argument: pg_sys::Datum) {
    launch::call();
}

/// Runs a move.
///
/// # Safety
/// Called by Postgres as a background worker; its extra are the numbers of database, role and move.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_mover_main(_argument: pg_sys::Datum) {
    // SAFETY: in the order that background workers need.
    resolver::handle_signals();
    let mut numbers = BackgroundWorker::get_extra().split(' ').filter_map(|number| number.parse::<i64>().ok());
    let mut next = || numbers.next().unwrap_or(0);
    let (database, role, id) = (next() as u32, next() as u32, next());
    // From 17 on a role that cannot log in is let in.
    let flags = if cfg!(any(feature = "pg15", feature = "pg16")) { 0 } else { 2 };
    pg_sys::BackgroundWorkerInitializeConnectionByOid(database.into(), role.into(), flags);
    pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::from(0));
    pg_sys::SetConfigOption(
        c"lock_timeout".as_ptr(),
        LOCK_TIMEOUT.as_ptr(),
        pg_sys::GucContext::PGC_SUSET,
        pg_sys::GucSource::PGC_S_OVERRIDE,
    );
    let Ok(activity) = std::ffi::CString::new(format!("moving: move {id}")) else { return };
    pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, activity.as_ptr());
    if let Err(failure) = run(id) {
        note(id, &failure);
    }
}
