//! A statement under way on a shard: sent in one go with all that has to come before it, its rows read as they come.
//!
//! Decides how: BEGIN and savepoints travel in the same message as the statement; rows come all at once, or, inside the
//! shard's transaction, a chunk at a time, so that memory is bounded and a reader may stop. What always holds: one portal
//! of a link has its rows on their way; before anything else is sent, the rest of its chunk is kept here. A statement that
//! the shard no longer knows under its name, or whose result type has changed there, is sent again, once, if nothing
//! else would be repeated with it.
//!
//! Read next: `transaction` for what comes before the statement, `prepared` for its name.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use pgrx::{pg_sys, PgSqlErrorCode};

use super::carried::Needs;
use super::failure::{Failure, Result, SqlState};
use super::link::{Busy, Link};
use super::occupant::Occupant;
use super::prepared::{name, Reference, Statement};
use super::traffic::Traffic;
use super::transaction;
use super::wait::Patience;
use super::wire::decode;
use super::wire::encode::{Batch, Params};
use crate::pg::savepoint;
use crate::pg::settings::MAX_PREPARED;

/// How long a write that commits by itself is waited for after a cancel, before its outcome is given up as unknown.
const LONE_GRACE: Duration = Duration::from_secs(2);
/// The largest number of rows asked for at once.
const LARGEST_CHUNK: i32 = 2000;

/// What to run, and how.
pub struct Request {
    pub statement: Rc<Statement>,
    pub params: Params,
    /// Rows to ask for first; 0: all. Chunks need the shard's transaction.
    pub chunk: i32,
    /// Begin the shard's transaction if it has not begun.
    pub begin: bool,
    /// The statement may write.
    pub writes: bool,
    pub needs: Needs,
    /// It writes outside the shard's transaction: its end is its commit.
    pub commits: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Rows are on their way.
    Running,
    /// There are more rows to ask for.
    Suspended,
    Done,
    /// Its rows cannot be had any more.
    Lost,
}

/// What trying to get a row has brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Next {
    Row,
    End,
    /// It has not come yet.
    Pending,
}

pub struct Portal {
    link: Rc<Link>,
    request: Request,
    /// Its name on the shard, if it is read in chunks.
    id: u64,
    depth: i32,
    chunk: Cell<i32>,
    state: Cell<State>,
    /// The shard's transaction that it belongs to; 0: none.
    turn: Cell<u64>,
    reference: Cell<Reference>,
    /// The statement stands alone, or begins the shard's transaction.
    may_repeat: Cell<bool>,
    parsed: Cell<bool>,
    /// The commands sent ahead whose end has not been told.
    ahead: Cell<u32>,
    suspended: Cell<bool>,
    failure: RefCell<Option<Failure>>,
    kept: RefCell<VecDeque<Vec<u8>>>,
    affected: Cell<u64>,
    traffic: Cell<Traffic>,
}

thread_local! {
    static IDS: Cell<u64> = const { Cell::new(0) };
}

impl Portal {
    /// Sends the statement, and does not wait for its rows.
    pub fn open(link: &Rc<Link>, request: Request) -> Result<Rc<Self>> {
        IDS.set(IDS.get() + 1);
        let portal = Rc::new(Self {
            link: Rc::clone(link),
            id: IDS.get(),
            depth: savepoint::depth(),
            chunk: Cell::new(request.chunk),
            request,
            state: Cell::new(State::Done),
            turn: Cell::new(0),
            reference: Cell::new(Reference::Once),
            may_repeat: Cell::new(false),
            parsed: Cell::new(false),
            ahead: Cell::new(0),
            suspended: Cell::new(false),
            failure: RefCell::default(),
            kept: RefCell::default(),
            affected: Cell::new(0),
            traffic: Cell::default(),
        });
        portal.start()?;
        Ok(portal)
    }

