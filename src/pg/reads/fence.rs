//! Keeps writes from a former primary that lives on after one of its replicas was promoted.
//!
//! Decides by timelines: a primary on an older one than a replica of it is a former one. What always holds: what was heard
//! makes suspicious at most; before a write is refused the server itself is asked, on the connection that would write. (A
//! server in recovery refuses writes by itself.)

use pgrx::pg_sys::Oid;
use pgrx::PgSqlErrorCode;
use shardmap_core::reads::choice::Heard;

use super::{ask, servers};
use crate::pg::remote::{Failure, Result};

/// Makes sure that the shard's primary is not known to be a former one.
///
/// # Errors
/// 55000: it is.
pub fn check(shard: Oid, user: Oid) -> Result<()> {
    let Some((replica, newest)) = newest(shard) else { return Ok(()) };
    let is_former = |heard: Heard| {
        heard.system == newest.system && !heard.in_recovery && heard.position.timeline < newest.position.timeline
    };
    if !servers::heard(shard).is_some_and(is_former) {
        return Ok(());
    }
    let own = ask::position(&ask::open(shard, user, false)?)?;
    servers::note_heard(shard, own);
    if !is_former(own) {
        return Ok(());
    }
    let shard = servers::name(shard);
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot write to shard \"{shard}\": its server is a former primary"),
    )
    .detail(format!(
        "It is on timeline {}, replica \"{}\" on timeline {}.",
        own.position.timeline.0,
        servers::name(replica),
        newest.position.timeline.0
    ))
    .hint(format!(
        "Stop that server. Let the foreign server \"{shard}\" lead to the new primary: ALTER SERVER .. OPTIONS (SET host .., SET port ..)."
    )))
}

/// The replica that was last heard of on the newest timeline.
fn newest(shard: Oid) -> Option<(Oid, Heard)> {
    let replicas = servers::replicas_heard(shard);
    let recent = replicas.into_iter().filter(|(_, heard)| heard.age <= servers::heard_within());
    recent.max_by_key(|(_, heard)| heard.position.timeline)
}
