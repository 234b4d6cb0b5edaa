//! Looks for transactions that a failure left prepared on shards, and finishes them.
//!
//! Decides nothing itself: it gathers the evidence for `shardmap_core::two_phase::decide`, in an order that makes it hold:
//! what is prepared on a shard, then which transactions are over here, then the records. A record goes when every shard
//! that it names was looked at after the record was read and has no part of it: its parts were all prepared before, so
//! that one which is gone was finished. That a shard answers "does not exist" is never taken for an outcome.
//! A prepared transaction is finished by its owner, or a superuser of the shard: every user mapping is tried until one may.

use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;
use shardmap_core::two_phase::{decide, Decision, Evidence, Local, PreparedId};

use super::failure::{Failure, Result, SqlState};
use super::pool::Connection;
use super::record::{self, Record};
use super::wait::Patience;
use crate::pg::catalog::scan;
use crate::pg::replicas::registry;
use crate::pg::resolver;

/// Prepared transactions of coordinators in the shard's database; whether this user may finish them.
const LOOK: &str = "SELECT p.gid, p.owner, to_char(p.prepared AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US+00'), \
    p.owner = current_user OR (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = current_user), \
    greatest(trunc(extract(epoch FROM clock_timestamp() - p.prepared))::bigint, 0) \
    FROM pg_prepared_xacts p WHERE p.database = current_database() AND starts_with(p.gid, 'shardmap_') ORDER BY p.prepared";
/// How long one statement may take on a shard.
const STATEMENT_LIMIT: Duration = Duration::from_secs(10);
/// A worker leaves alone what is younger: its session is about to finish it.
pub const YOUNG: Duration = Duration::from_secs(1);
/// After so many users who could not connect, the shard is taken to be down.
const MOST_FAILURES: usize = 3;

/// A prepared transaction of this coordinator.
pub struct Part {
    pub id: PreparedId,
    pub owner: String,
    /// A point in time, as Postgres reads it.
    pub prepared_at: String,
    pub decision: Decision,
    /// The current user of the shard may finish it.
    mine: bool,
    age: Duration,
    /// It was finished just now.
    pub done: bool,
    /// Why it could not be.
    pub error: Option<String>,
}

/// A shard, and what is prepared there; or why that is not known.
pub struct Shard {
    server: pg_sys::Oid,
    pub name: String,
    pub parts: Result<Vec<Part>>,
}

/// Whether this database has the extension.
pub fn is_installed() -> bool {
    record::table().is_some()
}

/// Looks at every shard. `act`: finishes what is decided and at least so old, and forgets what is finished.
///
/// # Errors
/// 25006: to act is not for a standby.
pub fn look_around(act: Option<Duration>) -> Result<Vec<Shard>> {
    if act.is_some() && is_standby() {
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            "cannot finish prepared transactions during recovery",
        )
        .hint("Call it on the primary, whose transactions they are."));
    }
    let records = record::all();
    let mappings = mappings();
    let shard = |(server, name): (pg_sys::Oid, String)| {
        let users: Vec<_> = mappings.iter().filter(|(of, _)| *of == server).map(|(_, user)| *user).collect();
        let parts = look_at(&name, &users, act);
        Shard { server, name, parts }
    };
    let shards: Vec<_> = servers().into_iter().map(shard).collect();
    if act.is_some() {
        let finished: Vec<_> = records.into_iter().filter(|record| is_finished(record, &shards)).collect();
        if !finished.is_empty() {
            record::forget(finished.into_iter().map(|record| record.id).collect());
        }
    }
    Ok(shards)
}

fn is_standby() -> bool {
    // SAFETY: reads the state of the server.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Whether anything is left to do, or unknown.
pub fn is_clean(shards: &[Shard]) -> bool {
    shards.iter().all(|shard| shard.parts.as_ref().is_ok_and(|parts| parts.iter().all(|part| part.done)))
}

fn is_finished(record: &Record, shards: &[Shard]) -> bool {
    let is_absent = |shard: &Shard| {
        shard
            .parts
            .as_ref()
            .is_ok_and(|parts| parts.iter().all(|part| part.done || part.id.whole.to_string() != record.id))
    };
    let is_known = |server: &pg_sys::Oid| shards.iter().any(|shard| shard.server == *server && is_absent(shard));
    record.servers.iter().all(is_known)
}

/// The shards: every server of our wrapper that is not a replica, where nothing can be finished, nor another coordinator,
/// which does that itself.
pub(super) fn servers() -> Vec<(pg_sys::Oid, String)> {
    // SAFETY: a system cache look-up.
    let wrapper = unsafe { pg_sys::get_foreign_data_wrapper_oid(c"shardmap_fdw".as_ptr(), true) };
    let mut servers = Vec::new();
    scan::rows(pg_sys::ForeignServerRelationId, |row| {
        if row.oid("srvfdw") == Some(wrapper) {
            servers.extend(row.oid("oid").zip(row.text("srvname")));
        }
    });
    let (replicas, coordinators) = (registry::all(), registry::coordinators());
    servers.retain(|(_, name)| !replicas.iter().any(|replica| replica.name == *name) && !coordinators.contains(name));
    servers
}

/// Servers and their mapped users; `InvalidOid` is PUBLIC.
fn mappings() -> Vec<(pg_sys::Oid, pg_sys::Oid)> {
    let mut mappings = Vec::new();
    scan::rows(pg_sys::UserMappingRelationId, |row| mappings.extend(row.oid("umserver").zip(row.oid("umuser"))));
    mappings
}

/// Looks at one shard, as the current user, then as the others until nothing is left that one of them may finish.
fn look_at(server: &str, users: &[pg_sys::Oid], act: Option<Duration>) -> Result<Vec<Part>> {
    // SAFETY: reads a variable of the session.
    let own = unsafe { pg_sys::GetUserId() };
    let others = users.iter().copied().filter(|user| *user != own);
    let (mut seen, mut failures) = (None, Vec::new());
    for user in std::iter::once(own).chain(others) {
        match look_as(server, user, act) {
            Ok(parts) => seen = Some(merge(seen, parts)),
            Err(failure) => failures.push(failure),
        }
        let unable = SqlState::from(PgSqlErrorCode::ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION);
        let is_down = failures.iter().filter(|failure| failure.code == unable).count() >= MOST_FAILURES;
        let is_over = seen.as_ref().is_some_and(|parts: &Vec<Part>| !parts.iter().any(|part| part.is_due(act)));
        if is_over || is_down {
            break;
        }
    }
    seen.ok_or_else(|| {
        failures.pop().unwrap_or_else(|| {
            Failure::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("shard \"{server}\" has no user mapping"))
        })
    })
}

