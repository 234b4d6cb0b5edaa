//! One connection to one shard: making it, and a conversation on it that is whole or over.
//!
//! Decides when a connection is fit for use. What always holds: outside the functions of `link` and of its occupants a
//! link is at rest, is in the middle of what one [`Occupant`] sends or receives, owes the answer of a clean-up command,
//! or is closed. A conversation that is left in the middle (a cancel, an error of Postgres) has its query cancelled on the
//! shard, and is read to its end or closed, when [`Busy`] is dropped. Nothing is borrowed while it waits: the abort
//! callback may close a link under the waiter when the backend terminates.
//!
//! Read next: `cleanup` for how it ends badly, `portal` and `stream` for rows, `pool` for who keeps links, `transaction`
//! for what the marks on them mean.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use pgrx::{pg_sys, PgSqlErrorCode};

use super::admit;
use super::answer::Answer;
use super::carried::{self, Carried, Needs};
use super::deadlock::Watch;
use super::failure::{pass_on, Failure, Result};
use super::libpq::{Conn, Notice};
use super::occupant::Occupant;
use super::prepared::Prepared;
use super::target::{Session, Target};
use super::transaction::Remote;
use super::wait::{Interest, Patience, Woken};
use super::wire::decode::{self, Status};
use super::wire::encode::Batch;
use super::wire::{Fill, Wire};
use crate::pg::{catalog, stats};

/// How long to wait for a shard to take a cancel request during COMMIT, before its outcome is waited for again.
const CANCEL_LIMIT: Duration = Duration::from_secs(1);
/// At most this many notices are kept between two looks at them.
const MAX_NOTICES: usize = 1000;

thread_local! {
    static NUMBERS: Cell<u64> = const { Cell::new(1) };
}

/// A connection that is kept.
pub struct Link {
    pub target: Rc<Target>,
    /// For statements of the local transaction; else each statement commits by itself.
    pub transactional: bool,
    /// Of this backend's connections, in the order in which they were made.
    pub number: u64,
    pub made_at: Instant,
    /// The generation of the catalog at which the target was last compared.
    pub generation: Cell<u64>,
    /// Used in the local transaction: somebody may hold it.
    pub touched: Cell<bool>,
    /// When a statement that used it began: Postgres' microseconds.
    pub used: Cell<i64>,
    gone: Cell<bool>,
    /// An administrator's own statements have run in the shard's session.
    pub lent: Cell<bool>,
    pub remote: Remote,
    pub prepared: RefCell<Prepared>,
    /// The settings that the shard's session has, if that is known.
    pub carried: Cell<Option<Carried>>,
    pub(super) wire: Wire,
    pub(super) status: Cell<Status>,
    /// The ReadyForQuery that have not come.
    pub(super) awaited: Cell<u32>,
    /// They answer clean-up commands, whose outcome nobody waits for.
    pub(super) owing: Cell<bool>,
    /// The shard waits for a COPY's rows.
    pub copying: Cell<bool>,
    /// What is on the wire now.
    occupant: RefCell<Option<Weak<dyn Occupant>>>,
    /// Portals on the shard that nobody needs any more.
    unneeded: RefCell<Vec<u64>>,
    notices: RefCell<Vec<Notice>>,
    spent: Spent,
}

/// What statistics have not been told yet.
struct Spent {
    /// The shard's keyspace and number; `None`: it is a replica, or not known.
    shard: Option<(String, u16)>,
    waited: Cell<Duration>,
    errors: Cell<u64>,
}

impl Spent {
    fn on(server: pg_sys::Oid) -> Self {
        let catalog = catalog::current();
        let shard = catalog.as_ref().and_then(|catalog| catalog.servers.get(&server));
        let shard = shard.map(|(keyspace, number)| (keyspace.name.clone(), number.0));
        Self { shard, waited: Cell::default(), errors: Cell::default() }
    }

    fn tell(&self) {
        let (waited, errors) = (self.waited.take(), self.errors.take());
        if let Some((keyspace, number)) = self.shard.as_ref().filter(|_| errors > 0 || !waited.is_zero()) {
            stats::add_to_shard(keyspace, *number, errors, waited);
        }
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.tell();
    }
}

impl Link {
    /// Connects, and waits for it as long as the target allows.
    pub fn connect(target: Rc<Target>, transactional: bool, generation: u64) -> Result<Self> {
        let conn = admit::connect(&target, &Session::like_ours())?;
        Self::over(conn, target, transactional, generation)
    }

