//! Audits made by background workers, as the settings `shardmap.audit_*` say.
//!
//! Decides when to look whether audits are due. The launcher of `resolver` starts a short-lived auditor in each database,
//! a few times in each interval; that makes the audits that are due there, one after the other, and ends. What always
//! holds: one auditor works in a database at a time; an audit runs with the rights of one role, under the restrictions
//! of a security-restricted operation; one that fails is written down, and the next keyspace gets its turn. Read next:
//! `sql/audit_schedule.sql` for what is due.

mod settings;
mod worker;

use std::cell::Cell;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::resolver;

pub use settings::init;

/// Between two looks, at the least and at the most.
const LOOKS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

thread_local! {
    /// When auditors were started last. The launcher's.
    static LAST: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The time to the next look.
pub fn time_left() -> Duration {
    let Some(interval) = settings::interval() else { return Duration::MAX };
    let pause = (interval / 4).clamp(LOOKS.0, LOOKS.1);
    LAST.get().map_or(Duration::ZERO, |last| pause.saturating_sub(last.elapsed()))
}

/// Starts auditors if it is time to. `databases`: those that exist.
pub fn tend(databases: impl Fn() -> Vec<pg_sys::Oid>) {
    if !time_left().is_zero() {
        return;
    }
    LAST.set(Some(Instant::now()));
    for database in databases() {
        let started = resolver::worker("pg_shardmap auditor", "shardmap_auditor_main")
            .set_argument(Some(pg_sys::Datum::from(database)))
            .set_restart_time(None)
            .load_dynamic();
        if started.is_err() {
            log!("pg_shardmap could not start an auditor: raise max_worker_processes");
            return;
        }
    }
}
