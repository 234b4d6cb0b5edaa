//! How many rows a move copies or deletes in one transaction.
//!
//! Decides by how long the last batch took. What always holds: a batch grows fourfold at most, and has [`LEAST_BATCH`] rows
//! at least, so that shards that are far away or stand still do not make it shrink to nothing; batches come to take
//! [`BATCH_TIME`], so that what each costs besides its rows does not count, and a pause, a change or a crash does not wait
//! for long, or cost much, either.

use std::time::Duration;

/// What a batch should take.
pub const BATCH_TIME: Duration = Duration::from_millis(500);
/// Rows that a batch has at least, and a session's first one: nothing is known of them yet.
pub const LEAST_BATCH: u64 = 10_000;
/// A batch has at most this many times the rows of the one before it.
const MOST_GROWTH: f64 = 4.0;

/// Returns the rows of the batch after one of `rows` that took `took`. `asked`: the rows that it could have had; one that
/// found fewer says nothing of speed.
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)] // far below 2^52
pub fn next_batch(rows: u64, asked: u64, took: Duration) -> u64 {
    if rows < asked {
        return asked.max(LEAST_BATCH);
    }
    let factor = BATCH_TIME.as_secs_f64() / took.as_secs_f64().max(1e-9);
    ((rows as f64 * factor.min(MOST_GROWTH)) as u64).max(LEAST_BATCH)
}
