//! A connection over which the same question is asked again and again, never waiting for it.
//!
//! Decides when to connect, and as whom: one after the other of the users who are mapped, until one gets in; that one stays.
//! What always holds: one question at a time is on its way; who does not answer in time is dropped and connected to anew; a
//! failure is a value. The caller waits for all its lines at once. Read `dial.rs` for connecting.

use std::ffi::CStr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::{pg_sys, PgSqlErrorCode};

use super::dial::Dial;
use super::failure::{Failure, Result};
use super::libpq::{Answer, AnswerKind, Conn};
use super::target::{Session, Target};
use super::wait::Interest;

/// The values of an answer's first row.
pub type Row = Vec<Option<String>>;

/// What to ask first on each connection, and which question its answer leads to.
pub struct Questions {
    pub first: &'static CStr,
    pub then: fn(&Row) -> &'static CStr,
}

/// A connection to one server, or the wish for one.
pub struct Line {
    /// Targets of the users who may get in, in the order in which they are tried.
    targets: Vec<Rc<Target>>,
    next_target: usize,
    questions: Questions,
    state: State,
    /// How often it has connected, or tried to.
    dials: u64,
    /// What has come of the answer under way.
    answer: Option<Result<Row>>,
}

enum State {
    Closed,
    Dialing(Dial),
    /// The first question is on its way.
    Opening(Conn),
    Ready(Conn, &'static CStr),
    /// The question is on its way since then.
    Asking(Conn, &'static CStr, Instant),
}

impl Line {
    pub fn new(targets: Vec<Rc<Target>>, questions: Questions) -> Self {
        Self { targets, next_target: 0, questions, state: State::Closed, dials: 0, answer: None }
    }

    /// Whether it was made for these targets.
    pub fn serves(&self, targets: &[Rc<Target>]) -> bool {
        let same = |(one, other): (&Rc<Target>, &Rc<Target>)| one.same_connection(other);
        self.targets.len() == targets.len() && self.targets.iter().zip(targets).all(same)
    }

    /// Connects if need be, or asks if it can.
    pub fn ask(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Closed) {
            State::Closed => self.dial(),
            State::Ready(conn, question) => self.send(conn, question),
            busy => {
                self.state = busy;
                Ok(())
            }
        }
    }

    fn dial(&mut self) -> Result<()> {
        let Some(target) = self.targets.get(self.next_target % self.targets.len().max(1)) else {
            let message = "no user mapping of the server lets anybody in";
            return Err(Failure::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message));
        };
        // Another user's turn, unless this one gets in.
        self.next_target += 1;
        self.dials += 1;
        let session = Session(vec![("statement_timeout", "10s".to_owned())]);
        self.state = State::Dialing(Dial::start(target, &session, None)?);
        Ok(())
    }

    fn send(&mut self, conn: Conn, question: &'static CStr) -> Result<()> {
        self.answer = None;
        if !conn.send_query(question) {
            return Err(self.lost(&conn));
        }
        self.state = State::Asking(conn, question, Instant::now());
        Ok(())
    }

    /// Whether something is on its way.
    pub fn is_busy(&self) -> bool {
        !matches!(self.state, State::Closed | State::Ready(..))
    }

    /// How long the question has been on its way.
    pub fn waiting_since(&self) -> Option<Instant> {
        match self.state {
            State::Asking(_, _, since) => Some(since),
            _ => None,
        }
    }

    /// Names the server's process that answers, as long as it stays the same: a connection that nothing stands between. `None`:
    /// a pooler would hide that it changes.
    pub fn session(&self) -> Option<u64> {
        self.targets.iter().all(|target| target.pooler.keeps_session()).then_some(self.dials)
    }

    pub fn is_connected(&self) -> bool {
        matches!(self.state, State::Ready(..) | State::Asking(..))
    }

    /// What to wait for before the next [`Line::step`].
    pub fn waits_for(&self) -> Option<(i32, Interest)> {
        let (socket, interest) = match &self.state {
            State::Dialing(dial) => dial.waits_for(),
            State::Opening(conn) | State::Asking(conn, ..) => (conn.socket(), Interest::Read),
            State::Closed | State::Ready(..) => return None,
        };
        (socket >= 0).then_some((socket, interest))
    }

    /// The time left to connect.
    pub fn time_left(&self) -> Option<Duration> {
        match &self.state {
            State::Dialing(dial) => dial.time_left(),
            _ => None,
        }
    }

    /// Gives up what is under way.
    pub fn hang_up(&mut self) {
        self.state = State::Closed;
    }

    /// Goes on without waiting. `Some`: the answer, with the moment at which its question left.
    pub fn step(&mut self) -> Result<Option<(Row, Instant)>> {
        match std::mem::replace(&mut self.state, State::Closed) {
            State::Dialing(mut dial) => {
                if !dial.is_ready() || !dial.step()? {
                    self.state = State::Dialing(dial);
                    return Ok(None);
                }
                self.next_target -= 1;
                let conn = dial.into_conn();
                if !conn.send_query(self.questions.first) {
                    return Err(self.lost(&conn));
                }
                self.state = State::Opening(conn);
                Ok(None)
            }
            State::Opening(conn) => {
                let Some(row) = self.read(&conn)? else {
                    self.state = State::Opening(conn);
                    return Ok(None);
                };
                let question = (self.questions.then)(&row);
                self.send(conn, question).map(|()| None)
            }
            State::Asking(conn, question, since) => {
                let Some(row) = self.read(&conn)? else {
                    self.state = State::Asking(conn, question, since);
                    return Ok(None);
                };
                self.state = State::Ready(conn, question);
                Ok(Some((row, since)))
            }
            idle => {
                self.state = idle;
                Ok(None)
            }
        }
    }

    /// The first row of the answer, once it has come to its end.
    fn read(&mut self, conn: &Conn) -> Result<Option<Row>> {
        if conn.flush().is_none() || !conn.consume() {
            return Err(self.lost(conn));
        }
        while !conn.is_busy() {
            let Some(answer) = conn.next_answer() else {
                drop(conn.take_notices());
                return self.answer.take().unwrap_or_else(|| Ok(Row::new())).map(Some);
            };
            self.answer = Some(match answer.kind() {
                AnswerKind::Error if !conn.is_ok() => return Err(self.lost(conn)),
                AnswerKind::Error => Err(Failure::from_fields(self.place(), |letter| answer.error_field(letter))),
                _ => Ok(first_row(&answer)),
            });
        }
        Ok(None)
    }

    fn place(&self) -> &str {
        self.targets.first().map_or("", |target| &target.place)
    }

    fn lost(&self, conn: &Conn) -> Failure {
        Failure::outcome_unknown(self.place()).detail(conn.error_message())
    }
}

fn first_row(answer: &Answer) -> Row {
    let text = |column| answer.value(0, column).map(|value| String::from_utf8_lossy(value).into_owned());
    (0..answer.columns()).map(text).collect()
}

/// The user mappings by which a server can be reached from here, the current user's first.
pub fn targets(server: &str, users: &[pg_sys::Oid]) -> Vec<Rc<Target>> {
    // SAFETY: reads a variable of the session.
    let own = unsafe { pg_sys::GetUserId() };
    let others = users.iter().copied().filter(|user| *user != own && *user != pg_sys::InvalidOid);
    let mut targets: Vec<Rc<Target>> = Vec::new();
    for target in std::iter::once(own).chain(others).filter_map(|user| Target::resolve(server, user).ok()) {
        if !targets.iter().any(|known| known.same_connection(&target)) {
            targets.push(Rc::new(target));
        }
    }
    targets
}