    fn start(self: &Rc<Self>) -> Result<()> {
        let link = &self.link;
        link.make_ready()?;
        let mut batch = Batch::default();
        for unneeded in link.take_unneeded() {
            batch.close_portal(&portal_name(unneeded));
        }
        let was_open = link.in_transaction();
        self.ahead.set(0);
        if self.request.begin || was_open {
            let commands = transaction::enter(link)?;
            commands.iter().for_each(|command| batch.command(command));
            self.ahead.set(commands.len() as u32);
            self.turn.set(link.remote.turn.get());
        }
        if let Some(command) = link.carry(self.request.needs) {
            batch.command(&command);
            self.ahead.set(self.ahead.get() + 1);
        }
        if self.request.writes {
            link.remote.wrote.set(true);
        }
        self.may_repeat.set(!was_open);
        let statement = &self.request.statement;
        let limit = if link.target.pooler.keeps_statements() { MAX_PREPARED.get() as usize } else { 0 };
        let reference = link.prepared.borrow_mut().refer(statement, limit);
        self.reference.set(reference);
        let by_name = match reference {
            Reference::Once => Vec::new(),
            Reference::New(number, _) | Reference::Known(number) => name(number),
        };
        if let Reference::New(_, Some(evicted)) = reference {
            batch.close_statement(&name(evicted));
        }
        if !matches!(reference, Reference::Known(_)) {
            batch.parse(&by_name, &statement.sql, &statement.types);
            if statement.wanted.iter().any(|wanted| *wanted != pg_sys::InvalidOid) {
                batch.describe_statement(&by_name);
            }
        }
        let own = self.own_name();
        batch.bind(&own, &by_name, &self.request.params, &statement.formats);
        batch.execute(&own, self.chunk.get());
        batch.sync();
        self.parsed.set(false);
        self.count(|traffic| traffic.ask(batch.bytes.len()));
        link.begin(&batch)?.hand_over();
        self.run();
        Ok(())
    }

    fn run(self: &Rc<Self>) {
        self.state.set(State::Running);
        self.suspended.set(false);
        let occupant: Weak<Self> = Rc::downgrade(self);
        self.link.occupy(occupant);
    }

    fn own_name(&self) -> Vec<u8> {
        match self.request.chunk {
            0 => Vec::new(),
            _ => portal_name(self.id),
        }
    }

    /// The rows that the statement has written, or returned, once it is over.
    pub fn affected(&self) -> u64 {
        self.affected.get()
    }

