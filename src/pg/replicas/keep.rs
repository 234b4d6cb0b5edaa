//! What outlives the sampler: finished minutes, where primaries were and where their logs forked, in tables; and changes of state,
//! as notifications.
//!
//! What always holds: minutes older than the retention go; writing waits for no standby of the coordinator.

use std::time::Duration;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::lag::forks::Forks;
use shardmap_core::lag::history::Kept;
use shardmap_core::lag::tracker::Minute;
use shardmap_core::reads::position::Fork;
use shardmap_core::replica::{Lsn, Moment, SystemIdentifier, Timeline};

/// The channel of notifications.
pub const CHANNEL: &str = "shardmap_alerts";
/// As far back as budgets and windows reach.
const REACH: Duration = Duration::from_secs(3 * 86_400);

const INSERT: &str = "INSERT INTO shardmap._lag_minute (replica, minute, samples, unknown, p50_ms, p90_ms, p99_ms, max_ms, lag_ms, times, watched_ms) \
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11 \
    WHERE EXISTS (SELECT FROM shardmap.replica r WHERE r.name OPERATOR(pg_catalog.=) $1) ON CONFLICT DO NOTHING";
const SELECT: &str =
    "SELECT m.minute, m.unknown, m.max_ms, m.lag_ms, m.times, m.watched_ms FROM shardmap._lag_minute m \
    WHERE m.replica OPERATOR(pg_catalog.=) $1 AND m.minute OPERATOR(pg_catalog.>=) $2 ORDER BY m.minute";
/// Lag is known as far back as primaries' places are.
const PLACES_REACH: Duration = Duration::from_secs(86_400);
const INSERT_PLACE: &str = "INSERT INTO shardmap._primary_place (shard, at, system_identifier, timeline, lsn) \
    SELECT $1, $2, $3, $4, $5 WHERE EXISTS (SELECT FROM shardmap.shard s WHERE s.name OPERATOR(pg_catalog.=) $1) \
    ON CONFLICT DO NOTHING";
const SELECT_PLACES: &str = "SELECT p.at, p.system_identifier, p.timeline, p.lsn FROM shardmap._primary_place p \
    WHERE p.shard OPERATOR(pg_catalog.=) $1 AND p.at OPERATOR(pg_catalog.>=) $2 ORDER BY p.at";
const DELETE_PLACES: &str = "DELETE FROM shardmap._primary_place p WHERE p.at OPERATOR(pg_catalog.<) $1 \
    OR NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.name OPERATOR(pg_catalog.=) p.shard)";
const INSERT_FORK: &str = "INSERT INTO shardmap._fork AS f (shard, system_identifier, timeline, parent, at) \
    SELECT $1, $2, $3, $4, $5 WHERE EXISTS (SELECT FROM shardmap.shard s WHERE s.name OPERATOR(pg_catalog.=) $1) \
    ON CONFLICT ON CONSTRAINT _fork_pkey DO UPDATE SET parent = $4, at = $5";
const SELECT_FORKS: &str = "SELECT f.system_identifier, f.timeline, f.parent, f.at FROM shardmap._fork f \
    WHERE f.shard OPERATOR(pg_catalog.=) $1 ORDER BY f.timeline";
const DELETE_FORKS: &str = "DELETE FROM shardmap._fork f \
    WHERE NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.name OPERATOR(pg_catalog.=) f.shard)";
const DELETE: &str = "DELETE FROM shardmap._lag_minute m WHERE m.minute OPERATOR(pg_catalog.<) $1 \
    OR NOT EXISTS (SELECT FROM shardmap.replica r WHERE r.name OPERATOR(pg_catalog.=) m.replica)";

fn timestamp(moment: Moment) -> TimestampWithTimeZone {
    TimestampWithTimeZone::try_from(moment.0).unwrap_or(TimestampWithTimeZone::positive_infinity())
}

fn minute_start(minute: &Minute) -> Moment {
    Moment(minute.number.saturating_mul(60_000_000))
}

/// Writes minutes of replicas. In a transaction with a snapshot, like all below.
pub fn write(minutes: &[(String, Minute)]) -> spi::Result<()> {
    for (replica, minute) in minutes {
        let quantile = |share: f64| minute.quantile(share).map(i64::from);
        let lags: Vec<i64> = minute.counts.iter().map(|count| count.0.into()).collect();
        let times: Vec<i64> = minute.counts.iter().map(|count| count.1.into()).collect();
        let samples = minute.known() + u64::from(minute.unknown);
        Spi::run_with_args(
            INSERT,
            &[
                replica.as_str().into(),
                timestamp(minute_start(minute)).into(),
                (samples as i64).into(),
                i64::from(minute.unknown).into(),
                quantile(0.5).into(),
                quantile(0.9).into(),
                quantile(0.99).into(),
                (!minute.counts.is_empty()).then_some(i64::from(minute.max)).into(),
                lags.into(),
                times.into(),
                i64::from(minute.watched).into(),
            ],
        )?;
    }
    Ok(())
}

