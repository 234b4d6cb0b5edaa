//! One connection to one shard: making it, and a conversation on it that is whole or over.
//!
//! Decides when a connection is fit for use. What always holds: outside the functions of this file a link is either at
//! rest (the last command's outcome was read to its end), owes the answer of a clean-up command, or is closed. A
//! conversation that is left in the middle (a cancel, an error of Postgres) cancels the shard's query and closes the link
//! when [`Busy`] is dropped. Nothing borrows a link while it waits: the abort callback may close it under the waiter
//! when the backend terminates.
//!
//! Read next: `pool` for who keeps links, `transaction` for what the marks on them mean.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;

use super::dial::Dial;
use super::failure::{pass_on, Failure, Result};
use super::libpq::{Answer, AnswerKind, Conn, TransactionStatus};
use super::target::{Session, Target};
use super::wait::{poll_socket, Interest, Patience, WaitSet, Woken};

/// How long to wait for a shard to take a cancel request during COMMIT, before its outcome is waited for again.
const CANCEL_LIMIT: Duration = Duration::from_secs(1);

/// A connection that is kept.
pub struct Link {
    pub target: Rc<Target>,
    /// For statements of the local transaction; else each statement commits by itself.
    pub transactional: bool,
    /// The generation of the catalog at which the target was last compared.
    pub generation: Cell<u64>,
    pub remote: Remote,
    pub conn: Conn,
    waits: WaitSet,
    /// A clean-up command was sent whose outcome has not been read.
    owing: Cell<bool>,
}

/// How the shard's transaction stands to ours.
#[derive(Default)]
pub struct Remote {
    /// The nesting level of the local transaction at which BEGIN was sent; 0: no transaction is open.
    pub begun: Cell<i32>,
    /// Counts the transactions begun by this backend, so that shards are committed in the order of their first use.
    pub turn: Cell<u64>,
    /// The levels above it for which a savepoint was set.
    pub savepoints: RefCell<Vec<i32>>,
}

impl Link {
    /// Connects, and waits for it as long as the target allows.
    pub fn connect(target: Rc<Target>, transactional: bool, generation: u64) -> Result<Self> {
        let conn = Dial::start(&target, &Session::default())?.wait()?;
        let waits = WaitSet::new(&[(conn.socket(), Interest::Read)]);
        Ok(Self {
            target,
            transactional,
            generation: Cell::new(generation),
            remote: Remote::default(),
            conn,
            waits,
            owing: Cell::new(false),
        })
    }

    pub fn in_transaction(&self) -> bool {
        self.remote.begun.get() != 0
    }

    pub fn is_open(&self) -> bool {
        self.conn.is_ok()
    }

    /// Whether an idle link still has its shard, as far as can be known without asking: an end of the connection, or
    /// the shard's farewell, waits in the socket.
    pub fn is_fit(&self) -> bool {
        let quiet = || !poll_socket(self.conn.socket(), Interest::Read, Instant::now());
        self.is_open() && (self.owing.get() || quiet() || (self.conn.consume() && self.is_open() && quiet()))
    }

    /// Runs one or more statements and returns the last result. Values come as text.
    ///
    /// # Errors
    /// The shard's own error; 08006 or 08007 if the connection is lost; 55000 if the link is in the middle of something.
    pub fn run(&self, sql: &CStr) -> Result<Answer> {
        let busy = self.begin(sql)?;
        let outcome = self.finish(&mut Patience::Interruptible);
        drop(busy);
        self.tell_notices();
        outcome?.ok_or_else(|| self.lost(""))
    }