impl Part {
    /// To be finished now.
    fn is_due(&self, act: Option<Duration>) -> bool {
        let is_decided = matches!(self.decision, Decision::Commit | Decision::RollBack);
        is_decided && !self.done && act.is_some_and(|least| self.age >= least)
    }

    fn finish(&mut self, connection: &Connection) {
        let verb = if self.decision == Decision::Commit { "COMMIT PREPARED" } else { "ROLLBACK PREPARED" };
        match run(connection, &format!("{verb} '{}'", self.id)) {
            Ok(_) => self.done = true,
            Err(failure) => self.error = Some(failure.to_text()),
        }
    }
}

/// What an earlier user finished, and what this one sees.
fn merge(earlier: Option<Vec<Part>>, mut now: Vec<Part>) -> Vec<Part> {
    let mut all: Vec<_> = earlier.into_iter().flatten().filter(|part| part.done).collect();
    all.append(&mut now);
    all
}

fn look_as(server: &str, user: pg_sys::Oid, act: Option<Duration>) -> Result<Vec<Part>> {
    let connection = Connection::open(server, user, false)?;
    let mut parts = look(&connection)?;
    for part in parts.iter_mut().filter(|part| part.is_due(act)) {
        if part.mine {
            part.finish(&connection);
        } else {
            let owner = &part.owner;
            part.error = Some(format!("no user mapping connects as \"{owner}\", who owns it, or as a superuser"));
        }
    }
    Ok(parts)
}

/// What is prepared on the shard, with the decisions.
fn look(connection: &Connection) -> Result<Vec<Part>> {
    let found = run(connection, LOOK)?;
    let text = |value: &Option<Box<[u8]>>| {
        value.as_deref().map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
    };
    // First what is over, then the records: see the head of this file.
    let known: Vec<_> = found
        .iter()
        .filter_map(|row| Some((PreparedId::parse(&text(row.first()?))?, row)))
        .map(|(id, row)| (id, local(&id), row))
        .collect();
    let records = if known.is_empty() { Vec::new() } else { record::all() };
    let parts = known.into_iter().map(|(id, local, row)| {
        let column = |at: usize| row.get(at).map(text).unwrap_or_default();
        let evidence = Evidence {
            ours: is_ours(&id),
            recorded: records.iter().any(|record| record.id == id.whole.to_string()),
            this_start: resolver::server_start() == Some(id.whole.start),
            local,
            age: Duration::from_secs(column(4).parse().unwrap_or(0)),
        };
        Part {
            id,
            owner: column(1),
            prepared_at: column(2),
            decision: decide(evidence),
            mine: column(3) == "t",
            age: evidence.age,
            done: false,
            error: None,
        }
    });
    Ok(parts.filter(|part| part.decision != Decision::Foreign).collect())
}

fn run(connection: &Connection, sql: &str) -> Result<Vec<Vec<Option<Box<[u8]>>>>> {
    let mut patience = Patience::Until(Instant::now() + STATEMENT_LIMIT);
    Ok(connection.link().run(sql.as_bytes(), &mut patience)?.rows)
}

fn is_ours(id: &PreparedId) -> bool {
    // SAFETY: reads variables of the server.
    let (system, database) = unsafe { (pg_sys::GetSystemIdentifier(), pg_sys::MyDatabaseId) };
    // A standby has its primary's name, and does not know what that is about.
    id.whole.system == system && id.whole.database == database.to_u32() && !is_standby()
}

/// What this server knows of the transaction's number; of another coordinator's it says nothing.
fn local(id: &PreparedId) -> Local {
    if !is_ours(id) {
        return Local::Future;
    }
    // SAFETY: reads a counter in shared memory.
    let next = unsafe { pg_sys::ReadNextFullTransactionId() }.value;
    if id.whole.transaction >= next {
        return Local::Future;
    }
    let number = pg_sys::Datum::from(id.whole.transaction);
    // SAFETY: a built-in function that takes an xid8 and returns a text or NULL; the number is not in the future.
    let status = unsafe { pgrx::direct_function_call::<String>(pg_sys::pg_xact_status, &[Some(number)]) };
    match status.as_deref() {
        Some("committed") => Local::Committed,
        Some("aborted") => Local::Aborted,
        Some(_) => Local::Running,
        None => Local::Forgotten,
    }
}
