//! The settings of the sampler.

use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

static INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(1000);
static RETENTION: GucSetting<i32> = GucSetting::<i32>::new(7 * 24 * 60);

/// Between two samples.
pub fn interval() -> Duration {
    Duration::from_millis(u64::from(INTERVAL.get().unsigned_abs()))
}

/// How long minutes are kept.
pub fn retention() -> Duration {
    Duration::from_secs(60 * u64::from(RETENTION.get().unsigned_abs()))
}

/// Defines them. Once per process.
pub fn init() {
    GucRegistry::define_int_guc(
        c"shardmap.lag_sample_interval",
        c"Sets the time between two questions to each primary and replica about its position.",
        c"Lag is known to this precision. A change takes effect with the next question.",
        &INTERVAL,
        100,
        3_600_000,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"shardmap.lag_history_retention",
        c"Sets how long shardmap.replica_lag_history keeps the minutes of each replica.",
        c"Less than three days lets a restart of the server forget part of the error budgets. A row a minute and replica.",
        &RETENTION,
        60,
        366 * 24 * 60,
        GucContext::Sighup,
        GucFlags::UNIT_MIN,
    );
}
