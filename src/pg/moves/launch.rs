//! When workers for moves are started.
//!
//! Decides by a time in shared memory for each database, at which its moves are to be looked at. The launcher of `resolver`
//! keeps it and starts that database's worker, which calls [`start_due`]. What always holds: after a start of the server,
//! or a crash of a session, every database is looked at; while a database has moves to run, it is looked at again.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::PgXactCallbackEvent;

use super::worker::NAME;
use crate::pg::clock::now;
use crate::pg::error::Refusal;
use crate::pg::replicas::registry;
use crate::pg::resolver;
use crate::pg::worker::{transaction, Failure};

/// Between two looks while there are moves to run; whoever has something to do calls for one at once.
const PAUSE: i64 = 5_000_000;

const CLAIM: &str = "SELECT c.move, c.role, c.wait FROM shardmap._claim_moves() c";

/// A database's time: 0: there is nothing to do.
fn own() -> Option<&'static AtomicI64> {
    // SAFETY: a variable of the session.
    resolver::moves_due(unsafe { pg_sys::MyDatabaseId })
}

fn due_at(time: i64) {
    if let Some(due) = own() {
        let sooner = |known: i64| (known == 0 || known > time).then_some(time);
        let _ = due.fetch_update(Ordering::AcqRel, Ordering::Acquire, sooner);
    }
}

/// Calls the launcher at once.
pub fn call() {
    due_at(now());
    resolver::wake_launcher();
}

/// Until the next look at a database's moves.
pub fn wait_of(due: &AtomicI64) -> Option<Duration> {
    match due.load(Ordering::Acquire) {
        0 => None,
        time => Some(Duration::from_micros(u64::try_from(time.saturating_sub(now())).unwrap_or(0))),
    }
}

/// Says that a look begins: should it fail, there is another.
pub fn begin(due: &AtomicI64) {
    due.store(now() + PAUSE, Ordering::Release);
}

/// Calls for workers when this transaction commits.
#[pg_extern(sql = false)]
fn call_movers() {
    if resolver::server_start().is_none() {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "there are no background workers for moves: pg_shardmap is not preloaded",
        )
        .hint("Add pg_shardmap to shared_preload_libraries and restart the server, or CALL shardmap.run_move.")
        .raise()
    }
    pgrx::register_xact_callback(PgXactCallbackEvent::Commit, call);
}

/// Starts workers for the moves of this database that are due. In a background worker, outside of a transaction.
pub fn start_due() {
    let Some(due) = own() else { return };
    let seen = due.load(Ordering::Acquire);
    let claimed = transaction(false, || {
        if registry::table(c"move_run").is_none() {
            return Ok::<_, Failure>(Vec::new());
        }
        Spi::connect_mut(|client| {
            let mut moves = Vec::new();
            for row in client.update(CLAIM, None, &[])? {
                let role = row.get::<pg_sys::Oid>(2)?;
                moves.push((row.get::<i64>(1)?.unwrap_or(0), role, row.get::<i64>(3)?.unwrap_or(0)));
            }
            Ok(moves)
        })
    });
    let moves = match claimed {
        Ok(moves) => moves,
        Err(failure) => {
            log!("pg_shardmap could not look for moves: {}", failure.message);
            return;
        }
    };
    let waits = moves.iter().map(|(_, _, wait)| (*wait).clamp(0, PAUSE)).min();
    let next = waits.map_or(0, |wait| now() + if wait == 0 { PAUSE } else { wait });
    // Who has called meanwhile is not to be forgotten.
    let _ = due.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire);
    for (id, role, _) in moves {
        if let Some(role) = role {
            start(id, role);
        }
    }
}

fn start(id: i64, role: pg_sys::Oid) {
    // SAFETY: a variable of the session.
    let database = unsafe { pg_sys::MyDatabaseId };
    let started = resolver::worker(NAME, "shardmap_mover_main")
        .set_extra(&format!("{} {} {id}", database.to_u32(), role.to_u32()))
        .set_restart_time(None)
        .load_dynamic();
    if started.is_err() {
        log!("pg_shardmap could not start a worker for move {id}: raise max_worker_processes");
    }
}
