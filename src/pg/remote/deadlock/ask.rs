//! Who waits for whom: on shards, over connections that a look makes for itself, and on this server.
//!
//! What always holds: shards are asked side by side; the asking is given up ([`Asking::ask`] returns `None`) as soon as
//! one of the watched sockets can be read, something interrupts the session, or the time is over; a shard that cannot be
//! reached, or refuses, has no waits. An ordinary user of a shard sees all that is asked: processes, their
//! application_name, and who blocks them.

use std::collections::BTreeSet;
use std::ffi::{c_int, CString};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use pgrx::pg_sys;
use shardmap_core::deadlock::{Party, Place, SessionId, Wait};

use crate::pg::remote::dial::Dial;
use crate::pg::remote::libpq::{AnswerKind, Conn};
use crate::pg::remote::source::c_string;
use crate::pg::remote::target::{Session, Target};
use crate::pg::remote::wait::{poll_socket, Interest, WaitSet, Woken};

/// Everybody who waits. Of those who wait for the same in the same mode, which only one can have, each names the one before
/// it and the first names all in its way: who is reached stays the same, and it is looked up once instead of for each.
pub const ALL: &str = "SELECT DISTINCT w.pid, a.application_name, w.since, b.pid, h.application_name FROM \
    (SELECT q.pid, q.since, CASE WHEN q.follows THEN ARRAY[q.before] ELSE pg_catalog.pg_blocking_pids(q.pid) END AS blockers \
    FROM (SELECT l.pid, (extract(epoch FROM l.waitstart) * 1000000)::bigint AS since, lag(l.pid) OVER line AS before, \
    coalesce(lag(l.mode) OVER line = l.mode AND l.mode IN ('ExclusiveLock', 'AccessExclusiveLock'), false) AS follows \
    FROM pg_catalog.pg_locks l WHERE NOT l.granted AND l.waitstart IS NOT NULL WINDOW line AS (PARTITION BY l.locktype, \
    l.database, l.relation, l.page, l.tuple, l.virtualxid, l.transactionid::text, l.classid, l.objid, l.objsubid \
    ORDER BY l.waitstart, l.pid)) q) w";
/// The same of some processes, without that.
const SOME: &str = "SELECT DISTINCT w.pid, a.application_name, w.since, b.pid, h.application_name FROM \
    (SELECT l.pid, (extract(epoch FROM l.waitstart) * 1000000)::bigint AS since, pg_catalog.pg_blocking_pids(l.pid) AS blockers \
    FROM pg_catalog.pg_locks l WHERE NOT l.granted AND l.waitstart IS NOT NULL AND l.pid = ANY (ARRAY[";
/// What both go on with. A prepared transaction is process 0.
const NAMES: &str = " CROSS JOIN LATERAL unnest(w.blockers) AS b (pid) \
    LEFT JOIN pg_catalog.pg_stat_get_activity(NULL) a ON a.pid = w.pid \
    LEFT JOIN pg_catalog.pg_stat_get_activity(NULL) h ON h.pid = b.pid WHERE b.pid <> 0";

/// The question for who blocks these processes.
pub fn some(pids: &BTreeSet<i32>) -> String {
    let pids = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    format!("{SOME}{pids}]::int[])) w")
}

enum State {
    Unconnected,
    Dialing(Dial),
    Asked(Conn),
    Ready(Conn),
    /// It cannot be asked.
    Silent,
}

/// A shard, and the look's connection to it.
pub struct Shard {
    pub server: u32,
    target: Rc<Target>,
    state: State,
}

impl Shard {
    pub fn new(server: u32, target: Rc<Target>) -> Self {
        Self { server, target, state: State::Unconnected }
    }

    pub fn name(&self) -> &str {
        &self.target.server
    }

    fn begin(&mut self, sql: &CString) {
        self.state = match std::mem::replace(&mut self.state, State::Silent) {
            State::Unconnected => {
                // The shard ends by itself what nobody waits for any more.
                let limit = ("statement_timeout", super::LIMIT.as_millis().to_string());
                let session = Session(vec![("search_path", "pg_catalog".to_owned()), limit]);
                Dial::start(&self.target, &session, None).map_or(State::Silent, State::Dialing)
            }
            State::Ready(conn) => asked(conn, sql),
            _ => State::Silent,
        }
    }

    fn waits_for(&self) -> Option<(c_int, Interest)> {
        match &self.state {
            State::Dialing(dial) => Some(dial.waits_for()),
            State::Asked(conn) => Some((conn.socket(), Interest::Read)),
            _ => None,
        }
        .filter(|(socket, _)| *socket >= 0)
    }