    /// Sends a statement. The caller reads its results to the end while it holds the guard, or drops it to give up.
    pub fn begin(&self, sql: &CStr) -> Result<Busy<'_>> {
        self.settle()?;
        if self.conn.transaction_status() == TransactionStatus::Active {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                "connection to the shard is in use",
            )
            .hint("Finish reading or copying from the shard before sending it another statement.")
            .at_shard(&self.target.server));
        }
        let busy = Busy(self);
        if self.conn.send_query(sql) {
            Ok(busy)
        } else {
            Err(self.lost(""))
        }
    }

    /// Reads what a clean-up command left to be read. Its failure closes the link.
    pub fn settle(&self) -> Result<()> {
        if self.owing.get() {
            let _busy = Busy(self);
            self.finish(&mut Patience::Interruptible).inspect_err(|_| self.conn.close())?;
            self.owing.set(false);
        }
        Ok(())
    }

    /// Waits for the outcome of COMMIT even if the statement is cancelled, as far as `grace` goes.
    pub fn run_commit(&self, sql: &CStr, grace: Duration) -> Result<Answer> {
        let _busy = self.begin(sql)?;
        let last = self.finish(&mut Patience::commit(grace))?;
        last.ok_or_else(|| self.lost(""))
    }

    /// Reads all results of the statement under way. The first error wins, else the last result.
    pub fn finish(&self, patience: &mut Patience) -> Result<Option<Answer>> {
        let mut last: Option<Answer> = None;
        while let Some(answer) = self.next_answer(patience)? {
            match answer.kind() {
                AnswerKind::CopyIn | AnswerKind::CopyOut => return Err(self.refuse_copy()),
                _ if last.as_ref().is_some_and(|last| last.kind() == AnswerKind::Error) => {}
                _ => last = Some(answer),
            }
        }
        match last {
            Some(error) if error.kind() == AnswerKind::Error => Err(self.error(&error)),
            last => Ok(last),
        }
    }

    /// The next result of the statement under way, waited for.
    pub fn next_answer(&self, patience: &mut Patience) -> Result<Option<Answer>> {
        loop {
            let sent = self.conn.flush().unwrap_or(true);
            if !self.conn.is_busy() {
                return Ok(self.conn.next_answer());
            }
            self.wait(if sent { Interest::Read } else { Interest::ReadOrWrite }, patience)?;
            // A loss shows in the next result.
            self.conn.consume();
        }
    }

    /// Waits until the socket is ready or something else is to be looked at.
    pub fn wait(&self, interest: Interest, patience: &mut Patience) -> Result<()> {
        match patience.check() {
            Ok(false) => {}
            Ok(true) => self.conn.start_cancel().wait(CANCEL_LIMIT),
            Err(()) => return Err(self.lost("The shard did not answer in time after the statement was cancelled.")),
        }
        self.waits.watch(interest);
        if self.waits.wait(patience.limit()) == Woken::Latch {
            if let Patience::Interruptible = patience {
                pgrx::check_for_interrupts!();
            }
        }
        Ok(())
    }

    /// The failure behind an error result: the shard's error, or the loss of the connection.
    pub fn error(&self, answer: &Answer) -> Failure {
        if self.conn.is_ok() {
            Failure::from_answer(&self.target.server, answer)
        } else {
            self.lost(&answer.error_field(b'M').unwrap_or_default())
        }
    }

    /// The failure of a connection that is gone. Closes it.
    pub fn lost(&self, said: &str) -> Failure {
        let detail = if said.is_empty() { self.conn.error_message() } else { said.to_owned() };
        self.conn.close();
        let server = &self.target.server;
        let failure = if self.transactional {
            Failure::new(
                PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE,
                format!("connection to shard \"{server}\" was lost"),
            )
            .hint("What this transaction did on the shard is rolled back. Repeat the transaction.")
        } else {
            let message = format!("connection to shard \"{server}\" was lost before the statement's outcome was known");
            Failure::new(PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN, message)
                .hint("The statement may have taken effect. Look at the shard before repeating it.")
        };
        failure.detail(detail).at_shard(server)
    }

    fn refuse_copy(&self) -> Failure {
        Failure::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "COPY from or to the client cannot be run on a shard this way",
        )
        .hint("Use INSERT or SELECT, or COPY the table on the coordinator.")
        .at_shard(&self.target.server)
    }

    /// Passes notices on to the client.
    pub fn tell_notices(&self) {
        pass_on(&self.target.server, self.conn.take_notices());
    }

    /// Sends a clean-up command without waiting for its outcome, from a callback that must not fail. Whatever goes
    /// wrong closes the link.
    pub fn send_quietly(&self, sql: &CString, deadline: Instant) {
        if !self.owing.get() && self.conn.transaction_status() == TransactionStatus::Active {
            return self.abandon();
        }
        self.settle_quietly(deadline);
        if !self.owing.get() && self.conn.send_query(sql) && self.conn.flush() == Some(true) {
            self.owing.set(true);
        } else {
            self.conn.close();
        }
    }

    /// Reads the outcome of a clean-up command if it comes before `deadline`. An error closes the link.
    pub fn settle_quietly(&self, deadline: Instant) {
        while self.owing.get() && self.is_open() {
            if self.conn.is_busy() {
                if !poll_socket(self.conn.socket(), Interest::Read, deadline) {
                    return;
                }
                self.conn.consume();
                continue;
            }
            match self.conn.next_answer() {
                None => self.owing.set(false),
                Some(answer) if answer.kind() == AnswerKind::Command => {}
                Some(_) => self.conn.close(),
            }
        }
    }

    /// Ends a conversation in the middle: cancels the shard's query, gives it a moment to end, and closes. Calls no
    /// function of Postgres, for an error may be on its way up.
    pub fn abandon(&self) {
        Conn::stop(&[&self.conn]);
        self.conn.close();
    }
}

/// A conversation under way. Dropped before its end was read, it abandons the link.
pub struct Busy<'a>(&'a Link);

impl Busy<'_> {
    /// The conversation goes on, and its end is now the caller's duty.
    pub fn hand_over(self) {
        std::mem::forget(self);
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if self.0.conn.transaction_status() == TransactionStatus::Active {
            self.0.abandon();
        }
    }
}
