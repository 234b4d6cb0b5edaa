//! Connections to several shards made at the same time, for a statement that will ask them all.
//!
//! What always holds: a shard that is connected already is left alone; one without a free place is left for later, when its
//! turn comes to wait for one; a shard that cannot be reached fails the statement, as it would in its turn.

use std::rc::Rc;

use pgrx::pg_sys;

use super::admit;
use super::dial::Dial;
use super::failure::Result;
use super::link::Link;
use super::pool;
use super::target::{Session, Target};
use super::wait::wait_any;

/// Connects to the `wanted` shards, each for a user, that this backend has no connection to.
///
/// # Errors
/// Those of [`super::Connection::open_server`], except for want of a place.
pub fn connect_ahead(wanted: &[(pg_sys::Oid, pg_sys::Oid)]) -> Result<()> {
    let mut missing: Vec<Rc<Target>> = Vec::new();
    for (server, user) in wanted {
        let target = pool::target_of(*server, *user)?;
        if !pool::has_link(&target) && !missing.iter().any(|other| other.same_place(&target)) {
            missing.push(target);
        }
    }
    if missing.len() < 2 {
        return Ok(());
    }
    let session = Session::like_ours();
    let generation = pool::generation();
    let mut dials: Vec<(Rc<Target>, Dial)> = Vec::new();
    for target in missing {
        match admit::start(&target, &session, false) {
            Ok(dial) => dials.extend(dial.map(|dial| (target, dial))),
            Err(failure) if admit::is_full(&failure) => {}
            Err(failure) => return Err(failure),
        }
    }
    while !dials.is_empty() {
        let sockets: Vec<_> = dials.iter().map(|(_, dial)| dial.waits_for()).collect();
        wait_any(&sockets, dials.iter().filter_map(|(_, dial)| dial.time_left()).min());
        let mut waiting = Vec::new();
        for (target, mut dial) in dials {
            match if dial.is_ready() { dial.step() } else { Ok(false) } {
                Ok(false) => waiting.push((target, dial)),
                Ok(true) => pool::keep(Link::over(dial.into_conn(), target, true, generation)?),
                Err(failure) if admit::is_full(&failure) => {}
                Err(failure) => return Err(failure),
            }
        }
        dials = waiting;
    }
    Ok(())
}