    /// Does what can be done without waiting.
    fn step(&mut self, sql: &CString, waits: &mut Vec<Wait>) {
        self.state = match std::mem::replace(&mut self.state, State::Silent) {
            State::Dialing(dial) if !dial.is_ready() => State::Dialing(dial),
            State::Dialing(mut dial) => match dial.step() {
                Ok(true) => asked(dial.into_conn(), sql),
                Ok(false) => State::Dialing(dial),
                Err(_) => State::Silent,
            },
            State::Asked(conn) => self.hear(conn, waits),
            other => other,
        }
    }

    fn hear(&self, conn: Conn, waits: &mut Vec<Wait>) -> State {
        if conn.flush().is_none() || !conn.consume() {
            return State::Silent;
        }
        while !conn.is_busy() {
            let Some(answer) = conn.next_answer() else { return State::Ready(conn) };
            if answer.kind() != AnswerKind::Rows {
                return State::Silent;
            }
            let text = |row, column| answer.value(row, column).and_then(|value| std::str::from_utf8(value).ok());
            let number = |row, column| text(row, column).and_then(|value| value.parse::<i64>().ok());
            for row in 0..answer.rows() {
                let (Some(pid), Some(since), Some(holder)) = (number(row, 0), number(row, 2), number(row, 3)) else {
                    continue;
                };
                let place = Place::Shard(self.server);
                let party = |pid: i32, name: Option<&str>| {
                    name.and_then(SessionId::find).map_or(Party::Stranger(place, pid), Party::Session)
                };
                let (pid, holder_pid) = (pid as i32, holder as i32);
                let (waiter, holder) = (party(pid, text(row, 1)), party(holder_pid, text(row, 4)));
                waits.push(Wait { place, waiter, pid, since, holder, holder_pid });
            }
        }
        State::Asked(conn)
    }
}

fn asked(conn: Conn, sql: &CString) -> State {
    if conn.send_query(sql) {
        State::Asked(conn)
    } else {
        State::Silent
    }
}

/// How long to ask.
pub struct Asking {
    watched: Vec<c_int>,
    deadline: Instant,
}

impl Asking {
    /// Until one of the sockets can be read, or `deadline`.
    pub fn new(watched: Vec<c_int>, deadline: Instant) -> Self {
        Self { watched, deadline }
    }

    /// Who waits on these shards. `None`: given up.
    pub fn ask(&self, mut shards: Vec<&mut Shard>, question: &str) -> Option<Vec<Wait>> {
        let sql = c_string(format!("{question}{NAMES}"));
        let mut waits = Vec::new();
        shards.iter_mut().for_each(|shard| shard.begin(&sql));
        loop {
            let mut sockets: Vec<_> = shards.iter().filter_map(|shard| shard.waits_for()).collect();
            if sockets.is_empty() {
                return Some(waits);
            }
            sockets.extend(self.watched.iter().map(|socket| (*socket, Interest::Read)));
            let left = self.deadline.saturating_duration_since(Instant::now());
            let woken = WaitSet::new(&sockets).wait(Some(left));
            // SAFETY: a flag that signal handlers set.
            let interrupted = woken == Woken::Latch && unsafe { pg_sys::InterruptPending != 0 };
            let answered = || self.watched.iter().any(|socket| poll_socket(*socket, Interest::Read, Instant::now()));
            if interrupted || answered() {
                return None;
            }
            if left.is_zero() {
                return Some(waits);
            }
            shards.iter_mut().for_each(|shard| shard.step(&sql, &mut waits));
        }
    }
}

/// Whom a session of this server waits for here.
pub fn local(session: SessionId) -> Vec<Wait> {
    // SAFETY: searches shared memory under its own lock. The entry may become another process' at any time: what is read
    // is a number, and a look counts only if it is found twice.
    let since = unsafe {
        let process = pg_sys::BackendPidGetProc(session.pid);
        if process.is_null() {
            return Vec::new();
        }
        let start = std::ptr::addr_of!((*process).waitStart.value).cast::<AtomicU64>();
        (*start).load(Ordering::Relaxed) as i64
    };
    if since == 0 {
        return Vec::new();
    }
    let pid = pg_sys::Datum::from(session.pid);
    // SAFETY: a built-in function of this type. It takes and frees the locks on the table of locks.
    let holders: Option<Vec<i32>> = unsafe { pgrx::direct_function_call(pg_sys::pg_blocking_pids, &[Some(pid)]) };
    let wait = |holder: i32| Wait {
        place: Place::Here,
        waiter: Party::Session(session),
        pid: session.pid,
        since,
        holder: Party::Session(SessionId { pid: holder, ..session }),
        holder_pid: holder,
    };
    holders.into_iter().flatten().filter(|holder| *holder != 0).map(wait).collect()
}
