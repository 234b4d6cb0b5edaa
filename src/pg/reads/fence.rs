//! Keeps writes and reads from a former primary that lives on after one of its replicas was promoted, and reads that must not miss
//! something from a server in recovery that stands in the primary's place.
//!
//! Decides by timelines: a primary on an older one than a server of its shard is a former one. What always holds: what was heard
//! makes suspicious at most; before a statement is refused the server itself is asked, on the connection that would be used; each
//! connection is asked once at most, and none where there has never been a failover. One that leads to a former primary is made
//! anew once, as a list of hosts may lead elsewhere by now. (A server in recovery refuses writes by itself; that it is in recovery it
//! says when it is connected to.)

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys::Oid;
use pgrx::PgSqlErrorCode;
use shardmap_core::reads::choice::Heard;
use shardmap_core::reads::position::Timeline;
use shardmap_core::reads::token::System;

use super::settings::{Consistency, CONSISTENCY};
use super::{ask, servers};
use crate::pg::remote::{Connection, Failure, Result};

/// Timelines begin with this one.
pub const FIRST: Timeline = Timeline(1);

thread_local! {
    /// By shard and user: the connection that was asked last, and whose log on which timeline its server wrote.
    static KNOWN: RefCell<HashMap<(Oid, Oid), (u64, System, Timeline)>> = RefCell::default();
}

/// Makes sure that the shard's primary is not known to be a former one.
///
/// # Errors
/// 55000: it is.
pub fn check(shard: Oid, user: Oid) -> Result<()> {
    let Some((newest, on)) = newest(shard) else { return Ok(()) };
    let is_former = |heard: Heard| {
        heard.system == on.system && !heard.in_recovery && heard.position.timeline < on.position.timeline
    };
    let is_suspect = servers::heard(shard).is_some_and(is_former);
    if on.position.timeline <= FIRST && !is_suspect {
        return Ok(());
    }
    let connection = ask::open(shard, user, false)?;
    let is_fine = |(system, timeline)| system != on.system || timeline >= on.position.timeline;
    // A pooler may have led the connection to another server since.
    let is_known = !is_suspect || connection.link().target.pooler.keeps_session();
    if is_known && known(&connection, shard, user).is_some_and(is_fine) {
        return Ok(());
    }
    let own = ask_again(connection, shard, user, |own| !is_former(own))?.1;
    if !is_former(own) {
        return Ok(());
    }
    let by_mistake = match newest == shard {
        true => String::new(),
        false => {
            format!(" If \"{}\" was promoted by mistake, drop it: shardmap.drop_replica().", servers::name(newest))
        }
    };
    let shard = servers::name(shard);
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot use shard \"{shard}\": its server is a former primary"),
    )
    .detail(format!(
        "It is on timeline {}, \"{}\" on timeline {}.",
        own.position.timeline.0,
        servers::name(newest),
        on.position.timeline.0
    ))
    .hint(format!(
        "Stop that server. Let the foreign server \"{shard}\" lead to the new primary: ALTER SERVER .. OPTIONS (SET host .., SET port ..).{by_mistake}"
    )))
}

/// The connection for a read from the shard's primary.
///
/// # Errors
/// 55000: the server is a former primary, or a server in recovery where that may show less than the session has seen. Those of connecting.
pub fn primary(shard: Oid, user: Oid) -> Result<Connection> {
    check(shard, user)?;
    let connection = ask::open(shard, user, false)?;
    let is_suspect = connection.link().conn().is_in_recovery() && known(&connection, shard, user).is_none();
    if !is_suspect || CONSISTENCY.get() == Consistency::Eventual || !servers::has_replicas(shard) {
        return Ok(connection);
    }
    // It may have been promoted since it was connected to, and a pooler may say what was true once.
    let (connection, heard) = ask_again(connection, shard, user, |heard| !heard.in_recovery)?;
    if !heard.in_recovery {
        return Ok(connection);
    }
    let shard = servers::name(shard);
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("server of shard \"{shard}\" is not a primary"),
    )
    .detail("It is in recovery, and may not have what the session has written or seen.")
    .hint(format!(
        "Let the foreign server \"{shard}\" lead to the primary: target_session_attrs 'read-write' finds it among several hosts. \
         Or SET shardmap.consistency = 'eventual'."
    )))
}

/// Whose log on which timeline the server behind a primary's connection writes, if it was asked.
pub fn known(connection: &Connection, shard: Oid, user: Oid) -> Option<(System, Timeline)> {
    let number = connection.link().number;
    let of = KNOWN.with_borrow(|known| known.get(&(shard, user)).copied());
    of.filter(|(own, ..)| *own == number).map(|(_, system, timeline)| (system, timeline))
}

/// Asks a primary where it is, and connects anew once if it is not `right`; the connection to be used, and what it said.
///
/// # Errors
/// Those of asking and connecting.
pub fn ask_again(
    mut connection: Connection,
    shard: Oid,
    user: Oid,
    right: impl Fn(Heard) -> bool,
) -> Result<(Connection, Heard)> {
    let mut heard = ask::position(&connection)?;
    if !right(heard) && !connection.link().in_transaction() {
        connection.link().close();
        connection = ask::open(shard, user, false)?;
        heard = ask::position(&connection)?;
    }
    servers::note_heard(shard, heard);
    // In recovery it is about to write another timeline, if it ever does.
    if !heard.in_recovery {
        let seen = (connection.link().number, heard.system, heard.position.timeline);
        KNOWN.with_borrow_mut(|known| known.insert((shard, user), seen));
    }
    Ok((connection, heard))
}

/// The server of the shard that was last heard of on the newest timeline; a replica, if one is among them: what the shard's
/// own server leads to may have changed since.
fn newest(shard: Oid) -> Option<(Oid, Heard)> {
    let primary = servers::heard(shard).map(|heard| (shard, heard));
    // Of equals the last is taken.
    let servers = primary.into_iter().chain(servers::replicas_heard(shard));
    let recent = servers.filter(|(_, heard)| heard.age <= servers::heard_within());
    recent.max_by_key(|(_, heard)| heard.position.timeline)
}
