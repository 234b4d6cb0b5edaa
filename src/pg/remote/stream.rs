//! Rows on their way into one table of a shard, by COPY inside the transaction.
//!
//! What always holds: rows keep their order; memory is bounded, since a shard that is slow makes the writer wait; a shard
//! that took another number of rows than it was sent is an error, and so is every row that it refuses, soon after it
//! has refused it. Something else may be sent on the link at any time: the COPY is ended before, its outcome checked, and
//! another begun with the next row. Rows are written at the nesting level of the transaction at which the stream was made.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use pgrx::PgSqlErrorCode;

use super::carried::Needs;
use super::failure::{Failure, Result};
use super::link::{Busy, Link};
use super::occupant::Occupant;
use super::pool::Connection;
use super::transaction;
use super::wait::Patience;
use super::wire::copy::Format;
use super::wire::decode;
use super::wire::encode::Batch;

/// Sent at once.
const BUFFER: usize = 64 * 1024;

/// What to send, and where.
pub struct Destination {
    /// `COPY ... FROM STDIN`, with the format.
    pub command: Box<[u8]>,
    pub format: Format,
    pub needs: Needs,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// No COPY is under way.
    Idle,
    Copying,
    /// Its end was sent, and its outcome is awaited.
    Ended,
}

pub struct Stream {
    link: Rc<Link>,
    destination: Destination,
    level: i32,
    state: Cell<State>,
    buffer: RefCell<Vec<u8>>,
    /// Of the COPY under way, and of the buffer.
    rows: Cell<u64>,
    /// The shard's count.
    counted: Cell<u64>,
    total: Cell<u64>,
    /// What the shard said in this conversation.
    said: RefCell<Option<Failure>>,
    /// Why there will be no more rows.
    failure: RefCell<Option<Failure>>,
}

impl Stream {
    pub fn new(connection: &Connection, destination: Destination, level: i32) -> Rc<Self> {
        Rc::new(Self {
            link: Rc::clone(connection.link()),
            destination,
            level,
            state: Cell::new(State::Idle),
            buffer: RefCell::default(),
            rows: Cell::new(0),
            counted: Cell::new(0),
            total: Cell::new(0),
            said: RefCell::default(),
            failure: RefCell::default(),
        })
    }

    /// The rows that the shard has confirmed.
    pub fn total(&self) -> u64 {
        self.total.get()
    }

    /// Whether the rows that were added last are in a buffer, or in a COPY that goes on.
    pub fn is_open(&self) -> bool {
        self.rows.get() > 0 && self.state.get() != State::Ended
    }

    /// Adds the row that `write` puts behind the others.
    ///
    /// # Errors
    /// The shard's own for this or an earlier row; 08006 if the connection is lost.
    pub fn row(self: &Rc<Self>, write: impl FnOnce(&mut Vec<u8>, Format)) -> Result<()> {
        if !self.is_open() {
            self.check()?;
            self.finish()?;
            self.link.make_ready()?;
            self.occupy();
        }
        let mut buffer = self.buffer.take();
        if buffer.capacity() == 0 {
            buffer.reserve(BUFFER + BUFFER / 4);
        }
        write(&mut buffer, self.destination.format);
        let is_full = buffer.len() >= BUFFER;
        self.buffer.replace(buffer);
        self.rows.set(self.rows.get() + 1);
        match is_full {
            true => self.noting(|| self.send()),
            false => Ok(()),
        }
    }

    /// Sends the COPY's end, without waiting for its outcome.
    pub fn end(self: &Rc<Self>) -> Result<()> {
        self.check()?;
        if !self.is_open() {
            return Ok(());
        }
        self.noting(|| {
            self.buffer.borrow_mut().extend_from_slice(self.destination.format.tail());
            self.send()?;
            let mut batch = Batch::default();
            batch.copy_done();
            self.put(&batch)?;
            self.link.copying.set(false);
            self.state.set(State::Ended);
            Ok(())
        })
    }

    /// Ends the COPY, and waits for its outcome.
    pub fn finish(self: &Rc<Self>) -> Result<()> {
        self.end()?;
        match self.state.get() {
            State::Ended => self.noting(|| self.outcome()),
            _ => Ok(()),
        }
    }

