//! Rows that come to a partition by tuple routing or COPY, and of which nothing is to come back.
//!
//! Decides how they go: few in one INSERT, more by COPY, so that a few rows cost one message and many cost no statement
//! each. COPY takes the binary format if the shard's columns have the types of ours, and else text; a shard's table that
//! COPY cannot write, or would write otherwise than INSERT (a view, a rule, row security), gets INSERTs of many rows. What
//! always holds: a row is reported as written before it is, but the statement does not end before every shard has
//! confirmed as many rows as it was sent. Something else may be sent to the shard between any two rows.
//!
//! Read next: `remote::stream` for the COPY, [`super::write`] for the INSERT.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use pgrx::pg_sys;

use super::write::{Write, MAX_PARAMS};
use super::{insert, probe};
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::{Failure, Result};
use crate::pg::remote::occupant::Occupant;
use crate::pg::remote::portal::Portal;
use crate::pg::remote::stream::{miscounted, Destination, Stream};
use crate::pg::remote::transaction;
use crate::pg::remote::wire::copy::{Format, Row};
use crate::pg::remote::wire::encode::Params;
use crate::pg::savepoint;

/// As many rows go by INSERT at most, if no more come before something else is to be sent. A COPY costs two round trips
/// more than an INSERT that was prepared, and less for each row: they are equal at 64, at fewer if it was not prepared.
const FEW: usize = 32;
/// Rows of an INSERT where there is no COPY.
const MANY: usize = 500;

enum Way {
    /// There were only few rows so far.
    Undecided,
    Insert,
    Copy(Rc<Stream>),
}

/// Rows that were not sent.
#[derive(Default)]
struct Held {
    values: Params,
    rows: usize,
}

pub struct Bulk {
    write: RefCell<Write>,
    relation: pg_sys::Relation,
    /// The running statement's.
    estate: *const pg_sys::EState,
    level: i32,
    way: RefCell<Way>,
    held: RefCell<Held>,
    holds: Cell<bool>,
    /// An INSERT whose outcome is awaited, and its number of rows.
    sent: RefCell<Option<(Rc<Portal>, usize)>>,
    failure: RefCell<Option<Failure>>,
}

thread_local! {
    /// Those of all statements.
    static LIVE: RefCell<Vec<Weak<Bulk>>> = const { RefCell::new(Vec::new()) };
}

/// Sends what is left of a statement's rows, and waits until all are written. All shards are told before one is waited for.
pub fn end_statement(estate: *const pg_sys::EState) -> Result<()> {
    let own = |live: &mut Vec<Weak<Bulk>>| -> Vec<_> {
        live.retain(|bulk| bulk.strong_count() > 0);
        live.iter().filter_map(Weak::upgrade).filter(|bulk| bulk.estate == estate).collect()
    };
    let all = LIVE.with_borrow_mut(own);
    all.iter().try_for_each(|bulk| bulk.end())?;
    all.iter().try_for_each(|bulk| bulk.finish())
}

impl Bulk {
    /// Whether the rows of `result` can go so.
    ///
    /// # Safety
    /// `state` must be the statement's, `result` its open partition.
    pub unsafe fn serves(state: *const pg_sys::ModifyTableState, result: *const pg_sys::ResultRelInfo) -> bool {
        let plan = (*state).ps.plan.cast::<pg_sys::ModifyTable>();
        let triggers = (*result).ri_TrigDesc;
        (*state).operation == pg_sys::CmdType::CMD_INSERT
            && (plan.is_null() || (*plan).onConflictAction == pg_sys::OnConflictAction::ONCONFLICT_NONE)
            && (*result).ri_returningList.is_null()
            && (*result).ri_WithCheckOptions.is_null()
            && (triggers.is_null() || !(*triggers).trig_insert_after_row)
    }

    /// # Safety
    /// `write` must have been begun for `relation` in the statement of `estate`, whose memory both live in.
    pub unsafe fn new(mut write: Write, relation: pg_sys::Relation, estate: *const pg_sys::EState) -> Rc<Self> {
        if !write.is_binary() {
            write.send_text((*relation).rd_att);
        }
        // COPY has no list of no columns.
        let way = if write.columns().len() == 0 { Way::Insert } else { Way::Undecided };
        let bulk = Rc::new(Self {
            write: RefCell::new(write),
            relation,
            estate,
            level: savepoint::depth(),
            way: RefCell::new(way),
            held: RefCell::default(),
            holds: Cell::new(false),
            sent: RefCell::default(),
            failure: RefCell::default(),
        });
        LIVE.with_borrow_mut(|live| live.push(Rc::downgrade(&bulk)));
        bulk
    }

    /// Takes the row in `slot`.
    ///
    /// # Errors
    /// The shard's own for an earlier row; 08006 if the connection is lost.
    ///
    /// # Safety
    /// `slot` must be of the target's row type.
    pub unsafe fn push(self: &Rc<Self>, slot: *mut pg_sys::TupleTableSlot) -> Result<()> {
        if let Some(stream) = self.open_stream() {
            return stream.row(|out, format| {
                let mut write = self.write.borrow_mut();
                let mut row = Row::begin(out, format, write.columns().len());
                write.push(slot, &mut row);
                row.end();
            });
        }
        if !self.holds.get() {
            self.hold()?;
        }
        let rows = {
            let held = &mut *self.held.borrow_mut();
            self.write.borrow_mut().push(slot, &mut held.values);
            held.rows += 1;
            held.rows
        };
        match self.limit() {
            limit if rows < limit => Ok(()),
            _ => self.noting(|| self.overflow()),
        }
    }

