//! The shards' transactions follow the local one: begun at first use, ended with it, savepoints mirrored.
//!
//! Decides when BEGIN, SAVEPOINT, COMMIT and ROLLBACK are sent. What always holds: an error before the first COMMIT rolls
//! back every shard; the work of a savepoint that is rolled back here is rolled back there, or the transaction can no
//! longer be committed; a transaction never goes on over a second connection after it has lost its first. Callbacks at
//! abort never raise an error: what they cannot do, they do by closing the connection.
//! Refuses PREPARE TRANSACTION. Several shards are committed one after the other, each in one phase: if one fails after
//! another has committed, the error says which.

use std::cell::Cell;
use std::ffi::{c_void, CString};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::failure::{guard, Failure, Result};
use super::libpq::{cancel_running, TransactionStatus};
use super::link::Link;
use super::pool;
use super::wait::forget_cancel;

/// How long the abort of a transaction waits for the shards to say that they have rolled back. They do so in any case.
const ROLLBACK_LIMIT: Duration = Duration::from_millis(500);
/// How long a COMMIT goes on after a cancel before its outcome is given up as unknown.
const COMMIT_GRACE: Duration = Duration::from_secs(10);

thread_local! {
    /// A shard takes part in the local transaction; else the callbacks have nothing to do.
    static TAKING_PART: Cell<bool> = const { Cell::new(false) };
    /// The shards' transactions begun so far.
    static TURN: Cell<u64> = const { Cell::new(0) };
}

/// Registers the callbacks.
pub fn init() {
    // SAFETY: the callbacks have the declared types and stay loaded for the life of the process.
    unsafe {
        pg_sys::RegisterXactCallback(Some(on_transaction), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(on_subtransaction), std::ptr::null_mut());
    }
}

fn level() -> i32 {
    // SAFETY: reads the transaction state.
    unsafe { pg_sys::GetCurrentTransactionNestLevel() }
}

fn sql(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).unwrap_or_default()
}

/// The statement that opens a shard's transaction like ours.
fn begin_statement() -> CString {
    // SAFETY: reads two variables of the transaction.
    let (isolation, read_only) = unsafe { (pg_sys::XactIsoLevel, pg_sys::XactReadOnly) };
    let isolation = match isolation as u32 {
        pg_sys::XACT_SERIALIZABLE => "SERIALIZABLE",
        pg_sys::XACT_REPEATABLE_READ => "REPEATABLE READ",
        _ => "READ COMMITTED",
    };
    sql(format!("START TRANSACTION ISOLATION LEVEL {isolation}, READ {}", if read_only { "ONLY" } else { "WRITE" }))
}

/// Brings the shard's transaction to the state in which the next statement belongs.
pub fn enter(link: &Link) -> Result<()> {
    let (begun, level) = (link.remote.begun.get(), level());
    if begun == 0 {
        link.run(&begin_statement())?;
        TURN.set(TURN.get() + 1);
        link.remote.turn.set(TURN.get());
        link.remote.begun.set(level);
        TAKING_PART.set(true);
        return Ok(());
    }
    if !link.is_open() {
        return Err(lost(link));
    }
    let top = link.remote.savepoints.borrow().last().copied().unwrap_or(begun);
    if top < level {
        let statements: Vec<_> = (top + 1..=level).map(|level| format!("SAVEPOINT s{level}")).collect();
        link.run(&sql(statements.join("; ")))?;
        link.remote.savepoints.borrow_mut().extend(top + 1..=level);
    }
    Ok(())
}

/// Checks that a statement has left the shard's transaction as it found it.
pub fn check_after(link: &Link) -> Result<()> {
    let status = link.conn.transaction_status();
    let wrong = match status {
        TransactionStatus::Idle => link.in_transaction(),
        TransactionStatus::InTransaction | TransactionStatus::InError => !link.in_transaction(),
        TransactionStatus::Active | TransactionStatus::Unknown => false,
    };
    if wrong {
        link.conn.close();
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INVALID_TRANSACTION_TERMINATION,
            "statement for a shard must not begin or end a transaction there",
        )
        .hint("The shard's transaction follows the local one: use BEGIN, COMMIT, ROLLBACK and SAVEPOINT here.")
        .at_shard(&link.target.server));
    }
    Ok(())
}

fn lost(link: &Link) -> Failure {
    let server = &link.target.server;
    Failure::new(
        PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION,
        format!("this transaction has lost its connection to shard \"{server}\""),
    )
    .detail("What it did on the shard is rolled back, so it cannot go on or be committed.")
    .hint("Roll back, and repeat the transaction.")
    .at_shard(server)
}

unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    // SAFETY: the body of a callback.
    guard(|| {
        match event {
            pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT if TAKING_PART.get() => commit()?,
            pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE if TAKING_PART.get() => {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "cannot PREPARE a transaction that has used shards",
                )
                .hint("Use COMMIT."));
            }
            pg_sys::XactEvent::XACT_EVENT_ABORT => abort(),
            _ => {}
        }
        Ok(())
    })
}

