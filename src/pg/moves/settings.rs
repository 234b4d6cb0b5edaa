//! Settings of moves.

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

/// Milliseconds.
static FENCE_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(500);
/// Seconds.
static CLEANUP_DELAY: GucSetting<i32> = GucSetting::<i32>::new(10);
static BATCH_ROWS: GucSetting<i32> = GucSetting::<i32>::new(200_000);
static ROWS_PER_SECOND: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Milliseconds.
static MAX_REPLICA_LAG: GucSetting<i32> = GucSetting::<i32>::new(-1);
static MAX_WORKERS: GucSetting<i32> = GucSetting::<i32>::new(2);

/// Moves that background workers run at the same time in a database.
pub fn max_workers() -> u32 {
    MAX_WORKERS.get().unsigned_abs()
}

/// Rows that a move copies or deletes in a second; `None`: as many as it can.
pub fn rows_per_second() -> Option<u32> {
    Some(ROWS_PER_SECOND.get().unsigned_abs()).filter(|rows| *rows > 0)
}

/// Rows that a move copies or deletes in one transaction, at most.
pub fn batch_rows() -> u64 {
    BATCH_ROWS.get().unsigned_abs().into()
}

/// Defines them. They are read by SQL.
pub fn init() {
    GucRegistry::define_int_guc(
        c"shardmap.fence_timeout",
        c"Limits how long a move may hold off the writers of a keyspace at its end.",
        c"Until then it must have met no writer any more, applied the last changes and compared them; else it lets the \
          writers go on and tries again later.",
        &FENCE_TIMEOUT,
        1,
        600_000,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"shardmap.cleanup_delay",
        c"Sets how long rows stay on a shard after they have moved away from it.",
        c"They are hidden there. Rows that a statement still reads are kept longer.",
        &CLEANUP_DELAY,
        0,
        2_592_000,
        GucContext::Userset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"shardmap.move_batch_rows",
        c"Limits how many rows a move copies, or deletes, in one transaction.",
        c"Batches have as many as take half a second, but no more than this. After a crash at most one batch is copied again.",
        &BATCH_ROWS,
        1,
        10_000_000,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"shardmap.max_move_workers",
        c"Sets how many moves background workers run at the same time in a database.",
        c"Each takes one of max_worker_processes. 0: none is started; those that run go on.",
        &MAX_WORKERS,
        0,
        64,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"shardmap.move_rows_per_second",
        c"Limits the rows that a move copies, and later deletes, in a second.",
        c"Each move by itself. Changes that it catches up with do not count. 0: no limit.",
        &ROWS_PER_SECOND,
        0,
        10_000_000,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"shardmap.move_max_replica_lag",
        c"Lets moves wait while a replica of their source or target lags more than this.",
        c"Neither copies nor deletes rows then, but in batches that were begun. Drained replicas do not count. One whose lag is \
          unknown is waited for for a minute. -1: waits for none.",
        &MAX_REPLICA_LAG,
        -1,
        86_400_000,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
}
