//! The SQL side of the statistics: what `sql/stats.sql` builds its views on.
//!
//! Decides who sees what. What always holds: a session sees its own database only; another user's statements show
//! figures but no text unless the reader may read all statistics (`pg_read_all_stats`), as in pg_stat_statements.
//! Without the library preloaded there are no rows, and a notice says why. Read next: `sql/stats.sql`.

#![allow(clippy::type_complexity)] // the columns of SQL functions

use std::sync::atomic::Ordering;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::iter::TableIterator;
use pgrx::pg_sys;
use pgrx::prelude::*;

use super::shared::{self, Shared};
use super::{database, fanout, now, routing};
use crate::pg::error::Refusal;

/// The area and the session's database; a notice without.
fn area() -> Option<(&'static Shared, u32)> {
    let area = shared::get().zip(database());
    if area.is_none() {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "pg_shardmap keeps no statistics on this server",
        )
        .hint("Add pg_shardmap to \"shared_preload_libraries\" and restart the server.")
        .report(PgLogLevel::NOTICE);
    }
    area
}

/// Whether the current user may see the text of `owner`'s statements.
fn may_read(owner: u32) -> bool {
    // SAFETY: both take any OID; a role that is gone has no members.
    unsafe {
        let user = pg_sys::GetUserId();
        user.to_u32() == owner || pg_sys::has_privs_of_role(user, pg_sys::Oid::from(pg_sys::ROLE_PG_READ_ALL_STATS))
    }
}

/// A text in the database's encoding. Statistics hold UTF-8; elsewhere a letter beyond ASCII shows as a question mark.
fn shown(text: String) -> String {
    // SAFETY: reads a variable of the session.
    let encoding = unsafe { pg_sys::GetDatabaseEncoding() } as u32;
    if text.is_ascii() || [pg_sys::pg_enc::PG_UTF8, pg_sys::pg_enc::PG_SQL_ASCII].contains(&encoding) {
        return text;
    }
    text.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect()
}

fn timestamp(micros: i64) -> Option<TimestampWithTimeZone> {
    TimestampWithTimeZone::try_from(micros).ok()
}

#[allow(clippy::cast_possible_wrap)] // bigint shows the same bits
fn bigint(count: u64) -> i64 {
    count as i64
}

fn millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}

type FanoutRow = (
    pg_sys::Oid,
    Option<i64>,
    Option<String>,
    Option<String>,
    Option<String>,
    i32,
    i64,
    i64,
    f64,
    f64,
    f64,
    Option<TimestampWithTimeZone>,
    Option<TimestampWithTimeZone>,
);

#[pg_extern(sql = false)]
fn stats_fanout_queries() -> TableIterator<
    'static,
    (
        name!(user_id, pg_sys::Oid),
        name!(fingerprint, Option<i64>),
        name!(query, Option<String>),
        name!(tables, Option<String>),
        name!(reason, Option<String>),
        name!(shards, i32),
        name!(calls, i64),
        name!(rows, i64),
        name!(total_ms, f64),
        name!(min_ms, f64),
        name!(max_ms, f64),
        name!(first_seen, Option<TimestampWithTimeZone>),
        name!(last_seen, Option<TimestampWithTimeZone>),
    ),
> {
    let queries = area().map(|(area, database)| {
        let _lock = area.shared();
        fanout::all(area, Some(database))
    });
    let rows: Vec<FanoutRow> = queries
        .unwrap_or_default()
        .into_iter()
        .map(|query| {
            let readable = may_read(query.user);
            (
                pg_sys::Oid::from(query.user),
                readable.then_some(bigint(query.fingerprint)),
                Some(if readable { shown(query.text) } else { "<insufficient privilege>".into() }),
                readable.then(|| shown(query.tables)),
                readable.then(|| shown(query.reason)),
                query.shards as i32,
                bigint(query.calls),
                bigint(query.rows),
                millis(query.total_ns),
                millis(query.min_ns),
                millis(query.max_ns),
                timestamp(query.first_seen),
                timestamp(query.last_seen),
            )
        })
        .collect();
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
fn stats_steps() -> TableIterator<'static, (name!(step, &'static str), name!(statements, i64))> {
    let counts = area().map(|(area, database)| routing::steps(area, Some(database)));
    let rows: Vec<_> =
        counts.unwrap_or_default().into_iter().map(|count| (count.step.name(), bigint(count.statements))).collect();
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)] // pgrx reads the columns off it
fn stats_shards() -> TableIterator<
    'static,
    (name!(keyspace, String), name!(number, i32), name!(statements, i64), name!(errors, i64), name!(wait_ms, f64)),
> {
    let counts = area().map(|(area, database)| routing::shards(area, Some(database)));
    let rows: Vec<_> = counts
        .unwrap_or_default()
        .into_iter()
        .map(|count| {
            let wait_ms = count.waited_ns as f64 / 1e6;
            let (statements, errors) = (bigint(count.statements), bigint(count.errors));
            (shown(count.keyspace), i32::from(count.shard), statements, errors, wait_ms)
        })
        .collect();
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
fn stats_info() -> TableIterator<
    'static,
    (
        name!(fanout_queries, i32),
        name!(fanout_queries_max, i32),
        name!(fanout_queries_evicted, i64),
        name!(statements_uncounted, i64),
        name!(fanout_queries_since, Option<TimestampWithTimeZone>),
        name!(routing_since, Option<TimestampWithTimeZone>),
    ),
> {
    let row = area().map(|(area, _)| {
        (
            area.used.load(Ordering::Relaxed) as i32,
            area.entries().len() as i32,
            bigint(area.evicted.load(Ordering::Relaxed)),
            bigint(area.uncounted.load(Ordering::Relaxed)),
            timestamp(area.fanout_since.load(Ordering::Relaxed)),
            timestamp(area.routing_since.load(Ordering::Relaxed)),
        )
    });
    TableIterator::new(row)
}

#[pg_extern(sql = false)]
fn stats_reset_fanout_queries() {
    if let Some((area, database)) = area() {
        fanout::reset(area, database, now());
    }
}

#[pg_extern(sql = false)]
fn stats_reset_routing() {
    if let Some((area, database)) = area() {
        routing::reset(area, database, now());
    }
}
