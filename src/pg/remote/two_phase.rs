//! Commits that all shards make, or none: prepare, decide, commit.
//!
//! Before the local commit every shard that wrote is told to PREPARE TRANSACTION, all before the first is waited for;
//! then the transaction's record is written in the same local transaction, so that the local commit is the decision.
//! After it, COMMIT PREPARED. What always holds: nothing is committed on any shard before the local commit is on disk; an
//! error before it rolls back what is prepared; after it nothing here raises an error, nor waits longer than
//! [`COMMIT_LIMIT`]. What could not be finished, the resolver finishes by the record (`resolve`).
//! Refuses shards that do not allow prepared transactions.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;
use shardmap_core::two_phase::{PreparedId, TransactionId};

use super::answer::Answer;
use super::commit::{is_serializable, quoted, writes};
use super::failure::{warn, Failure, Result, SqlState};
use super::link::Link;
use super::transaction::leave;
use super::wait::{forget_cancel, interrupted, Patience};
use super::{crash, record};
use crate::pg::reads::doubt;
use crate::pg::{encoding, resolver};

/// How long the committed transaction waits for the shards to commit their parts.
const COMMIT_LIMIT: Duration = Duration::from_secs(10);
/// How often it looks for a cancel meanwhile.
const SLICE: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Its transaction is as it was.
    Open,
    /// PREPARE TRANSACTION was sent, and it is not known whether it took effect.
    Sent,
    Prepared,
    /// It has no transaction any more.
    Over,
}

/// What one connection has to commit.
struct Part {
    link: Rc<Link>,
    id: PreparedId,
    state: Cell<State>,
}

impl Part {
    fn command(&self, verb: &str) -> Vec<u8> {
        format!("{verb} '{}'", self.id).into_bytes()
    }
}

thread_local! {
    /// The parts of the transaction that is committing.
    static PENDING: RefCell<Vec<Rc<Part>>> = const { RefCell::new(Vec::new()) };
}

/// An id that no other transaction has. Gives the current one its number.
fn new_id() -> Result<TransactionId> {
    let start = resolver::server_start().ok_or_else(|| {
        Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "cannot commit in more than one place unless pg_shardmap is preloaded",
        )
        .detail("Nothing would finish what a failure leaves prepared on shards.")
        .hint(
            "Add pg_shardmap to shared_preload_libraries and restart the server; or give up atomicity: \
             SET shardmap.multi_shard_commit = 'one_phase'.",
        )
    })?;
    // SAFETY: reads variables of the server, inside a transaction.
    Ok(unsafe {
        TransactionId {
            system: pg_sys::GetSystemIdentifier(),
            database: pg_sys::MyDatabaseId.to_u32(),
            transaction: pg_sys::GetTopFullTransactionId().value,
            start,
        }
    })
}

fn part(whole: TransactionId, link: &Rc<Link>, number: usize) -> Rc<Part> {
    let name = encoding::server_string(&link.target.server);
    // SAFETY: a system cache look-up.
    let server = unsafe { pg_sys::get_foreign_server_oid(name.as_ptr(), true) };
    let id = PreparedId { whole, server: server.to_u32(), part: number as u32 };
    Rc::new(Part { link: Rc::clone(link), id, state: Cell::new(State::Open) })
}

/// Prepares on every shard that wrote, and writes the record. What fails is undone by [`roll_back_prepared`]. A transaction
/// that only read is ended after the local commit, but for SERIALIZABLE, where it may fail.
pub fn prepare(links: &[Rc<Link>]) -> Result<()> {
    let whole = new_id()?;
    let (writers, readers): (Vec<_>, Vec<_>) = links.iter().partition(|link| writes(link));
    let parts: Vec<_> = writers.iter().zip(1..).map(|(link, number)| part(whole, link, number)).collect();
    resolver::note_commit();
    crash::before_commit("before_prepare", 1)?;
    PENDING.with_borrow_mut(|pending| pending.clone_from(&parts));
    for part in &parts {
        part.state.set(State::Sent);
        part.link.send_alone(&part.command("PREPARE TRANSACTION"))?;
    }
    if is_serializable() {
        readers.iter().try_for_each(|reader| reader.send_alone(b"COMMIT"))?;
    }
    crash::before_commit("prepare_sent", 1)?;
    // All are heard, so that what is known to be prepared is known to be.
    let mut failure = None;
    for (part, number) in parts.iter().zip(1..) {
        let outcome = await_prepared(part);
        failure = failure.or(outcome.err());
        if failure.is_none() {
            crash::before_commit("after_prepare", number)?;
        }
    }
    if is_serializable() {
        for reader in readers {
            let outcome =
                reader.finish(&mut Patience::Interruptible).and_then(|answer| expect(reader, &answer, "COMMIT"));
            if outcome.is_ok() {
                leave(reader);
            }
            failure = failure.or(outcome.err());
        }
    }
    failure.map_or(Ok(()), Err)?;
    links.iter().for_each(|link| link.tell_notices());
    crash::before_commit("before_decide", 1)?;
    record::write(&whole, parts.iter().map(|part| pg_sys::Oid::from(part.id.server)).collect())?;
    // SAFETY: sets a flag of the transaction: its commit is on disk before a shard hears of it.
    unsafe { pg_sys::ForceSyncCommit() };
    crash::before_commit("after_decide", 1)
}