/// The minutes of a replica as far back as they count.
pub fn read(replica: &str, now: Moment) -> spi::Result<Vec<Minute>> {
    let small = |value: i64| u32::try_from(value).unwrap_or(u32::MAX);
    Spi::connect(|client| {
        let mut minutes = Vec::new();
        for row in client.select(SELECT, None, &[replica.into(), timestamp(now.minus(REACH)).into()])? {
            let Some(at) = row.get::<TimestampWithTimeZone>(1)? else { continue };
            let lags = row.get::<Vec<i64>>(4)?.unwrap_or_default();
            let times = row.get::<Vec<i64>>(5)?.unwrap_or_default();
            minutes.push(Minute {
                number: pg_sys::TimestampTz::from(at).div_euclid(60_000_000),
                counts: lags.into_iter().zip(times).map(|(lag, times)| (small(lag), small(times))).collect(),
                unknown: row.get::<i64>(2)?.map_or(0, small),
                max: row.get::<i64>(3)?.map_or(0, small),
                watched: row.get::<i64>(6)?.map_or(0, small),
            });
        }
        Ok(minutes)
    })
}

/// Deletes what is older than the retention, and what is of replicas that are gone.
pub fn clean(now: Moment, retention: Duration) -> spi::Result<()> {
    Spi::run_with_args(DELETE, &[timestamp(now.minus(retention)).into()])?;
    Spi::run_with_args(DELETE_PLACES, &[timestamp(now.minus(PLACES_REACH)).into()])?;
    Spi::run_with_args(DELETE_FORKS, &[])
}

/// Writes where primaries were.
pub fn write_places(places: &[(String, Kept)]) -> spi::Result<()> {
    for (shard, place) in places {
        let (system, lsn) = (place.system.0.cast_signed(), place.lsn.0.cast_signed());
        let (at, timeline) = (timestamp(place.at), i64::from(place.timeline.0));
        Spi::run_with_args(
            INSERT_PLACE,
            &[shard.as_str().into(), at.into(), system.into(), timeline.into(), lsn.into()],
        )?;
    }
    Ok(())
}

/// Where the primary of a shard was, as far back as it matters, oldest first.
pub fn places(shard: &str, now: Moment) -> spi::Result<Vec<Kept>> {
    Spi::connect(|client| {
        let mut places = Vec::new();
        for row in client.select(SELECT_PLACES, None, &[shard.into(), timestamp(now.minus(PLACES_REACH)).into()])? {
            let Some(at) = row.get::<TimestampWithTimeZone>(1)? else { continue };
            places.push(Kept {
                at: Moment(pg_sys::TimestampTz::from(at)),
                system: SystemIdentifier(row.get::<i64>(2)?.unwrap_or(0).cast_unsigned()),
                timeline: timeline(row.get(3)?),
                lsn: Lsn(row.get::<i64>(4)?.unwrap_or(0).cast_unsigned()),
            });
        }
        Ok(places)
    })
}

fn timeline(value: Option<i64>) -> Timeline {
    Timeline(value.and_then(|value| u32::try_from(value).ok()).unwrap_or(0))
}

/// Writes the forks of shards' logs.
pub fn write_forks(forks: &[(String, Forks)]) -> spi::Result<()> {
    for (shard, forks) in forks {
        for fork in forks.list() {
            let timelines = [fork.to, fork.from].map(|timeline| i64::from(timeline.0));
            let system = forks.system.0.cast_signed();
            let values = [system, timelines[0], timelines[1], fork.at.0.cast_signed()];
            let [system, to, from, at] = values.map(Into::into);
            Spi::run_with_args(INSERT_FORK, &[shard.as_str().into(), system, to, from, at])?;
        }
    }
    Ok(())
}

/// The forks of a shard's logs.
pub fn forks(shard: &str) -> spi::Result<Vec<(SystemIdentifier, Fork)>> {
    Spi::connect(|client| {
        let mut forks = Vec::new();
        for row in client.select(SELECT_FORKS, None, &[shard.into()])? {
            let number = |at: usize| row.get::<i64>(at).map(|value| value.unwrap_or(0).cast_unsigned());
            let fork = Fork { from: timeline(row.get(3)?), to: timeline(row.get(2)?), at: Lsn(number(4)?) };
            forks.push((SystemIdentifier(number(1)?), fork));
        }
        Ok(forks)
    })
}

/// Tells whoever listens.
pub fn notify(payloads: &[String]) -> spi::Result<()> {
    for payload in payloads {
        Spi::run_with_args("SELECT pg_catalog.pg_notify($1, $2)", &[CHANNEL.into(), payload.as_str().into()])?;
    }
    Ok(())
}