    /// The COPY that goes on.
    fn open_stream(&self) -> Option<Rc<Stream>> {
        match &*self.way.borrow() {
            Way::Copy(stream) if stream.is_open() => Some(Rc::clone(stream)),
            _ => None,
        }
    }

    /// Begins to hold rows back.
    fn hold(self: &Rc<Self>) -> Result<()> {
        self.finish()?;
        let write = self.write.borrow();
        let link = write.connection().link();
        link.make_ready()?;
        let occupant: Weak<Self> = Rc::downgrade(self);
        link.occupy(occupant);
        transaction::expect();
        self.holds.set(true);
        Ok(())
    }

    /// The rows that are too many to be held.
    fn limit(&self) -> usize {
        match *self.way.borrow() {
            Way::Insert => MANY.min(MAX_PARAMS as usize / self.write.borrow().columns().len().max(1)).max(1),
            _ => FEW + 1,
        }
    }

    /// Sends what is held on the way that is right for many rows.
    unsafe fn overflow(self: &Rc<Self>) -> Result<()> {
        let is_undecided = matches!(*self.way.borrow(), Way::Undecided);
        if is_undecided {
            self.write.borrow().connection().link().vacate();
            let way = self.decide()?;
            self.way.replace(way);
        }
        let stream = match &*self.way.borrow() {
            Way::Copy(stream) => Some(Rc::clone(stream)),
            _ => None,
        };
        match stream {
            Some(stream) if self.holds.get() => self.pour(&stream),
            Some(_) => Ok(()),
            None => {
                self.insert()?;
                self.outcome()
            }
        }
    }

    /// Asks the shard what its table is like.
    unsafe fn decide(self: &Rc<Self>) -> Result<Way> {
        let found = probe::ask(&self.write.borrow(), self.relation, self.level)?;
        if !found.takes_copy {
            return Ok(Way::Insert);
        }
        let mut format = if self.write.borrow().is_binary() { Format::Binary } else { Format::Text };
        if format == Format::Binary && !found.has_our_types {
            // What is held has other types than the columns, to which an INSERT casts.
            self.insert()?;
            self.outcome()?;
            self.write.borrow_mut().send_text((*self.relation).rd_att);
            format = Format::Text;
        }
        let write = self.write.borrow();
        let needs = if format == Format::Text { Needs::Plain } else { Needs::Nothing };
        let destination =
            Destination { command: insert::copy(self.relation, write.columns(), format).into(), format, needs };
        Ok(Way::Copy(Stream::new(write.connection(), destination, self.level)))
    }

    /// Gives what is held to the COPY.
    fn pour(&self, stream: &Rc<Stream>) -> Result<()> {
        let write = self.write.borrow();
        write.connection().link().vacate();
        let held = self.release();
        let columns = write.columns().len();
        let mut values = held.values.values();
        for _ in 0..held.rows {
            stream.row(|out, format| {
                let mut row = Row::begin(out, format, columns);
                values.by_ref().take(columns).for_each(|value| row.push(value));
                row.end();
            })?;
        }
        Ok(())
    }

    fn release(&self) -> Held {
        self.holds.set(false);
        self.held.take()
    }

    /// Sends what is held in one INSERT, and does not wait for its outcome.
    fn insert(&self) -> Result<()> {
        let mut write = self.write.borrow_mut();
        write.connection().link().vacate();
        let held = self.release();
        if held.rows > 0 {
            let portal = transaction::at_level(self.level, || write.start_insert(held.values, held.rows))?;
            self.sent.replace(Some((portal, held.rows)));
        }
        Ok(())
    }

    /// Waits for the INSERT that was sent.
    fn outcome(&self) -> Result<()> {
        let Some((portal, rows)) = self.sent.take() else { return Ok(()) };
        let mut row = Vec::new();
        while portal.next(&mut row)? {}
        match portal.affected() {
            affected if affected == rows as u64 => Ok(()),
            affected => Err(miscounted(self.write.borrow().connection().shard(), rows as u64, affected)),
        }
    }

    /// Sends what is left, without waiting for the outcome.
    fn end(&self) -> Result<()> {
        self.check()?;
        if self.holds.get() {
            self.noting(|| self.insert())?;
        }
        match &*self.way.borrow() {
            Way::Copy(stream) => stream.end(),
            _ => Ok(()),
        }
    }

    fn finish(&self) -> Result<()> {
        self.end()?;
        self.noting(|| self.outcome())?;
        match &*self.way.borrow() {
            Way::Copy(stream) => stream.finish(),
            _ => Ok(()),
        }
    }

    /// The failure that was met, though the statement may not have been told.
    fn check(&self) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    fn noting(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        body().inspect_err(|failure| {
            self.failure.borrow_mut().get_or_insert_with(|| failure.clone());
        })
    }
}

impl Occupant for Bulk {
    fn set_aside(self: Rc<Self>) -> Result<()> {
        self.finish()
    }

    fn forsake(&self) {
        self.release();
    }

    fn unsent_level(&self) -> i32 {
        if self.holds.get() {
            self.level
        } else {
            0
        }
    }
}
