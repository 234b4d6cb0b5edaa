//! The SQL side of what is known of replicas: what `sql/lag.sql` builds its views on.
//!
//! What always holds: they read shared memory and ask nobody; a server that is not watched has no row; what is old is shown as unknown.

#![allow(clippy::type_complexity)] // the columns of SQL functions

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::iter::TableIterator;
use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::lag::impact::impact;
use shardmap_core::lag::summary::WINDOWS;
use shardmap_core::replica::{Moment, Standing};

use super::{settings, shared};
use crate::pg::clock::moment as now;

fn timestamp(moment: Moment) -> Option<TimestampWithTimeZone> {
    TimestampWithTimeZone::try_from(moment.0).ok()
}

fn seconds(milliseconds: u32) -> f64 {
    f64::from(milliseconds) / 1e3
}

/// Beyond this an observation is old.
fn limit() -> Duration {
    (3 * settings::interval()).max(Duration::from_secs(15))
}

#[pg_extern(sql = false)]
fn replica_observation(
    server: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(sampled_at, Option<TimestampWithTimeZone>),
        name!(state, &'static str),
        name!(reason, Option<&'static str>),
        name!(lag, Option<f64>),
        name!(lag_bytes, Option<i64>),
        name!(replay_lsn, Option<String>),
        name!(receive_lsn, Option<String>),
        name!(timeline, Option<i64>),
        name!(system_identifier, Option<String>),
        name!(receiver, Option<&'static str>),
        name!(replay_paused, Option<bool>),
        name!(round_trip, Option<f64>),
    ),
> {
    let row = shared::observation(server).map(|observation| {
        let observation = observation.at(now(), limit());
        let (state, reason, lag) = match observation.standing {
            Standing::Primary => ("primary", None, None),
            Standing::Replica { lag } => ("replica", None, Some(lag.as_secs_f64())),
            Standing::Unknown(why) => ("unknown", Some(why.text()), None),
            Standing::Invalid(why) => ("invalid", Some(why.text()), None),
        };
        (
            timestamp(observation.taken_at),
            state,
            reason,
            lag,
            observation.behind.and_then(|bytes| i64::try_from(bytes).ok()),
            observation.replayed.map(|lsn| lsn.to_string()),
            observation.received.map(|lsn| lsn.to_string()),
            observation.timeline.map(|timeline| timeline.0.into()),
            observation.system.map(|system| system.0.to_string()),
            observation.receiver.map(shardmap_core::replica::Receiver::text),
            observation.paused,
            observation.round_trip.map(|time| time.as_secs_f64() * 1e3),
        )
    });
    TableIterator::new(row)
}

#[pg_extern(sql = false)]
fn replica_windows(
    server: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(window, &'static str),
        name!(samples, i64),
        name!(unknown, i64),
        name!(p50, Option<f64>),
        name!(p90, Option<f64>),
        name!(p99, Option<f64>),
        name!(max, Option<f64>),
    ),
> {
    let figures = shared::summary(server).map(|summary| summary.figures);
    let rows: Vec<_> = WINDOWS
        .into_iter()
        .zip(figures.into_iter().flatten())
        .map(|(window, figures)| {
            // Of unknown samples there are no percentiles.
            let known = |value: u32| (figures.samples > figures.unknown).then_some(seconds(value));
            (
                window,
                figures.samples as i64,
                figures.unknown as i64,
                known(figures.p50),
                known(figures.p90),
                known(figures.p99),
                known(figures.max),
            )
        })
        .collect();
    TableIterator::new(rows)
}

#[pg_extern(sql = false)]
fn replica_summary(
    server: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(shape, &'static str),
        name!(burst_hours, Vec<i32>),
        name!(rotation, &'static str),
        name!(since, Option<TimestampWithTimeZone>),
        name!(why, &'static str),
        name!(alert, &'static str),
        name!(alert_since, Option<TimestampWithTimeZone>),
        name!(early_warning, bool),
        name!(burn_5m, Option<f64>),
        name!(burn_30m, Option<f64>),
        name!(burn_1h, Option<f64>),
        name!(burn_6h, Option<f64>),
        name!(burn_3d, Option<f64>),
        name!(budget_left, Option<f64>),
    ),
> {
    let row = shared::summary(server).map(|summary| {
        let rates = summary.rates;
        (
            summary.shape.text(),
            (0..24).filter(|hour| summary.burst_hours >> hour & 1 == 1).collect(),
            summary.state.rotation.text(),
            timestamp(summary.state.since),
            summary.state.why.text(),
            summary.alert.text(),
            timestamp(summary.alert_since),
            summary.early_warning,
            rates.map(|rates| rates.five_minutes),
            rates.map(|rates| rates.half_hour),
            rates.map(|rates| rates.hour),
            rates.map(|rates| rates.six_hours),
            rates.map(|rates| rates.three_days),
            rates.map(|rates| rates.budget_left()),
        )
    });
    TableIterator::new(row)
}

#[pg_extern(sql = false)]
fn lag_impact_of(
    percentile: i32,
    reads_per_second: f64,
) -> TableIterator<'static, (name!(per_second, f64), name!(per_day, f64))> {
    let impact = impact(u8::try_from(percentile).unwrap_or(100), reads_per_second);
    TableIterator::once((impact.per_second, impact.per_day))
}

/// The counts of reads of a server.
#[pg_extern(sql = false)]
fn read_counts(
    server: pg_sys::Oid,
) -> TableIterator<
    'static,
    (
        name!(reads, i64),
        name!(waited, i64),
        name!(waited_ms, f64),
        name!(waited_in_vain, i64),
        name!(lost, i64),
        name!(fallbacks, i64),
        name!(since, Option<TimestampWithTimeZone>),
    ),
> {
    let row = shared::reads(server).map(|counts| {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed).cast_signed();
        (
            count(&counts.reads),
            count(&counts.waited),
            count(&counts.waited_us) as f64 / 1e3,
            count(&counts.in_vain),
            count(&counts.lost),
            count(&counts.fallbacks),
            timestamp(Moment(counts.since.load(Ordering::Relaxed))),
        )
    });
    TableIterator::new(row)
}

#[pg_extern(sql = false)]
fn reset_stat_reads() {
    shared::reset_reads();
}