    fn occupy(self: &Rc<Self>) {
        let occupant: Weak<Self> = Rc::downgrade(self);
        self.link.occupy(occupant);
        transaction::expect();
    }

    /// The failure that the stream has met, though its statement may not have been told.
    fn check(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    fn noting(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        body().inspect_err(|failure| {
            self.failure.borrow_mut().get_or_insert_with(|| failure.clone());
        })
    }

    /// Sends what is in the buffer, in a new COPY if none is under way.
    fn send(self: &Rc<Self>) -> Result<()> {
        let mut batch = Batch::default();
        let buffer = self.buffer.take();
        if self.state.get() == State::Idle {
            self.start(&mut batch)?;
            batch.copy_data(&[self.destination.format.head(), &buffer].concat());
            self.link.begin(&batch)?.hand_over();
            self.state.set(State::Copying);
            self.link.copying.set(true);
            self.occupy();
            batch = Batch::default();
        } else {
            batch.copy_data(&buffer);
        }
        self.buffer.replace(buffer);
        self.buffer.borrow_mut().clear();
        self.put(&batch)
    }

    /// What opens the COPY. The shard is not waited for: if it refuses, it takes no notice of the rows.
    fn start(&self, batch: &mut Batch) -> Result<()> {
        let link = &self.link;
        if let Some(other) = link.vacate().filter(|other| !std::ptr::addr_eq(Rc::as_ptr(other), self)) {
            other.set_aside()?;
        }
        link.make_ready()?;
        let mut commands = match link.transactional {
            true => transaction::at_level(self.level, || transaction::enter(link))?,
            false => Vec::new(),
        };
        commands.extend(link.carry(self.destination.needs));
        commands.push(self.destination.command.to_vec());
        link.remote.wrote.set(true);
        batch.query(&commands.join(&b"; "[..]));
        Ok(())
    }

    /// Sends something of the COPY; a shard that is slow makes us wait. Looks whether it has refused a row.
    fn put(&self, batch: &Batch) -> Result<()> {
        let busy = Busy::resume(&self.link);
        self.link.send(batch)?;
        self.link.drain_output(BUFFER)?;
        let mut body = Vec::new();
        while let Some(kind) = self.link.try_receive(&mut body)? {
            self.take(kind, &body);
        }
        if self.said.borrow().is_some() {
            self.outcome()?;
        }
        busy.hand_over();
        Ok(())
    }

    fn take(&self, kind: u8, body: &[u8]) {
        match kind {
            b'C' => self.counted.set(decode::tag_rows(body)),
            b'E' => {
                let failure = self.link.error(body);
                self.said.borrow_mut().get_or_insert(failure);
            }
            _ => {}
        }
    }

    /// Reads to the end of the COPY.
    fn outcome(&self) -> Result<()> {
        let (link, mut body) = (&self.link, Vec::new());
        let busy = Busy::resume(link);
        while link.is_active() {
            let said = self.said.borrow().clone();
            let kind = link.receive_or(&mut body, &mut Patience::Interruptible, &said)?;
            self.take(kind, &body);
        }
        busy.hand_over();
        self.state.set(State::Idle);
        link.tell_notices();
        if let Some(failure) = self.said.take() {
            return Err(transaction::after_failure(link, failure));
        }
        let (sent, counted) = (self.rows.take(), self.counted.get());
        self.total.set(self.total.get() + sent);
        match sent == counted {
            true => Ok(()),
            false => Err(miscounted(&link.target.server, sent, counted)),
        }
    }
}

/// A shard that did not take as many rows as it was sent.
pub fn miscounted(shard: &str, sent: u64, counted: u64) -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("shard \"{shard}\" was sent {sent} rows and has taken {counted}"),
    )
    .hint("Look for a trigger on the shard's table that drops rows.")
    .at_shard(shard)
}

impl Occupant for Stream {
    fn set_aside(self: Rc<Self>) -> Result<()> {
        self.finish()
    }

    fn forsake(&self) {
        self.state.set(State::Idle);
        self.rows.set(0);
        self.buffer.borrow_mut().clear();
    }

    fn unsent_level(&self) -> i32 {
        if self.buffer.borrow().is_empty() {
            0
        } else {
            self.level
        }
    }
}
