//! What is said to a shard when something has gone wrong, or when nobody waits for the answer.
//!
//! What always holds: what a callback at the end of a transaction calls neither fails, nor waits longer than its deadline,
//! nor calls Postgres, for an error may be on its way up; what cannot be said so closes the connection, and the shard
//! rolls back by itself.

use std::time::{Duration, Instant};

use super::failure::Result;
use super::link::{Busy, Link};
use super::wait::{poll_socket, Interest, Patience};
use super::wire::encode::Batch;
use super::wire::Fill;

/// How long an abandoned query may take to end after it was cancelled, before its connection is closed.
const ABANDON_LIMIT: Duration = Duration::from_secs(2);

impl Link {
    /// Sends a clean-up command whose outcome is read later. Whatever goes wrong closes the link. Never fails, so that a
    /// callback may call it.
    pub fn send_quietly(&self, sql: &[u8], deadline: Instant) {
        if self.is_active() {
            self.abandon();
        }
        self.settle_quietly(deadline);
        let mut batch = Batch::default();
        batch.query(sql);
        if self.awaited.get() > 0 || !self.is_open() {
            return self.close();
        }
        self.owing.set(true);
        self.awaited.set(batch.readies);
        self.wire.push(&batch.bytes);
        if !matches!(self.wire.flush(), Ok(true)) {
            self.close();
        }
    }

    /// Sends a command that cannot fail in the middle of a transaction that goes on, without waiting for its outcome.
    pub fn send_owed(&self, sql: &[u8]) -> Result<()> {
        self.send_alone(sql)?;
        self.owing.set(true);
        Ok(())
    }

    /// Sends a statement. The caller reads its answer by [`Link::finish`], or the abort of the transaction does.
    pub fn send_alone(&self, sql: &[u8]) -> Result<()> {
        let mut batch = Batch::default();
        batch.query(sql);
        self.begin(&batch)?.hand_over();
        Ok(())
    }

    /// Reads what a clean-up command left to be read. Its failure closes the link.
    pub fn settle(&self) -> Result<()> {
        if !self.owing.get() {
            return Ok(());
        }
        let busy = Busy::resume(self);
        self.owing.set(false);
        self.finish(&mut Patience::Interruptible).inspect_err(|_| self.close())?;
        drop(busy);
        Ok(())
    }

    /// Reads the outcome of clean-up commands if it comes before `deadline`. An error closes the link. `false`: not yet.
    pub fn settle_quietly(&self, deadline: Instant) -> bool {
        if self.owing.get() && self.read_quietly(deadline, true) {
            self.owing.set(false);
        }
        !self.owing.get()
    }

    /// Lets a portal of an outer level than `level` keep the rows that are on their way: they are wanted after the
    /// savepoint of that level is rolled back.
    pub fn keep_outer_rows(&self, level: i32, deadline: Instant) {
        let portal = self.occupant().filter(|portal| self.is_active() && portal.depth() < level);
        let Some(portal) = portal else { return };
        self.read_with(deadline, |kind, body| {
            portal.take_quietly(kind, body);
            false
        });
    }

    /// Reads to the end of what is awaited, deaf to interrupts. `false`: it has not all come. Calls no function of
    /// Postgres.
    fn read_quietly(&self, deadline: Instant, close_on_error: bool) -> bool {
        self.read_with(deadline, |kind, _| close_on_error && kind == b'E')
    }

    /// As [`Link::read_quietly`], showing each message; the link is closed when `closes` says so.
    fn read_with(&self, deadline: Instant, mut closes: impl FnMut(u8, &mut Vec<u8>) -> bool) -> bool {
        let mut body = Vec::new();
        while self.awaited.get() > 0 && self.is_open() {
            match self.wire.take(&mut body) {
                Ok(Some(kind)) => {
                    if kind == b'Z' {
                        self.at_ready(&body);
                    }
                    if closes(kind, &mut body) {
                        self.close();
                    }
                }
                Err(_) => self.close(),
                Ok(None) => match self.wire.fill() {
                    Fill::Some => {}
                    Fill::End => self.close(),
                    Fill::Nothing => {
                        let sent = self.wire.flush().unwrap_or(true);
                        let interest = if sent { Interest::Read } else { Interest::ReadOrWrite };
                        if !poll_socket(self.wire.socket(), interest, deadline) {
                            return false;
                        }
                    }
                },
            }
        }
        true
    }

    /// Ends a conversation in the middle: cancels the shard's query and reads to its end, or closes the link. Calls no
    /// function of Postgres, for an error may be on its way up.
    pub fn abandon(&self) {
        abandon(&[self]);
    }

    /// What is under way has to end.
    fn is_awaited(&self) -> bool {
        self.is_open() && self.awaited.get() > 0
    }

    /// Makes way for a cancel.
    fn give_up(&self, pause: Duration) {
        if let Some(occupant) = self.vacate() {
            occupant.forsake();
        }
        if self.copying.get() && self.awaited.get() > 0 {
            // While a shard waits for rows it takes no notice of a cancel.
            let mut batch = Batch::default();
            batch.copy_fail(b"the statement was given up");
            self.wire.push(&batch.bytes);
            self.read_quietly(Instant::now() + pause, false);
        }
    }
}

/// As [`Link::abandon`], for several conversations: all shards are told before the first is waited for.
pub fn abandon(links: &[&Link]) {
    let deadline = Instant::now() + ABANDON_LIMIT;
    let mut pause = Duration::from_millis(50);
    links.iter().for_each(|link| link.give_up(pause));
    // One request is not enough: a shard that has not yet begun with the statement takes no notice of it.
    while links.iter().any(|link| link.is_awaited()) && Instant::now() < deadline {
        let busy = || links.iter().filter(|link| link.is_awaited());
        let requests: Vec<_> = busy().map(|link| link.conn().start_cancel()).collect();
        requests.into_iter().for_each(|request| request.wait(deadline.saturating_duration_since(Instant::now())));
        let until = (Instant::now() + pause).min(deadline);
        busy().for_each(|link| {
            link.read_quietly(until, false);
        });
        pause *= 2;
    }
    links.iter().filter(|link| link.awaited.get() > 0).for_each(|link| link.close());
}
