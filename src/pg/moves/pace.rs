//! How fast a session moves rows, and what it says meanwhile.
//!
//! Decides by what this session has done: one session runs a move at a time. What always holds: a batch is no larger than
//! what a second allows, so that the rate is kept within a second, nor than `shardmap.move_batch_rows`; up to there it grows
//! as `shardmap_core::batch` says. Waiting itself is SQL: `sql/moves_pace.sql`.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use pgrx::prelude::*;
use shardmap_core::batch::{next_batch, LEAST_BATCH};

use super::settings;

/// Between two notices of progress.
const NOTICES: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Pace {
    /// When the next batch may begin.
    due: Option<Instant>,
    /// Rows of the next batch, if nothing limits it; `None`: there was none yet.
    batch: Option<u64>,
    /// The batch under way: the rows that it may have, and since when.
    asked: Option<(u64, Instant)>,
    /// Since when a replica's lag is not known, and what was said of it.
    unknown: Option<(Instant, String)>,
    /// The state that was last asked about, and when something was said of it, or it began.
    told: Option<(String, Instant)>,
}

thread_local! {
    static PACE: RefCell<Pace> = RefCell::default();
}

/// Rows that a step copies or deletes. The step begins.
#[pg_extern(sql = false)]
fn move_batch() -> i64 {
    PACE.with_borrow_mut(|pace| {
        let second = settings::rows_per_second().map_or(u64::MAX, u64::from);
        let rows = pace.batch.unwrap_or(LEAST_BATCH).min(settings::batch_rows()).min(second);
        pace.asked = Some((rows, Instant::now()));
        i64::try_from(rows).unwrap_or(i64::MAX)
    })
}

/// Notes that rows were copied or deleted.
#[pg_extern(sql = false)]
fn pace_rows(rows: i64) {
    let rate = settings::rows_per_second();
    PACE.with_borrow_mut(|pace| {
        let now = Instant::now();
        if let Some((asked, since)) = pace.asked.take() {
            pace.batch = Some(next_batch(rows.unsigned_abs(), asked, now - since));
        }
        let took = |rate: u32| Duration::from_secs_f64(rows.max(0) as f64 / f64::from(rate));
        pace.due = rate.map(|rate| pace.due.map_or(now, |due| due.max(now)) + took(rate));
    });
}

/// Seconds until the next rows may be moved.
#[pg_extern(sql = false)]
fn pace_left() -> f64 {
    let due = PACE.with_borrow(|pace| pace.due).filter(|_| settings::rows_per_second().is_some());
    due.map_or(0.0, |due| due.saturating_duration_since(Instant::now()).as_secs_f64())
}

/// Notes whether a replica's lag is unknown, and what is to be said of it. Returns for how many seconds it has been.
#[pg_extern(sql = false)]
fn note_unknown_lag(said: Option<String>) -> f64 {
    PACE.with_borrow_mut(|pace| {
        let since = pace.unknown.take().map_or_else(Instant::now, |(since, _)| since);
        pace.unknown = said.map(|said| (since, said));
        pace.unknown.as_ref().map_or(0.0, |(since, _)| since.elapsed().as_secs_f64())
    })
}

/// What was said of a replica whose lag is unknown.
#[pg_extern(sql = false)]
fn unknown_lag() -> Option<String> {
    PACE.with_borrow(|pace| pace.unknown.as_ref().map(|(_, said)| said.clone()))
}

/// Whether progress in this state is to be told: every few seconds.
#[pg_extern(sql = false)]
fn is_progress_due(state: &str) -> bool {
    PACE.with_borrow_mut(|pace| {
        let since = pace.told.as_ref().filter(|(of, _)| of == state).map(|(_, at)| *at);
        let is_due = since.is_some_and(|since| since.elapsed() >= NOTICES);
        if is_due || since.is_none() {
            pace.told = Some((state.to_owned(), Instant::now()));
        }
        is_due
    })
}