    /// What was asked for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// What it has cost so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    fn count(&self, add: impl FnOnce(&mut Traffic)) {
        let mut traffic = self.traffic.get();
        add(&mut traffic);
        self.traffic.set(traffic);
    }

    /// The next row, as the content of a DataRow message. `Ok(false)`: there are no more.
    ///
    /// # Errors
    /// The shard's own; 08006 if the connection is lost.
    pub fn next(self: &Rc<Self>, row: &mut Vec<u8>) -> Result<bool> {
        loop {
            if self.next_kept(row) {
                return Ok(true);
            }
            match self.state.get() {
                State::Done => return Ok(false),
                State::Lost => return Err(self.lost_rows()),
                State::Suspended => self.ask_for_more()?,
                State::Running => {
                    if self.advance(row, &mut self.patience())? {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// A write that commits by itself is waited for as a commit is: what became of it must be known.
    fn patience(&self) -> Patience {
        match self.request.commits {
            true => Patience::commit(LONE_GRACE),
            false => Patience::Interruptible,
        }
    }

    /// As [`Portal::next`], without waiting. After `Pending` wait until the link's socket can be read.
    pub fn try_next(self: &Rc<Self>, row: &mut Vec<u8>) -> Result<Next> {
        loop {
            if self.next_kept(row) {
                return Ok(Next::Row);
            }
            match self.state.get() {
                State::Done => return Ok(Next::End),
                State::Lost => return Err(self.lost_rows()),
                State::Suspended => self.ask_for_more()?,
                State::Running => match self.link.try_receive(row)? {
                    None => return Ok(Next::Pending),
                    Some(kind) => {
                        if self.take(kind, row)? {
                            return Ok(Next::Row);
                        }
                    }
                },
            }
        }
    }

    /// The link, whose socket tells when more can be read.
    pub fn link(&self) -> &Rc<Link> {
        &self.link
    }

    fn next_kept(&self, row: &mut Vec<u8>) -> bool {
        let kept = self.kept.borrow_mut().pop_front();
        kept.map(|kept| *row = kept).is_some()
    }

    fn ask_for_more(self: &Rc<Self>) -> Result<()> {
        self.chunk.set((self.chunk.get() * 4).min(LARGEST_CHUNK));
        let mut batch = Batch::default();
        batch.execute(&self.own_name(), self.chunk.get());
        batch.sync();
        self.may_repeat.set(false);
        self.count(|traffic| traffic.ask(batch.bytes.len()));
        self.link.begin(&batch)?.hand_over();
        self.run();
        Ok(())
    }

    /// Reads up to the next row of the chunk; `Ok(false)`: the chunk is over.
    fn advance(self: &Rc<Self>, row: &mut Vec<u8>, patience: &mut Patience) -> Result<bool> {
        let busy = Busy::resume(&self.link);
        while self.state.get() == State::Running {
            let failure = self.failure.borrow().clone();
            let received = self.link.receive_or(row, patience, &failure);
            let kind = received.map_err(|lost| if self.request.commits { self.unknown(lost) } else { lost })?;
            if self.take(kind, row).map_err(|failure| patience.explain(failure))? {
                busy.hand_over();
                return Ok(true);
            }
        }
        busy.hand_over();
        Ok(false)
    }

    /// The connection was lost while a write was under way that commits by itself.
    fn unknown(&self, lost: Failure) -> Failure {
        let place = &self.link.target.place;
        Failure::outcome_unknown(place)
            .detail(lost.detail.unwrap_or_default())
            .hint("The statement may have taken effect. Look before repeating it.")
            .at(place)
    }

    /// Takes a message; true if it is a row.
    fn take(self: &Rc<Self>, kind: u8, body: &[u8]) -> Result<bool> {
        self.count(|traffic| traffic.hear(body.len()));
        match kind {
            b'D' => return Ok(self.ahead.get() == 0),
            b'1' => self.parsed.set(self.ahead.get() == 0),
            b'C' if self.ahead.get() > 0 => self.ahead.set(self.ahead.get() - 1),
            b'C' => self.affected.set(decode::tag_rows(body)),
            b's' => self.suspended.set(true),
            b'T' => {
                let wrong = self.check_types(body);
                let mut failure = self.failure.borrow_mut();
                *failure = failure.take().or(wrong);
            }
            b'E' => {
                let failure = self.link.error(body);
                self.failure.borrow_mut().get_or_insert(failure);
            }
            b'Z' => {
                let failure = self.failure.take();
                self.state.set(if self.suspended.get() { State::Suspended } else { State::Done });
                self.link.tell_notices();
                if let Some(failure) = failure {
                    self.state.set(State::Done);
                    self.failed(failure)?;
                }
            }
            _ => {}
        }
        Ok(false)
    }

    /// Compares the results' types with those that are wanted.
    fn check_types(&self, body: &[u8]) -> Option<Failure> {
        let wanted = self.request.statement.wanted.iter();
        let differs = |((name, own), wanted): ((String, pg_sys::Oid), &pg_sys::Oid)| {
            (*wanted != pg_sys::InvalidOid && own != *wanted).then_some((name, own, *wanted))
        };
        let (column, own, wanted) = decode::columns(body).into_iter().zip(wanted).find_map(differs)?;
        self.link.prepared.borrow_mut().forget(&self.request.statement);
        Some(
            Failure::new(
                PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
                format!("result column \"{column}\" has another type on the shard than here"),
            )
            .detail(format!("Its type there has OID {}, here {}.", own.to_u32(), wanted.to_u32()))
            .hint("Give the column of the shard's table the type that the logical table's has.")
            .at(&self.link.target.place),
        )
    }

    /// Sends the statement again if the failure is that of its name, and else passes the failure on.
    fn failed(self: &Rc<Self>, failure: Failure) -> Result<()> {
        let link = &self.link;
        let reference = self.reference.get();
        let statement = &self.request.statement;
        if reference != Reference::Once && !(self.parsed.get() && matches!(reference, Reference::New(..))) {
            let is_known = matches!(reference, Reference::Known(_));
            let stale = is_known && is_stale(&failure);
            if stale || !is_known {
                link.prepared.borrow_mut().forget(statement);
            }
            if stale && self.may_repeat.get() {
                if link.in_transaction() {
                    link.run(b"ROLLBACK", &mut Patience::Interruptible)?;
                    transaction::leave(link);
                }
                return self.start();
            }
        }
        if self.request.commits {
            // The shard was told to stop because we were: say why.
            pgrx::check_for_interrupts!();
        }
        Err(transaction::after_failure(link, failure))
    }

    /// Ends the statement, whose other rows nobody wants.
    pub fn close(self: &Rc<Self>) -> Result<()> {
        self.kept.borrow_mut().clear();
        let in_chunks = self.request.chunk > 0;
        if self.state.get() == State::Running && !in_chunks && !self.link.in_transaction() {
            self.link.abandon();
        }
        let mut row = Vec::new();
        while self.state.get() == State::Running {
            self.advance(&mut row, &mut Patience::Interruptible)?;
        }
        if self.state.replace(State::Done) == State::Suspended && self.is_current() {
            self.link.close_later(self.id);
        }
        Ok(())
    }

    fn is_current(&self) -> bool {
        self.link.in_transaction() && self.link.remote.turn.get() == self.turn.get()
    }

    fn lost_rows(&self) -> Failure {
        let place = &self.link.target.place;
        Failure::new(PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION, "rows of a cursor on a shard were lost")
            .detail("The statement that read them was ended with a savepoint that was rolled back, or its connection was lost.")
            .hint("Open the cursor again.")
            .at(place)
    }
}

impl Occupant for Portal {
    /// Keeps the rest of the chunk.
    fn set_aside(self: Rc<Self>) -> Result<()> {
        let mut row = Vec::new();
        while self.state.get() == State::Running {
            if self.advance(&mut row, &mut Patience::Interruptible)? {
                self.kept.borrow_mut().push_back(std::mem::take(&mut row));
            }
        }
        Ok(())
    }

    /// Its link was abandoned. Whoever still asks for its rows is told so.
    fn forsake(&self) {
        if self.state.replace(State::Lost) == State::Done {
            self.state.set(State::Done);
        }
    }

    /// The depth of savepoints at which it was opened.
    fn depth(&self) -> i32 {
        self.depth
    }

    /// Takes a message for later, in a callback that must neither wait nor fail.
    fn take_quietly(&self, kind: u8, body: &mut Vec<u8>) {
        self.count(|traffic| traffic.hear(body.len()));
        match kind {
            b'D' if self.ahead.get() == 0 => self.kept.borrow_mut().push_back(std::mem::take(body)),
            b'C' if self.ahead.get() > 0 => self.ahead.set(self.ahead.get() - 1),
            b's' => self.suspended.set(true),
            b'E' => self.state.set(State::Lost),
            b'Z' if self.state.get() == State::Running => {
                self.state.set(if self.suspended.get() { State::Suspended } else { State::Done });
            }
            _ => {}
        }
    }
}

fn portal_name(id: u64) -> Vec<u8> {
    format!("p{id}").into_bytes()
}

/// The statement's name is not known to the shard (a pooler has changed the connection), or its result has another type
/// there than when it was prepared.
fn is_stale(failure: &Failure) -> bool {
    failure.code == SqlState::parse("26000")
        || (failure.code == SqlState::parse("0A000") && failure.message.contains("cached plan"))
}