    /// Over a connection that was just made with settings like ours.
    pub fn over(conn: Conn, target: Rc<Target>, transactional: bool, generation: u64) -> Result<Self> {
        let carried = target.pooler.keeps_session().then(Carried::current);
        let wire = Wire::new(conn).map_err(|failure| failure.at(&target.place))?;
        Ok(Self {
            spent: Spent::on(target.id),
            target,
            transactional,
            number: NUMBERS.replace(NUMBERS.get() + 1),
            made_at: Instant::now(),
            generation: Cell::new(generation),
            touched: Cell::new(true),
            used: Cell::new(0),
            gone: Cell::new(false),
            lent: Cell::new(false),
            remote: Remote::default(),
            prepared: RefCell::default(),
            carried: Cell::new(carried),
            wire,
            status: Cell::new(Status::Idle),
            awaited: Cell::new(0),
            owing: Cell::new(false),
            copying: Cell::new(false),
            occupant: RefCell::default(),
            unneeded: RefCell::default(),
            notices: RefCell::default(),
        })
    }

    /// The command that gives the shard's session the settings that a statement needs, if it lacks them. It counts as done:
    /// send it at once, with the statement.
    pub fn carry(&self, needs: Needs) -> Option<Vec<u8>> {
        let keeps = self.target.pooler.keeps_session();
        let known = self.carried.get().filter(|_| keeps || self.in_transaction());
        let missing = Carried::missing(needs, known)?;
        self.carried.set(Some(missing));
        Some(carried::command(missing, !keeps))
    }

    pub fn in_transaction(&self) -> bool {
        self.remote.begun.get() != 0
    }

    pub fn is_open(&self) -> bool {
        self.wire.is_open()
    }

    pub fn close(&self) {
        self.wire.close();
    }

    /// See [`Conn::hang_up`].
    pub fn hang_up(&self) {
        self.gone.set(true);
        self.conn().hang_up();
    }

    /// Open, and not left by [`Link::hang_up`].
    pub fn is_here(&self) -> bool {
        !self.gone.get() && self.is_open()
    }

    pub fn conn(&self) -> &Conn {
        self.wire.conn()
    }

    pub fn socket(&self) -> i32 {
        self.wire.socket()
    }

    /// The state of the shard's transaction when it was last heard of.
    pub fn status(&self) -> Status {
        self.status.get()
    }

    /// In the middle of a conversation.
    pub fn is_active(&self) -> bool {
        self.awaited.get() > 0 && !self.owing.get()
    }

    /// Whether an idle link still has its shard, as far as can be known without asking: an end of the connection, or
    /// the shard's farewell, waits in the socket.
    pub fn is_fit(&self) -> bool {
        if !self.is_here() {
            return false;
        }
        if self.awaited.get() > 0 || self.wire.is_quiet() {
            return true;
        }
        // A notice or a changed parameter may have come by itself; anything else is a farewell.
        let mut body = Vec::new();
        if self.wire.fill() != Fill::Some {
            return false;
        }
        while let Ok(Some(kind)) = self.wire.take(&mut body) {
            if !self.is_aside(kind, &body) {
                return false;
            }
        }
        self.wire.is_quiet()
    }

    /// Runs one or more statements and returns the last one's result. Values come as text.
    ///
    /// # Errors
    /// The shard's own error; 08006 or 08007 if the connection is lost; 55000 if the link is in the middle of something.
    pub fn run(&self, sql: &[u8], patience: &mut Patience) -> Result<Answer> {
        let mut batch = Batch::default();
        batch.query(sql);
        let busy = self.begin(&batch)?;
        let outcome = self.finish(patience);
        drop(busy);
        self.tell_notices();
        outcome
    }

