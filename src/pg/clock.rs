//! What time it is, as Postgres counts.

use pgrx::pg_sys;
use shardmap_core::replica::Moment;

/// Microseconds since 2000-01-01 UTC.
pub fn now() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// The same, for the core.
pub fn moment() -> Moment {
    Moment(now())
}
