//! Statistics at their limits: texts that do not fit, figures that make no sense, more keyspaces than rows.
//!
//! Needs the library preloaded. What real statements leave behind is in tests/cluster/test_stats.py.

#[pgrx::pg_schema]
mod tests {
    use crate::pg::stats::{count_shard, count_step, record_fanout, routing, shared, FanoutSample, Step};
    use pgrx::prelude::*;

    fn one<T: FromDatum + IntoDatum>(sql: &str) -> T {
        Spi::get_one(sql).expect("the query runs").expect("one value that is not null")
    }

    fn record(text: &str, millis: f64) {
        record_fanout(&FanoutSample { text, tables: "t", reason: "r", shards: 3, rows: 2, millis });
    }

    /// Empties the statistics, for this test alone: tests run side by side, and what is counted is not rolled back.
    fn reset() {
        Spi::run("SELECT pg_advisory_xact_lock(20000101)").expect("the lock is granted");
        Spi::run("SELECT shardmap.reset_fanout_queries(), shardmap.reset_stat_routing()").expect("resets");
    }

    #[pg_test]
    fn stats_cut_texts_between_characters() {
        reset();
        let long = "€".repeat(1000);
        let sample =
            FanoutSample { text: &long, tables: &long, reason: &long, shards: u32::MAX, rows: u64::MAX, millis: 0.0 };
        record_fanout(&sample);
        let lengths = "SELECT format('%s %s %s', octet_length(query), octet_length(tables), octet_length(reason))";
        assert_eq!(one::<String>(&format!("{lengths} FROM shardmap.fanout_queries")), "1023 255 255");
        // What is cut still counts for the fingerprint.
        record(&format!("{long}, 1"), 0.0);
        record(&format!("{long}, 2"), 0.0);
        record(&format!("{long} + 2"), 0.0);
        assert_eq!(one::<i64>("SELECT count(*) FROM shardmap.fanout_queries"), 3);
        assert_eq!(one::<i64>("SELECT max(calls) FROM shardmap.fanout_queries"), 2);
    }

    #[pg_test]
    fn stats_take_times_that_make_no_sense() {
        for millis in [f64::NAN, f64::NEG_INFINITY, -1.0, 0.0] {
            reset();
            record("q", millis);
            assert_eq!(one::<f64>("SELECT total_ms + min_ms + max_ms FROM shardmap.fanout_queries"), 0.0, "{millis}");
        }
        reset();
        record("q", 2.5);
        record("q", 1.5);
        let figures = one::<String>(
            "SELECT format('%s %s %s %s', total_ms, mean_ms, min_ms, max_ms) \
                                     FROM shardmap.fanout_queries",
        );
        assert_eq!(figures, "4 2 1.5 2.5");
    }

    #[pg_test]
    fn stats_hold_no_literal_whatever_the_setting_of_backslashes() {
        reset();
        record(r"SELECT 'it\' || 'x", 1.0);
        Spi::run("SET LOCAL standard_conforming_strings = off; SET LOCAL escape_string_warning = off").expect("set");
        record(r"SELECT 'it\'s SECRET'", 1.0);
        let texts = one::<String>("SELECT string_agg(query, ';' ORDER BY query) FROM shardmap.fanout_queries");
        assert_eq!(texts, "SELECT $1;SELECT $1 || $2");
    }

    #[pg_test]
    fn stats_count_until_rows_run_out_and_take_them_back_from_dropped_databases() {
        let uncounted = || one::<i64>("SELECT statements_uncounted FROM shardmap.stat_info");
        let counted = || one::<i64>("SELECT count(*) FROM shardmap._stat_shards()");
        reset();
        count_step(Step::Narrowed);
        count_shard("main", 1023);
        count_shard("main", 1024); // no such shard
        assert_eq!(one::<i64>("SELECT sum(statements)::int8 FROM shardmap.stat_routing"), 1);
        assert_eq!(one::<i64>("SELECT statements FROM shardmap._stat_shards() WHERE number = 1023"), 1);
        assert_eq!(counted(), 1);

        let area = shared::get().expect("the library is preloaded");
        for database in 0..50 {
            routing::count_shard(area, 4_000_000_000 + database, "main", 0);
            routing::count_step(area, 4_000_000_000 + database, Step::Routed);
        }
        assert_eq!((counted(), uncounted()), (1, 0), "other databases have rows of their own");
        for number in 1..40 {
            count_shard(&format!("keyspace {number}"), 0);
        }
        assert_eq!((counted(), uncounted()), (40, 0), "the dropped databases made room");
        for number in 40..140 {
            count_shard(&format!("keyspace {number}"), 0);
        }
        assert_eq!(counted() + uncounted(), 140);
        assert!(counted() <= 64, "{}", counted());
        count_shard("keyspace 1", 0);
        assert_eq!(one::<i64>("SELECT statements FROM shardmap._stat_shards() WHERE keyspace = 'keyspace 1'"), 2);

        reset();
        assert_eq!(one::<i64>("SELECT sum(statements)::int8 FROM shardmap.stat_routing"), 0);
        assert_eq!(counted(), 0);
    }
}