    /// Sends messages. The caller reads what answers them to its end while it holds the guard, or drops it to give up.
    pub fn begin(&self, batch: &Batch) -> Result<Busy<'_>> {
        self.make_ready()?;
        if self.is_active() {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                "connection to the shard is in use",
            )
            .hint("Finish reading or copying from the shard before sending it another statement.")
            .at(&self.target.place));
        }
        if !self.is_open() {
            return Err(self.lost(""));
        }
        let busy = Busy(self);
        self.send(batch)?;
        Ok(busy)
    }

    /// Brings the conversations before to their ends.
    pub fn make_ready(&self) -> Result<()> {
        self.settle()?;
        self.set_aside()
    }

    /// Sends messages in the middle of a conversation.
    pub fn send(&self, batch: &Batch) -> Result<()> {
        self.awaited.set(self.awaited.get() + batch.readies);
        self.wire.push(&batch.bytes);
        self.wire.flush().map_err(|error| self.lost(&error.to_string()))?;
        Ok(())
    }

    /// Waits until at most `limit` bytes have not left.
    pub fn drain_output(&self, limit: usize) -> Result<()> {
        let mut watch = Watch::default();
        while !self.wire.flush().map_err(|error| self.lost(&error.to_string()))? && self.wire.unsent() > limit {
            self.wait(Interest::ReadOrWrite, &mut Patience::Interruptible, &mut watch)?;
            // A shard that does not read may be waiting for us to do so.
            if self.wire.fill() == Fill::End {
                return Err(self.lost(""));
            }
        }
        Ok(())
    }

    /// The next message that answers us: its kind, and its content in `body`. Notices and the like are kept aside.
    pub fn receive(&self, body: &mut Vec<u8>, patience: &mut Patience) -> Result<u8> {
        let mut watch = Watch::default();
        loop {
            if !self.wire.is_too_early() {
                if let Some(kind) = self.try_receive(body)? {
                    return Ok(kind);
                }
            }
            let interest = if self.wire.unsent() == 0 { Interest::Read } else { Interest::ReadOrWrite };
            self.wait(interest, patience, &mut watch)?;
        }
    }

    /// As [`Link::receive`], without waiting: `None` if no message has come.
    pub fn try_receive(&self, body: &mut Vec<u8>) -> Result<Option<u8>> {
        loop {
            match self.wire.take(body) {
                Ok(Some(b'Z')) => {
                    self.at_ready(body);
                    return Ok(Some(b'Z'));
                }
                Ok(Some(kind)) if self.is_aside(kind, body) => continue,
                Ok(Some(kind)) => return Ok(Some(kind)),
                Ok(None) => {}
                Err(error) => return Err(self.lost(&error.to_string())),
            }
            match self.wire.fill() {
                Fill::Some => {}
                Fill::End => return Err(self.lost("")),
                Fill::Nothing => {
                    self.wire.flush().map_err(|error| self.lost(&error.to_string()))?;
                    return Ok(None);
                }
            }
        }
    }

    pub(super) fn at_ready(&self, body: &[u8]) {
        self.copying.set(false);
        self.awaited.set(self.awaited.get().saturating_sub(1));
        self.status.set(Status::of(body));
    }

    /// Takes a message that may come at any time.
    fn is_aside(&self, kind: u8, body: &[u8]) -> bool {
        match kind {
            b'N' => {
                if let Ok(mut notices) = self.notices.try_borrow_mut() {
                    if notices.len() < MAX_NOTICES {
                        notices.push(Notice::of(|letter| decode::field(body, letter)));
                    }
                }
                true
            }
            b'S' | b'A' => true,
            _ => false,
        }
    }

    /// Reads what answers statements of the simple protocol, or a COPY's end. The first error wins, else the last result.
    pub fn finish(&self, patience: &mut Patience) -> Result<Answer> {
        let (mut answer, mut failure, mut body) = (Answer::default(), None, Vec::new());
        let mut ended = true;
        while self.awaited.get() > 0 {
            match self.receive_or(&mut body, patience, &failure)? {
                b'T' => {
                    answer = Answer::default();
                    ended = false;
                }
                b'D' => answer.rows.push(decode::values(&body).map(|value| value.map(Box::from)).collect()),
                b'C' => {
                    if std::mem::replace(&mut ended, true) {
                        answer = Answer::default();
                    }
                    answer.tag = decode::tag(&body);
                }
                b'I' => answer = Answer::default(),
                b'E' => failure = failure.or_else(|| Some(self.error(&body))),
                b'G' => {
                    failure = Some(self.refuse_copy());
                    let mut batch = Batch::default();
                    batch.copy_fail(b"not from here");
                    self.send(&batch)?;
                }
                b'H' => failure = Some(self.refuse_copy()),
                _ => {}
            }
        }
        failure.map_or(Ok(answer), Err)
    }

    /// As [`Link::receive`]; if the connection ends after the shard has sent `failure`, that is the reason.
    pub fn receive_or(&self, body: &mut Vec<u8>, patience: &mut Patience, failure: &Option<Failure>) -> Result<u8> {
        self.receive(body, patience).map_err(|lost| match failure {
            Some(failure) if !self.is_open() => self.lost(&failure.message),
            _ => lost,
        })
    }

    /// Waits until the socket is ready or something else is to be looked at.
    fn wait(&self, interest: Interest, patience: &mut Patience, watch: &mut Watch) -> Result<()> {
        match patience.check() {
            Ok(false) => {}
            Ok(true) => self.conn().start_cancel().wait(CANCEL_LIMIT),
            Err(()) => return Err(self.lost("The shard did not answer in time.")),
        }
        let look = (!patience.is_ending()).then(|| watch.limit());
        let since = Instant::now();
        let woken = self.wire.wait(interest, patience.limit().into_iter().chain(look).min());
        self.spent.waited.set(self.spent.waited.get() + since.elapsed());
        if woken == Woken::Latch && !matches!(patience, Patience::Commit { .. }) {
            pgrx::check_for_interrupts!();
        }
        if look.is_some() && woken != Woken::Socket && watch.is_due() {
            watch.look(&[self]).into_iter().for_each(|failure| patience.give_up(failure));
        }
        Ok(())
    }

    /// The shard's error in an ErrorResponse.
    pub fn error(&self, body: &[u8]) -> Failure {
        self.count_error();
        Failure::from_fields(&self.target.place, |letter| decode::field(body, letter))
    }

    /// The failure of a connection that is gone. Closes it.
    pub fn lost(&self, said: &str) -> Failure {
        self.count_error();
        let detail = if said.is_empty() { "The shard has closed the connection." } else { said };
        self.close();
        let place = &self.target.place;
        let failure = if self.transactional {
            Failure::new(PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE, format!("connection to {place} was lost"))
                .hint("What this transaction did on the shard is rolled back. Repeat the transaction.")
        } else {
            Failure::outcome_unknown(place)
        };
        failure.detail(detail).at(place)
    }

    fn count_error(&self) {
        self.spent.errors.set(self.spent.errors.get() + 1);
    }

    /// Adds what was waited and met with since to the statistics.
    pub fn tell_statistics(&self) {
        self.spent.tell();
    }

    fn refuse_copy(&self) -> Failure {
        Failure::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "COPY from or to the client cannot be run on a shard this way",
        )
        .hint("Use INSERT or SELECT, or COPY the table on the coordinator.")
        .at(&self.target.place)
    }

    /// Passes notices on to the client.
    pub fn tell_notices(&self) {
        let notices = self.notices.take();
        if !notices.is_empty() {
            pass_on(&self.target.place, notices);
        }
    }

    /// Makes `occupant` what is on the wire. What was there before has been set aside.
    pub fn occupy(&self, occupant: Weak<dyn Occupant>) {
        *self.occupant.borrow_mut() = Some(occupant);
    }

    /// What is on the wire, which no longer counts as being there.
    pub fn vacate(&self) -> Option<Rc<dyn Occupant>> {
        self.occupant.take()?.upgrade()
    }

    /// What is on the wire.
    pub fn occupant(&self) -> Option<Rc<dyn Occupant>> {
        self.occupant.borrow().as_ref()?.upgrade()
    }

    /// Lets what is on the wire come to a point at which something else can be sent.
    fn set_aside(&self) -> Result<()> {
        self.vacate().map_or(Ok(()), Occupant::set_aside)
    }

    /// Notes a portal to be closed with the next messages.
    pub fn close_later(&self, portal: u64) {
        self.unneeded.borrow_mut().push(portal);
    }

    /// The portals to close now. None outside the transaction that they belonged to.
    pub fn take_unneeded(&self) -> Vec<u64> {
        self.unneeded.take()
    }
}

/// A conversation under way. Dropped before its end was read, it abandons the link.
pub struct Busy<'a>(&'a Link);

impl Busy<'_> {
    /// The conversation goes on, and its end is now the caller's duty.
    pub fn hand_over(self) {
        std::mem::forget(self);
    }

    /// Takes the duty back.
    pub fn resume(link: &Link) -> Busy<'_> {
        Busy(link)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if self.0.is_active() {
            self.0.abandon();
        }
    }
}
