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
use super::slots::Slot;
use super::target::{password_required, Session, Target};
use super::wait::{wait_any, Interest};

/// Source: errcodes.txt, too_many_connections.
const FULL: &str = "53300";

pub struct Dial {
    target: Rc<Target>,
    conn: Conn,
    deadline: Option<Instant>,
    next: Poll,
}

impl Dial {
    /// `slot`: the connection's place, if it is counted.
    pub fn start(target: &Rc<Target>, session: &Session, slot: Option<Slot>) -> Result<Self> {
        let conn = Conn::start(&target.parameters(session), slot)?;
        let dial = Self {
            target: Rc::clone(target),
            conn,
            deadline: target.connect_timeout().map(|timeout| Instant::now() + timeout),
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
                let place = &self.target.place;
                Err(password_required("The shard let this user in without asking for the password.").at(place))
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

    fn failed(&self, said: &str) -> Failure {
        let (code, detail) = without_code(said);
        let code = match code {
            Some(FULL) => PgSqlErrorCode::ERRCODE_TOO_MANY_CONNECTIONS,
            _ => PgSqlErrorCode::ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        };
        // Source: PgBouncer: "unsupported startup parameter: options".
        let is_pooler = detail.contains("unsupported startup parameter");
        let failure = Failure::new(code, format!("could not connect to {}", self.target.place)).detail(detail);
        if is_pooler {
            return failure.hint(
                "For a pooler before the shard: ALTER SERVER ... OPTIONS (ADD pooler 'transaction'), or let it ignore \
                 the parameter.",
            );
        }
        failure.hint("Check that it runs and that its foreign server and user mapping hold its address and user.")
    }
}

/// The last SQLSTATE in what libpq says when it is verbose, and the words without it and the place in the source.
///
/// Source: libpq's manual, PQERRORS_VERBOSE: "FATAL:  53300: sorry, too many clients already", and a line with the place.
fn without_code(said: &str) -> (Option<&str>, String) {
    let (mut code, mut lines) = (None, Vec::new());
    let mut after_code = false;
    for line in said.lines() {
        let found = line.split_once(":  ").and_then(|(before, rest)| {
            let (found, words) = rest.split_once(": ")?;
            let is_code = found.len() == 5 && found.bytes().all(|c| c.is_ascii_digit() || c.is_ascii_uppercase());
            is_code.then_some((found, format!("{before}:  {words}")))
        });
        let is_place = after_code && line.rsplit_once(".c:").is_some_and(|(_, number)| number.parse::<u32>().is_ok());
        match found {
            Some((found, words)) => {
                (code, after_code) = (Some(found), true);
                lines.push(words);
            }
            None if is_place => after_code = false,
            None => lines.push(line.to_owned()),
        }
    }
    (code, lines.join("\n"))
}
