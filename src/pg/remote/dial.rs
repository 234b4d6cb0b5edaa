//! Making a connection, step by step, so that several can be made at once.
//!
//! What always holds: the wait is interruptible and ends at the target's connect_timeout; a connection that is handed
//! out has passed the rule on passwords. Looking up a host's name waits by itself, in libpq: give `hostaddr` where that
//! matters.

use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Result};
use super::libpq::{Conn, Poll};
use super::target::{password_required, Session, Target};
use super::wait::{wait_any, Interest};

pub struct Dial {
    target: Rc<Target>,
    conn: Conn,
    deadline: Option<Instant>,
    next: Poll,
}

impl Dial {
    pub fn start(target: &Rc<Target>, session: &Session) -> Result<Self> {
        let conn = Conn::start(&target.parameters(session))?;
        let dial = Self {
            target: Rc::clone(target),
            conn,
            deadline: target.connect_timeout.map(|timeout| Instant::now() + timeout),
            // Source: libpq's manual: before the first PQconnectPoll behave as if it had asked to write.
            next: Poll::Write,
        };
        if dial.conn.is_broken() {
            return Err(dial.failed(&dial.conn.error_message()));
        }
        Ok(dial)
    }

    /// What to wait for before the next [`Dial::step`].
    pub fn waits_for(&self) -> (i32, Interest) {
        (self.conn.socket(), if self.next == Poll::Read { Interest::Read } else { Interest::Write })
    }

    /// The time left to connect; `None`: no limit.
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Goes on without waiting. `Ok(true)`: connected. Call it when the socket is ready, or the time is up.
    pub fn step(&mut self) -> Result<bool> {
        if self.time_left() == Some(Duration::ZERO) {
            return Err(self.failed("The time allowed for it (connect_timeout) is over."));
        }
        self.next = self.conn.poll_connect();
        match self.next {
            Poll::Read | Poll::Write => Ok(false),
            Poll::Failed => Err(self.failed(&self.conn.error_message())),
            Poll::Ready if self.target.needs_password && !self.conn.used_password() => {
                let server = &self.target.server;
                Err(password_required("The shard let this user in without asking for the password.").at_shard(server))
            }
            Poll::Ready => Ok(true),
        }
    }

    /// The connection, once [`Dial::step`] has said that it is made.
    pub fn into_conn(self) -> Conn {
        self.conn
    }

    /// Waits until the connection is made.
    pub fn wait(mut self) -> Result<Conn> {
        loop {
            wait_any(&[self.waits_for()], self.time_left());
            if self.is_ready() && self.step()? {
                return Ok(self.into_conn());
            }
        }
    }

    /// Whether [`Dial::step`] would do something.
    pub fn is_ready(&self) -> bool {
        let (socket, interest) = self.waits_for();
        self.time_left() == Some(Duration::ZERO) || super::wait::poll_socket(socket, interest, Instant::now())
    }

    fn failed(&self, detail: &str) -> Failure {
        let message = format!("could not connect to shard \"{}\"", self.target.server);
        Failure::new(PgSqlErrorCode::ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION, message)
            .detail(detail)
            .hint("Check that the shard runs and that its foreign server and user mapping hold its address and user.")
    }
}
