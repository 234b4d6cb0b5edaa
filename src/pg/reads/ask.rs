//! Asking servers where in their logs they are.
//!
//! What always holds: all are asked before the first is waited for; a question costs one round trip and takes part in no
//! transaction; a replica that is waited for is asked again and again (no version from 15 to 18 can be told to wait for an
//! LSN), with growing pauses, and no longer than the limit. Waiting here holds no snapshot there, which would keep it
//! from replaying.

use std::time::{Duration, Instant};

use pgrx::pg_sys::Oid;
use pgrx::PgSqlErrorCode;
use shardmap_core::reads::choice::Heard;
use shardmap_core::reads::position::{holds, Fork, Holds, Lsn, Position, Timeline};
use shardmap_core::reads::token::System;

use super::servers;
use crate::pg::remote::wait::{pause, Patience};
use crate::pg::remote::{answer::Answer, Connection, Failure, Result};

/// Whether it is in recovery; up to where it has replayed, or else written; the timeline, which is known late on a replica,
/// and never too early; the system identifier.
const QUESTION: &str = "SELECT r.r, CASE WHEN r.r THEN pg_catalog.pg_last_wal_replay_lsn() \
      ELSE pg_catalog.pg_current_wal_insert_lsn() END, \
    CASE WHEN r.r THEN greatest((SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()), \
        (SELECT min_recovery_end_timeline FROM pg_catalog.pg_control_recovery())) \
      ELSE ('x' OPERATOR(pg_catalog.||) pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8))\
        ::pg_catalog.bit(32)::pg_catalog.int4 END, \
    (SELECT system_identifier FROM pg_catalog.pg_control_system()) \
    FROM (SELECT pg_catalog.pg_is_in_recovery()) r(r)";
/// How long an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);

/// Connects to a server of a shard. A replica's transactions only read.
///
/// # Errors
/// 42704: the replica was dropped since the session has used it. Those of connecting.
pub fn open(server: Oid, user: Oid, is_replica: bool) -> Result<Connection> {
    if is_replica && !servers::exists(server) {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            "the replica that the transaction has read from was dropped",
        )
        .hint("Repeat the transaction."));
    }
    let connection = Connection::open_server(server, user)?;
    connection.link().remote.reads_only.set(is_replica);
    Ok(connection)
}

/// Asks each server of (server, whether it is a replica) where it is.
pub fn positions(servers: &[(Oid, bool)], user: Oid) -> Vec<Result<Heard>> {
    let send = |(server, is_replica): &(Oid, bool)| {
        let connection = open(*server, user, *is_replica)?;
        connection.link().send_alone(QUESTION.as_bytes())?;
        Ok((connection, Instant::now()))
    };
    let asked: Vec<Result<(Connection, Instant)>> = servers.iter().map(send).collect();
    asked.into_iter().map(|sent| sent.and_then(|(connection, since)| hear(&connection, since))).collect()
}

/// Asks one server.
pub fn position(connection: &Connection) -> Result<Heard> {
    connection.link().send_alone(QUESTION.as_bytes())?;
    hear(connection, Instant::now())
}

/// The answer to a question that was sent alone.
pub fn answer(connection: &Connection) -> Result<Answer> {
    connection.link().finish(&mut Patience::Until(Instant::now() + ANSWER_LIMIT))
}

fn hear(connection: &Connection, since: Instant) -> Result<Heard> {
    let answer = answer(connection)?;
    let text = |column: usize| {
        let value = answer.rows.first().and_then(|row| row.get(column)).and_then(Option::as_deref);
        value.map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
    };
    let read = || {
        let timeline = Timeline(text(2).parse().ok()?);
        // A replica that has not replayed anything yet does not know where it is.
        let lsn = Lsn::parse(&text(1)).unwrap_or_default();
        Some((System::of(text(3).parse().ok()?), Position { timeline, lsn }))
    };
    let (system, position) = read().ok_or_else(|| {
        let message = format!("server \"{}\" does not say where in its log it is", connection.shard());
        Failure::new(PgSqlErrorCode::ERRCODE_FDW_ERROR, message)
    })?;
    let round_trip = Some(since.elapsed());
    Ok(Heard { system, position, in_recovery: text(0) == "t", lag: None, round_trip, age: Duration::ZERO })
}

/// Waits until a replica has replayed up to `wanted`. `None`: it has not in time, or will not.
pub fn wait_for(
    connection: &Connection,
    wanted: Position,
    known: Timeline,
    forks: &[Fork],
    limit: Duration,
) -> Result<Option<Heard>> {
    let deadline = Instant::now() + limit;
    let mut rest = FIRST_PAUSE;
    loop {
        let mut heard = position(connection)?;
        // What was known of its timeline still holds.
        heard.position.timeline = heard.position.timeline.max(known);
        match holds(heard.position, wanted, forks) {
            Holds::All => return Ok(Some(heard)),
            Holds::Lost | Holds::Older => return Ok(None),
            Holds::NotYet => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !heard.in_recovery {
            return Ok(None);
        }
        pause(rest.min(left));
        rest = (rest * 2).min(LONGEST_PAUSE);
    }
}
