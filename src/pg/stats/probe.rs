//! Ways to feed the statistics without a shard, for tests only: compiled with feature `pg_test`, never shipped.
//!
//! A test declares them itself: `CREATE FUNCTION ... AS '$libdir/pg_shardmap', 'stats_probe_record_wrapper'`.

use std::time::Instant;

use pgrx::prelude::*;

use super::{count_shard, count_step, record_fanout, FanoutSample, Step};

/// Records one call.
#[pg_extern(sql = false)]
fn stats_probe_record(text: &str, tables: &str, reason: &str, shards: i32, rows: i64, millis: f64) {
    record_fanout(&FanoutSample { text, tables, reason, shards: shards as u32, rows: rows as u64, millis });
}

/// Counts `times` statements of one step and shard; returns the nanoseconds that one took.
#[pg_extern(sql = false)]
fn stats_probe_count(step: i32, keyspace: &str, shard: i32, times: i32) -> f64 {
    let step = Step::ALL[step as usize];
    let begin = Instant::now();
    for _ in 0..times {
        count_step(step);
        count_shard(keyspace, shard as u16);
    }
    begin.elapsed().as_nanos() as f64 / f64::from(times.max(1))
}
