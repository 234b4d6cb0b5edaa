//! Whether one more connection may be made to a shard, and the wait until it may.
//!
//! Decides what a session does that finds all places taken, or the shard itself full: it closes connections of its own
//! that it does not need, waits for others to do so, and gives up after `shardmap.connection_wait`. What always holds: the
//! wait is interruptible and bounded, so that two sessions which hold what the other one waits for both go on, by an
//! error at the latest; who waits gives up what others wait for, unless its own transaction needs it. A background
//! worker, which finishes what sessions left, is not counted and does not wait.
//! Refuses with 53300. Read next: `slots` for the count, `pool` for what a session can do without.

use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::dial::Dial;
use super::failure::{Failure, Result, SqlState};
use super::libpq::Conn;
use super::pool;
use super::slots::{self, Asked, Full, Slot, Waiting};
use super::target::{Session, Target};
use crate::pg::settings::{CONNECTION_WAIT, MAX_CONNECTIONS_PER_SHARD};

/// Things are looked at anew after this long, though nobody has said that they have changed.
const SLICE: Duration = Duration::from_millis(100);

/// Why there is no connection yet.
enum Obstacle {
    Limit(Full),
    /// The shard has refused it.
    Shard(Failure),
}

/// Connects, as soon as there is a place for it.
///
/// # Errors
/// 53300: there was none in time. Those of [`Dial`].
pub fn connect(target: &Rc<Target>, session: &Session) -> Result<Conn> {
    let mut wait = Wait::new(target);
    loop {
        let slot = wait.slot()?;
        match Dial::start(target, session, slot)?.wait() {
            Err(failure) if is_full(&failure) => wait.pause(Obstacle::Shard(failure))?,
            outcome => return outcome,
        }
    }
}

/// Begins to connect. `waits`: for a place; else `None` says that there is none now.
pub fn start(target: &Rc<Target>, session: &Session, waits: bool) -> Result<Option<Dial>> {
    let slot = match waits {
        true => Wait::new(target).slot()?,
        false => match ask(target, None) {
            Asked::Full(_) => return Ok(None),
            Asked::Slot(slot) => Some(slot),
            Asked::Uncounted => None,
        },
    };
    Dial::start(target, session, slot).map(Some)
}

/// Whether the shard has no place for one more.
pub fn is_full(failure: &Failure) -> bool {
    failure.code == SqlState::from(PgSqlErrorCode::ERRCODE_TOO_MANY_CONNECTIONS)
}

fn ask(target: &Target, place: Option<&Waiting>) -> Asked {
    match is_worker() {
        true => Asked::Uncounted,
        false => slots::ask(target.id, MAX_CONNECTIONS_PER_SHARD.get().unsigned_abs(), place),
    }
}

fn is_worker() -> bool {
    // SAFETY: null, or the worker that this process is.
    unsafe { !pg_sys::MyBgworkerEntry.is_null() }
}

/// The wait for one connection.
struct Wait<'a> {
    target: &'a Target,
    deadline: Instant,
    place: Option<Waiting>,
}

impl<'a> Wait<'a> {
    fn new(target: &'a Target) -> Self {
        let limit = Duration::from_millis(CONNECTION_WAIT.get().unsigned_abs().into());
        Self { target, deadline: Instant::now() + limit, place: None }
    }

    /// A place, if they are counted.
    fn slot(&mut self) -> Result<Option<Slot>> {
        loop {
            match ask(self.target, self.place.as_ref()) {
                Asked::Slot(slot) => return Ok(Some(slot)),
                Asked::Uncounted => return Ok(None),
                Asked::Full(full) => self.pause(Obstacle::Limit(full))?,
            }
        }
    }

    /// Makes room if it can, and else waits a little.
    fn pause(&mut self, obstacle: Obstacle) -> Result<()> {
        let any = matches!(obstacle, Obstacle::Shard(_));
        if pool::make_room(self.target.id, any) {
            return Ok(());
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let alone = matches!(&obstacle, Obstacle::Limit(full) if full.is_mine());
        if left.is_zero() || alone || is_worker() {
            return Err(self.refused(obstacle));
        }
        self.place.get_or_insert_with(|| Waiting::begin(self.target.id)).wait(left.min(SLICE));
        Ok(())
    }

    fn refused(&self, obstacle: Obstacle) -> Failure {
        let place = &self.target.place;
        let failure = |message| Failure::new(PgSqlErrorCode::ERRCODE_TOO_MANY_CONNECTIONS, message);
        match obstacle {
            Obstacle::Limit(full) if full.is_mine() => {
                failure(format!("too many connections to {place}"))
                    .detail(format!("This session alone holds {}, as many as shardmap.max_connections_per_shard allows.", full.mine))
                    .hint("Raise shardmap.max_connections_per_shard.")
            }
            Obstacle::Limit(Full { held, .. }) => failure(format!("too many connections to {place}"))
                .detail(format!(
                    "All sessions together hold {held}, as many as shardmap.max_connections_per_shard allows, and none \
                     was free within {} ms (shardmap.connection_wait).",
                    CONNECTION_WAIT.get()
                ))
                .hint(
                    "Repeat the transaction; run fewer of them at a time, with a pooler before the coordinator say; or \
                     raise shardmap.max_connections_per_shard.",
                ),
            Obstacle::Shard(said) => failure(format!("{place} takes no more connections"))
                .detail(said.detail.unwrap_or_default())
                .hint(
                    "Set shardmap.max_connections_per_shard so that all coordinators together stay below the shard's \
                     max_connections, and its users' CONNECTION LIMIT; or raise those.",
                ),
        }
        .at(place)
    }
}