/// Commits on every shard, one after the other.
fn commit() -> Result<()> {
    let links = pool::taking_part();
    if let Some(gone) = links.iter().find(|link| !link.is_open()) {
        return Err(lost(gone));
    }
    // What a savepoint's clean-up left unread is read while a cancel can still roll everything back.
    links.iter().try_for_each(|link| link.settle())?;
    let mut committed: Vec<&str> = Vec::new();
    for (at, link) in links.iter().enumerate() {
        let outcome = commit_one(link);
        if let Err(failure) = outcome {
            let open = links[at + 1..].iter().map(|link| link.target.server.as_str()).collect::<Vec<_>>();
            return Err(if committed.is_empty() { failure } else { partly(failure, &committed, link, &open) });
        }
        link.remote.begun.set(0);
        link.remote.savepoints.borrow_mut().clear();
        committed.push(&link.target.server);
    }
    TAKING_PART.set(false);
    // A cancel comes too late now: it must not roll back here what the shards have committed.
    forget_cancel();
    for link in &links {
        link.tell_notices();
    }
    Ok(())
}

fn commit_one(link: &Link) -> Result<()> {
    let server = &link.target.server;
    let answer = link.run_commit(c"COMMIT", COMMIT_GRACE);
    match answer {
        Ok(answer) if answer.tag() == "COMMIT" => Ok(()),
        // The shard's transaction had failed: COMMIT is taken as ROLLBACK.
        Ok(_) => Err(Failure::new(
            PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION,
            format!("shard \"{server}\" has rolled the transaction back after an error in it"),
        )
        .hint("Repeat the transaction.")
        .at_shard(server)),
        Err(failure) if link.is_open() => Err(failure),
        Err(failure) => {
            let message =
                format!("connection to shard \"{server}\" was lost during COMMIT, whose outcome there is unknown");
            Err(Failure::new(PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN, message)
                .detail(failure.detail.unwrap_or_default())
                .hint(
                    "The transaction may be committed on the shard; it is rolled back here. Look before repeating it.",
                )
                .at_shard(server))
        }
    }
}

/// The failure of one shard after others have committed.
fn partly(failure: Failure, committed: &[&str], failed: &Link, open: &[&str]) -> Failure {
    let list = |names: &[&str]| names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    let failed = &failed.target.server;
    let mut detail = format!("Committed: {}. Failed: \"{failed}\": {}", list(committed), failure.to_text());
    if !open.is_empty() {
        detail.push_str(&format!("\nRolled back: {}.", list(open)));
    }
    Failure::new(
        PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN,
        format!("transaction was committed on some shards, and failed on shard \"{failed}\""),
    )
    .detail(detail)
    .hint("Undo or repeat by hand what differs between these shards. It is rolled back on the coordinator.")
    .at_shard(failed)
}

/// Rolls back on every shard. All are told before the first is waited for.
fn abort() {
    // Nothing runs here unless the backend is terminating: an error has ended what ran while it came up.
    cancel_running();
    if !TAKING_PART.replace(false) {
        return;
    }
    let deadline = Instant::now() + ROLLBACK_LIMIT;
    let links = pool::taking_part();
    for link in &links {
        roll_back(link, deadline);
    }
    for link in &links {
        link.settle_quietly(deadline);
    }
    pool::forget_closed();
}

fn roll_back(link: &Link, deadline: Instant) {
    link.remote.begun.set(0);
    link.remote.savepoints.borrow_mut().clear();
    link.send_quietly(&sql("ROLLBACK"), deadline);
}

unsafe extern "C-unwind" fn on_subtransaction(
    event: pg_sys::SubXactEvent::Type,
    _: pg_sys::SubTransactionId,
    _: pg_sys::SubTransactionId,
    _: *mut c_void,
) {
    // SAFETY: the body of a callback.
    guard(|| {
        if TAKING_PART.get() {
            match event {
                pg_sys::SubXactEvent::SUBXACT_EVENT_PRE_COMMIT_SUB => release(&pool::taking_part(), level())?,
                pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => roll_back_to(&pool::taking_part(), level()),
                _ => {}
            }
        }
        Ok(())
    })
}

/// The savepoint of `level` is released here: its work now belongs to the level below.
fn release(links: &[Rc<Link>], level: i32) -> Result<()> {
    for link in links {
        if link.remote.begun.get() >= level {
            link.remote.begun.set(level - 1);
        } else if link.remote.savepoints.borrow().last() == Some(&level) {
            if !link.is_open() {
                return Err(lost(link));
            }
            link.run(&sql(format!("RELEASE SAVEPOINT s{level}")))?;
            link.remote.savepoints.borrow_mut().pop();
        }
    }
    Ok(())
}

/// The savepoint of `level` is rolled back here.
fn roll_back_to(links: &[Rc<Link>], level: i32) {
    let deadline = Instant::now() + ROLLBACK_LIMIT;
    for link in links {
        if link.remote.begun.get() >= level {
            roll_back(link, deadline);
        } else if link.remote.savepoints.borrow().last() == Some(&level) {
            link.remote.savepoints.borrow_mut().pop();
            link.send_quietly(&sql(format!("ROLLBACK TO SAVEPOINT s{level}; RELEASE SAVEPOINT s{level}")), deadline);
        }
    }
    for link in links {
        link.settle_quietly(deadline);
    }
}