/// Hears whether a part is prepared.
fn await_prepared(part: &Part) -> Result<()> {
    let link = &part.link;
    let outcome = link.finish(&mut Patience::Interruptible);
    if link.is_open() {
        // A PREPARE TRANSACTION that fails has rolled back.
        leave(link);
        part.state.set(State::Over);
    }
    expect(link, &outcome.map_err(|failure| explained(link, failure))?, "PREPARE TRANSACTION")?;
    part.state.set(State::Prepared);
    Ok(())
}

/// A shard's transaction that had failed takes PREPARE TRANSACTION and COMMIT for ROLLBACK.
fn expect(link: &Link, answer: &Answer, tag: &str) -> Result<()> {
    if answer.tag == tag {
        return Ok(());
    }
    let server = &link.target.server;
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION,
        format!("shard \"{server}\" has rolled the transaction back after an error in it"),
    )
    .hint("Repeat the transaction.")
    .at_shard(server))
}

fn explained(link: &Link, failure: Failure) -> Failure {
    let server = &link.target.server;
    let code = |code: PgSqlErrorCode| failure.code == SqlState::from(code);
    // Source: twophase.c: the one error of this code there is "prepared transactions are disabled".
    if code(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE) {
        return Failure::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("cannot commit in more than one place: shard \"{server}\" does not allow prepared transactions"),
        )
        .detail("The transaction wrote on several shards, or on a shard and the coordinator. Nothing was committed.")
        .hint(
            "Set max_prepared_transactions on the shard, to its max_connections say, and restart it; or give up \
             atomicity: SET shardmap.multi_shard_commit = 'one_phase'.",
        )
        .at_shard(server);
    }
    if code(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED) && failure.hint.is_none() {
        return failure.hint("Commit it without other writes, or SET shardmap.multi_shard_commit = 'one_phase'.");
    }
    failure
}

/// The local transaction is rolled back: so is what was prepared. The caller reads the outcomes of the links returned.
pub fn roll_back_prepared(deadline: Instant) -> Vec<Rc<Link>> {
    let parts = PENDING.take();
    if parts.is_empty() {
        return Vec::new();
    }
    crash::at("before_rollback", 1);
    let mut told = Vec::new();
    for part in &parts {
        let link = &part.link;
        match part.state.get() {
            State::Open | State::Over => continue,
            State::Sent | State::Prepared if !link.is_open() => {}
            State::Sent | State::Prepared => {
                leave(link);
                link.carried.set(None);
                link.send_quietly(&part.command("ROLLBACK PREPARED"), deadline);
                told.push(Rc::clone(link));
            }
        }
        if !link.is_open() {
            resolver::wake();
        }
    }
    crash::at("after_rollback", 1);
    told
}

/// The local transaction has committed: so do the shards. Raises no error.
pub fn commit_prepared() {
    let parts = PENDING.take();
    if parts.is_empty() {
        return;
    }
    crash::at("after_local_commit", 1);
    let deadline = Instant::now() + COMMIT_LIMIT;
    for part in &parts {
        part.link.send_quietly(&part.command("COMMIT PREPARED"), deadline);
    }
    crash::at("commit_sent", 1);
    let mut number = 0;
    let mut unconfirmed = Vec::new();
    for part in &parts {
        if is_settled(&part.link, deadline) && part.link.is_open() {
            number += 1;
            crash::at("after_commit", number);
        } else {
            unconfirmed.push(part.link.target.server.as_str());
            doubt::note(part.link.target.id, &part.id.to_string());
        }
    }
    // A cancel comes too late.
    forget_cancel();
    if !unconfirmed.is_empty() {
        resolver::wake();
        warn(
            Failure::new(
                PgSqlErrorCode::ERRCODE_WARNING,
                format!("transaction is committed, but not yet seen to be on shard {}", quoted(unconfirmed)),
            )
            .detail(
                "What it did there is prepared, keeps its locks, and will be committed as soon as the shard answers.",
            )
            .hint("The view shardmap.in_doubt shows such transactions."),
        );
    }
}

/// Waits for what the link owes, deaf to errors, not to a cancel.
fn is_settled(link: &Link, deadline: Instant) -> bool {
    loop {
        let now = Instant::now();
        if link.settle_quietly((now + SLICE).min(deadline)) {
            return true;
        }
        if now >= deadline || interrupted() {
            link.close();
            return false;
        }
    }
}
