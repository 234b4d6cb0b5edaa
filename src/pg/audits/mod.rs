//! Audits made by background workers, as the settings `shardmap.audit_*` say.
//!
//! Decides when to look whether audits are due. The launcher of `resolver` starts a short-lived auditor in each database,
//! a few times in each interval; that makes the audits that are due there, one after the other, and ends. What always
//! holds: one auditor works in a database at a time, and every database gets its turn; an audit runs with the rights of one role, under the restrictions
//! of a security-restricted operation; one that fails is written down, and the next keyspace gets its turn. Read next:
//! `sql/audit_schedule.sql` for what is due.

mod settings;
mod worker;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::resolver;

pub use settings::init;

/// Between two looks, at the least and at the most.
const LOOKS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// Auditors that are started at once; most find nothing that is due, and end.
const AT_ONCE: usize = 2;
/// Before the next ones are started.
const PAUSE: Duration = Duration::from_millis(200);
/// Before another try, where there was no room for one more worker.
const FULL: Duration = Duration::from_secs(5);

/// The launcher's plan.
#[derive(Default)]
struct Plan {
    /// When the last look began.
    begun: Option<Instant>,
    /// Databases that have not had their auditor in this look.
    waiting: VecDeque<pg_sys::Oid>,
    /// No auditor is started before.
    not_before: Option<Instant>,
}

thread_local! {
    static PLAN: RefCell<Plan> = RefCell::default();
}

impl Plan {
    fn time_left(&self, interval: Duration) -> Duration {
        if self.waiting.is_empty() {
            let pause = (interval / 4).clamp(LOOKS.0, LOOKS.1);
            return self.begun.map_or(Duration::ZERO, |begun| pause.saturating_sub(begun.elapsed()));
        }
        self.not_before.map_or(Duration::ZERO, |when| when.saturating_duration_since(Instant::now()))
    }
}

/// The time to the next step.
pub fn time_left() -> Duration {
    settings::interval().map_or(Duration::MAX, |interval| PLAN.with_borrow(|plan| plan.time_left(interval)))
}

/// Starts auditors if it is time to. `databases`: those that exist.
pub fn tend(databases: impl Fn() -> Vec<pg_sys::Oid>) {
    if !time_left().is_zero() {
        return;
    }
    let databases = PLAN.with_borrow(|plan| plan.waiting.is_empty()).then(databases);
    PLAN.with_borrow_mut(|plan| {
        if let Some(databases) = databases {
            (plan.begun, plan.waiting) = (Some(Instant::now()), databases.into());
        }
        let mut pause = PAUSE;
        for _ in 0..AT_ONCE {
            let Some(database) = plan.waiting.pop_front() else { break };
            if !start(database) {
                plan.waiting.push_front(database);
                pause = FULL;
                break;
            }
        }
        plan.not_before = Some(Instant::now() + pause);
    });
}

/// False: there is no room for one more worker.
fn start(database: pg_sys::Oid) -> bool {
    let started = resolver::worker("pg_shardmap auditor", "shardmap_auditor_main")
        .set_argument(Some(pg_sys::Datum::from(database)))
        .set_restart_time(None)
        .load_dynamic();
    if started.is_err() {
        log!("pg_shardmap could not start an auditor: raise max_worker_processes");
    }
    started.is_ok()
}
