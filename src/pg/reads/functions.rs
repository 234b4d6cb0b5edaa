//! The SQL functions on tokens and on the choice of a server. Read next: `sql/reads.sql`.

use std::ffi::CString;
use std::rc::Rc;
use std::time::Duration;

use pgrx::iter::TableIterator;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use shardmap_core::reads::choice::Preference;
use shardmap_core::reads::token::{Mark, ReadToken};

use super::route::{self, Demand, Which};
use super::settings::{self, no_token, Consistency, CONSISTENCY};
use super::{ask, doubt, servers, session};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::remote::Result;

/// Raises what went wrong. (What a shard said of its objects is of no use here.)
fn or_raise<T>(outcome: Result<T>) -> T {
    outcome.unwrap_or_else(|failure| Refusal::from(failure).raise())
}

fn user() -> Oid {
    // SAFETY: reads a variable of the session.
    unsafe { pg_sys::GetUserId() }
}

/// The token as text; `None` if it asks for nothing.
fn text(token: &ReadToken) -> Option<String> {
    if token.is_empty() {
        return None;
    }
    Some(token.encode().unwrap_or_else(|error| no_token(error).raise()))
}

/// What the session has written, or written and seen, its positions asked for where they are not known.
fn of_session(which: &[Which]) -> Result<ReadToken> {
    doubt::check(user())?;
    let mut shards = session::shards();
    // A shard may have been dropped since.
    shards.retain(|shard| servers::exists(*shard));
    route::resolve(&shards, user(), which)?;
    let mut token = ReadToken::new(settings::cluster());
    for shard in shards {
        let mut past = session::past(shard);
        for which in which {
            if let Some(mark) = which.of(&mut past).mark {
                token.raise(route::print(shard), mark);
            }
        }
    }
    Ok(token)
}

#[pg_extern(sql = false)]
fn unconfirmed_shard() -> Option<String> {
    or_raise(doubt::find(user())).map(|shard| servers::name(shard).to_string())
}

#[pg_extern(sql = false)]
fn write_token() -> Option<String> {
    text(&or_raise(of_session(&[Which::Written])))
}

#[pg_extern(sql = false)]
fn session_token() -> Option<String> {
    let mut token = or_raise(of_session(&[Which::Written, Which::Seen]));
    session::observed().iter().for_each(|observed| token.merge(observed));
    text(&token)
}

#[pg_extern(sql = false)]
fn observe(token: &[u8]) {
    let token = CString::new(token).unwrap_or_default();
    let token =
        if token.is_empty() { None } else { Some(settings::decode(&token).unwrap_or_else(|error| error.raise())) };
    token.iter().for_each(session::observe);
}

#[pg_extern(sql = false)]
fn merge_tokens(tokens: pgrx::Array<'_, &[u8]>) -> Option<String> {
    let mut merged = ReadToken::new(settings::cluster());
    for token in tokens.iter().flatten().filter(|token| !token.is_empty()) {
        let token = CString::new(token).unwrap_or_default();
        merged.merge(&settings::decode(&token).unwrap_or_else(|error| error.raise()));
    }
    text(&merged)
}

/// Where the primaries of these shards are now.
#[pg_extern(sql = false)]
fn current_token(shards: pgrx::Array<'_, &[u8]>) -> Option<String> {
    let mut shards: Vec<Oid> = shards.iter().flatten().map(shard).collect();
    shards.sort_unstable_by_key(|shard| shard.to_u32());
    shards.dedup();
    let servers: Vec<_> = shards.iter().map(|shard| (*shard, false)).collect();
    let mut token = ReadToken::new(settings::cluster());
    for (shard, answer) in shards.into_iter().zip(ask::positions(&servers, user())) {
        let heard = or_raise(answer);
        token.raise(route::print(shard), Mark { system: heard.system, position: heard.position });
    }
    text(&token)
}

/// The server of a shard's name.
fn shard(shard: &[u8]) -> Oid {
    let text = CString::new(shard).unwrap_or_default();
    // SAFETY: a system cache look-up.
    let server = unsafe { pg_sys::get_foreign_server_oid(text.as_ptr(), true) };
    if server == pg_sys::InvalidOid {
        let message = format!("shard \"{}\" does not exist", encoding::utf8(shard));
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message)
            .hint("The view shardmap.shards lists the shards.")
            .raise()
    }
    server
}

/// The server for a read of the shard: its name, role, lag in seconds, why it, seconds waited for it, and what was found
/// about each candidate.
#[pg_extern(sql = false)]
fn choose_replica(
    shard_name: Option<&[u8]>,
    max_lag: Option<f64>,
    token: Option<&[u8]>,
) -> TableIterator<
    'static,
    (
        name!(server, String),
        name!(role, String),
        name!(lag, Option<f64>),
        name!(reason, String),
        name!(waited, f64),
        name!(considered, Vec<String>),
    ),
> {
    let Some(shard_name) = shard_name else { return TableIterator::empty() };
    let shard = shard(shard_name);
    let mut demand = or_raise(Demand::of_settings());
    if demand.preference == Preference::Primary {
        demand.preference = Preference::PreferReplica;
    }
    if let Some(seconds) = max_lag {
        if seconds < 0.0 {
            Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, "max_lag must not be negative")
                .hint("NULL takes that of shardmap.max_lag.")
                .raise()
        }
        demand.max_lag = Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO));
    }
    if let Some(given) = token.filter(|token| !token.is_empty()) {
        let given = CString::new(given).unwrap_or_default();
        let given = settings::decode(&given).unwrap_or_else(|error| error.raise());
        match (CONSISTENCY.get(), &mut demand.token) {
            (Consistency::Eventual, _) | (_, None) => demand.token = Some(Rc::new(given)),
            (_, Some(own)) => Rc::make_mut(own).merge(&given),
        }
    }
    let chosen = or_raise(route::pick(shard, user(), &demand));
    let considered: Vec<_> = chosen
        .considered
        .iter()
        .map(|(server, verdict)| format!("{}: {}", servers::name(Oid::from(*server)), route::describe(*verdict)))
        .collect();
    let lag = servers::heard(chosen.server).and_then(|heard| heard.lag).map(|lag| lag.as_secs_f64());
    let role = if chosen.is_replica { "replica" } else { "primary" };
    TableIterator::once((
        servers::name(chosen.server),
        role.to_owned(),
        lag,
        chosen.reason.to_owned(),
        chosen.waited.as_secs_f64(),
        considered,
    ))
}
