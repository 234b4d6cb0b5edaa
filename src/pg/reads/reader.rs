//! A connection for one statement's read of one shard, which moves on to another server when its replica is lost.
//!
//! What always holds: it moves once, before a row has come back, and never under REPEATABLE READ after the transaction
//! has read from the shard; a primary is never moved away from. What a replica alone refuses (it replays what the statement
//! needs, it is shutting down, the statement writes after all, a new column has not come there yet) counts as a loss.

use pgrx::pg_sys::{self, Oid};

use super::route::{self, Chosen, Demand, NOT_ONLY_READ};
use super::{count, fence, servers, session};
use crate::pg::remote::failure::SqlState;
use crate::pg::remote::transaction::give_up;
use crate::pg::remote::{Connection, Failure, Result};

pub struct Reader {
    shard: Oid,
    user: Oid,
    /// The one in use.
    pub connection: Connection,
    server: Oid,
    pub reason: &'static str,
    may_move: bool,
}

/// SQLSTATEs of a replica that say nothing about the statement: a conflict with its replay, a deadlock with that, and a
/// server that starts, stops or has no room.
const REPLICA_ALONE: [&str; 6] = ["40001", "40P01", "57P01", "57P02", "57P03", "53300"];

/// Whether the primary may know better, and no other replica: the statement would write after all, or names what has not
/// come to the replica yet.
fn is_for_primary(failure: &Failure) -> bool {
    let code = failure.code.text();
    code == "25006" || code == "0A000" || code.starts_with("42") || code == "3F000"
}

impl Reader {
    /// Connects to the server that is to answer. `may_use_replica`: the statement only reads, and locks nothing.
    ///
    /// # Safety
    /// Inside a transaction.
    pub unsafe fn open(shard: Oid, user: Oid, may_use_replica: bool) -> Result<Self> {
        if !may_use_replica {
            return Self::of_primary(shard, user, NOT_ONLY_READ);
        }
        let obstacle = if route::is_on() { route::obstacle() } else { Some("") };
        if let Some(obstacle) = obstacle {
            count::primary(shard);
            return Self::of_primary(shard, user, obstacle);
        }
        let is_first = session::pinned(shard).is_none();
        let repeatable = pg_sys::XactIsoLevel as u32 == pg_sys::XACT_REPEATABLE_READ;
        Self::pick(shard, user, is_first || !repeatable)
    }

    fn of_primary(shard: Oid, user: Oid, reason: &'static str) -> Result<Self> {
        let connection = fence::primary(shard, user)?;
        session::note_read(shard, shard, &connection);
        Ok(Self { shard, user, connection, server: shard, reason, may_move: false })
    }

    fn pick(shard: Oid, user: Oid, may_move: bool) -> Result<Self> {
        let chosen = route::pick(shard, user, &Demand::of_settings()?)?;
        count::chosen(&chosen);
        let Chosen { server, connection, reason, .. } = chosen;
        session::note_read(shard, server, &connection);
        Ok(Self { shard, user, connection, server, reason, may_move })
    }

    /// The shard's server, its primary.
    pub fn shard(&self) -> Oid {
        self.shard
    }

    pub fn is_replica(&self) -> bool {
        self.server != self.shard
    }

    /// After `failure`, and before any row: `Ok` if the statement is to be sent again, on [`Reader::connection`].
    ///
    /// # Errors
    /// `failure`, if there is nowhere else to go.
    pub fn move_on(&mut self, failure: Failure) -> Result<()> {
        let link = self.connection.link();
        let is_for_primary = is_for_primary(&failure);
        let is_alone = is_for_primary || REPLICA_ALONE.iter().any(|code| SqlState::parse(code) == failure.code);
        if !self.is_replica() || !self.may_move || (link.is_open() && !is_alone) {
            return Err(failure);
        }
        give_up(link);
        session::unpin(self.shard);
        count::moved(self.server, is_for_primary.then_some(self.shard));
        *self = match is_for_primary {
            true => Self::of_primary(self.shard, self.user, "the replica could not run it")?,
            false => {
                servers::note_lost(self.server);
                Self::pick(self.shard, self.user, false)?
            }
        };
        Ok(())
    }
}
