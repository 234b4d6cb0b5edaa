//! One statement on many shards at once, each in a session of its own that ends with it.
//!
//! For administrators. What always holds: a shard's failure is a value in its row and does not stop the others; nothing of
//! the statement (settings, temporary tables, locks) stays behind in a session that something else will use; no more
//! shards are busy at a time than `shardmap.max_fanout_width` says; a cancel ends the statement on all of them. Each shard commits by itself, outside
//! the local transaction. Questions, which leave nothing behind, share sessions as long as the local transaction lasts (`kept`).

use std::collections::VecDeque;
use std::ffi::CStr;
use std::rc::Rc;
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::admit;
use super::dial::Dial;
use super::failure::{pass_on, place, Failure, Result};
use super::json::push_row;
use super::kept;
use super::libpq::{Answer, AnswerKind, Conn, TransactionStatus};
use super::target::{Session, Target};
use super::wait::{wait_any, Interest};
use crate::pg::reads::session::note_write;
use crate::pg::replicas::registry;
use crate::pg::settings;

/// Rows returned of each shard.
const MAX_ROWS: usize = 1000;

/// What a statement gave on one shard: its command tag, and its rows, if it returns rows, as a JSON array.
pub struct Outcome {
    pub shard: String,
    pub result: Result<(String, Option<Vec<u8>>)>,
}

/// Runs `sql` on each of `shards` as `user`, with the caller's search_path and TimeZone. The outcomes are in the order
/// of `shards`.
pub fn run_everywhere(shards: &[String], user: pg_sys::Oid, sql: &CStr) -> Vec<Outcome> {
    run(shards, user, sql, false)
}

/// As [`run_everywhere`], for statements that write nothing and leave nothing behind in their session.
pub fn ask_everywhere(shards: &[String], user: pg_sys::Oid, sql: &CStr) -> Vec<Outcome> {
    run(shards, user, sql, true)
}

fn run(shards: &[String], user: pg_sys::Oid, sql: &CStr, asks: bool) -> Vec<Outcome> {
    let replicas = registry::all();
    let is_replica = |name: &str| replicas.iter().any(|replica| replica.name == name);
    let session = Session::plain(setting(c"search_path"), setting(c"TimeZone"));
    let mut waiting: VecDeque<usize> = (0..shards.len()).collect();
    let mut results: Vec<Option<Result<_>>> = shards.iter().map(|_| None).collect();
    let mut running = Running(Vec::new());
    loop {
        while running.0.len() < settings::fanout_width() {
            let Some(at) = waiting.pop_front() else { break };
            let alone = running.0.is_empty();
            let begun = Target::resolve(&shards[at], user).map(Rc::new).and_then(|target| {
                // Whether it writes, nobody knows.
                if !asks && !is_replica(&shards[at]) {
                    note_write(target.id);
                }
                let kept = if asks { kept::take(&target) } else { None };
                let state = match kept {
                    Some(conn) => Some(State::Ready(conn)),
                    None => admit::start(&target, &session, alone)?.map(State::Dialing),
                };
                Ok(state.map(|state| (target, state)))
            });
            match begun {
                Ok(Some((target, state))) => {
                    running.0.push(Talk { at, shard: &shards[at], keeps: asks.then_some(target), state });
                }
                // There is no place: those at work come first.
                Ok(None) => {
                    waiting.push_front(at);
                    break;
                }
                Err(failure) => results[at] = Some(Err(failure)),
            }
        }
        if running.0.is_empty() {
            break;
        }
        let sockets: Vec<_> = running.0.iter().map(Talk::waits_for).collect();
        wait_any(&sockets, running.0.iter().filter_map(Talk::time_left).min());
        running.0.retain_mut(|talk| match talk.step(sql) {
            Ok(None) => true,
            Ok(Some(done)) => {
                results[talk.at] = Some(Ok(done));
                false
            }
            Err(failure) => {
                results[talk.at] = Some(Err(failure));
                false
            }
        });
    }
    let shards = shards.iter().cloned();
    shards.zip(results.into_iter().flatten()).map(|(shard, result)| Outcome { shard, result }).collect()
}

/// The session's value of a setting.
fn setting(name: &CStr) -> String {
    // SAFETY: null or a string that lives until the setting changes.
    let value = unsafe { pg_sys::GetConfigOption(name.as_ptr(), true, false) };
    if value.is_null() {
        return String::new();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned()
}

struct Talk<'a> {
    at: usize,
    shard: &'a str,
    /// Its connection is put by when it has answered.
    keeps: Option<Rc<Target>>,
    state: State,
}

enum State {
    /// Connected, and nothing sent.
    Ready(Conn),
    Dialing(Dial),
    Talking(Conn, Collected),
    Over,
}

impl Talk<'_> {
    fn waits_for(&self) -> (i32, Interest) {
        match &self.state {
            State::Ready(conn) => (conn.socket(), Interest::Write),
            State::Dialing(dial) => dial.waits_for(),
            State::Talking(conn, collected) => {
                (conn.socket(), if collected.sent { Interest::Read } else { Interest::ReadOrWrite })
            }
            State::Over => (-1, Interest::Read),
        }
    }

    fn time_left(&self) -> Option<Duration> {
        match &self.state {
            State::Dialing(dial) => dial.time_left(),
            _ => None,
        }
    }

    /// Does what can be done without waiting. `Ok(Some(..))`: the statement is over.
    fn step(&mut self, sql: &CStr) -> Result<Option<(String, Option<Vec<u8>>)>> {
        if let State::Dialing(dial) = &mut self.state {
            if !dial.is_ready() || !dial.step()? {
                return Ok(None);
            }
            let State::Dialing(dial) = std::mem::replace(&mut self.state, State::Over) else { return Ok(None) };
            self.state = State::Ready(dial.into_conn());
        }
        if matches!(self.state, State::Ready(_)) {
            let State::Ready(conn) = std::mem::replace(&mut self.state, State::Over) else { return Ok(None) };
            if !conn.send_query(sql) {
                return Err(self.lost(&conn.error_message()));
            }
            conn.single_row_mode();
            self.state = State::Talking(conn, Collected::default());
        }
        let State::Talking(conn, collected) = &mut self.state else { return Ok(None) };
        collected.sent = conn.flush().unwrap_or(true);
        conn.consume();
        while !conn.is_busy() {
            let Some(answer) = conn.next_answer() else {
                pass_on(&place(self.shard, None), conn.take_notices());
                let State::Talking(conn, collected) = std::mem::replace(&mut self.state, State::Over) else {
                    return Ok(None);
                };
                if let Some(target) = self.keeps.take() {
                    kept::put(target, conn);
                }
                return collected.done().map(Some);
            };
            if answer.kind() == AnswerKind::Error && !conn.is_ok() {
                let said = answer.error_field(b'M').unwrap_or_else(|| conn.error_message());
                return Err(self.lost(&said));
            }
            collected.add(self.shard, &answer)?;
        }
        Ok(None)
    }

    fn lost(&self, said: &str) -> Failure {
        Failure::outcome_unknown(&place(self.shard, None)).detail(said)
    }
}

/// The results of one shard so far.
#[derive(Default)]
struct Collected {
    /// All of the statement has left.
    sent: bool,
    tag: String,
    /// Of the statement under way, and whether it has ended, so that the next row begins anew.
    rows: Vec<u8>,
    count: usize,
    returns_rows: bool,
    ended: bool,
    failure: Option<Failure>,
}

impl Collected {
    fn add(&mut self, shard: &str, answer: &Answer) -> Result<()> {
        if std::mem::take(&mut self.ended) {
            (self.count, self.returns_rows) = (0, false);
            self.rows.clear();
        }
        match answer.kind() {
            AnswerKind::Error => {
                self.failure = self
                    .failure
                    .take()
                    .or_else(|| Some(Failure::from_fields(&place(shard, None), |letter| answer.error_field(letter))))
            }
            AnswerKind::CopyIn | AnswerKind::CopyOut => {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "COPY from or to the client cannot be run on a shard this way",
                )
                .hint("Use INSERT or SELECT, or COPY the table on the coordinator."))
            }
            kind => {
                for row in 0..answer.rows() {
                    if self.count < MAX_ROWS {
                        self.rows.push(if self.count == 0 { b'[' } else { b',' });
                        push_row(answer, row, &mut self.rows);
                    }
                    self.count += 1;
                }
                self.returns_rows |= kind != AnswerKind::Command;
                if kind != AnswerKind::Row {
                    self.ended = true;
                    self.tag = answer.tag();
                }
            }
        }
        Ok(())
    }

    fn done(mut self) -> Result<(String, Option<Vec<u8>>)> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        if self.rows.is_empty() {
            self.rows.push(b'[');
        }
        self.rows.push(b']');
        Ok((self.tag, self.returns_rows.then_some(self.rows)))
    }
}

/// The shards being asked. Dropped early, it cancels what they run: all are told before the first is waited for.
struct Running<'a>(Vec<Talk<'a>>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let active = self.0.iter().filter_map(|talk| match &talk.state {
            State::Talking(conn, _) if conn.transaction_status() == TransactionStatus::Active => Some(conn),
            _ => None,
        });
        Conn::stop(&active.collect::<Vec<_>>());
    }
}
