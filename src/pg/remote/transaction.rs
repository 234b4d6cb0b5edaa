//! The shards' transactions follow the local one: begun at first use, ended with it, savepoints mirrored.
//!
//! Decides when BEGIN, SAVEPOINT, COMMIT and ROLLBACK are sent. What always holds: an error before the first COMMIT rolls
//! back every shard; the work of a savepoint that is rolled back here is rolled back there, or the transaction can no
//! longer be committed; a transaction never goes on over a second connection after it has lost its first. Callbacks at
//! abort never raise an error: what they cannot do, they do by closing the connection.
//! Refuses PREPARE TRANSACTION. Read next: `commit`, `two_phase`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::failure::{guard, Failure, Result};
use super::libpq::cancel_running;
use super::link::Link;
use super::pool;
use super::wait::forget_cancel;
use super::wire::decode::Status;
use super::{cleanup, commit, kept, two_phase};
use crate::pg::alone::ends_transaction;
use crate::pg::reads::{session, snapshot};
use crate::pg::{reference, savepoint};

/// How long the abort of a transaction waits for the shards to say that they have rolled back. They do so in any case.
const ROLLBACK_LIMIT: Duration = Duration::from_millis(500);

/// A shard's table into which rows go.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    /// COPY writes what INSERT would.
    pub takes_copy: bool,
    /// Every column has the type of ours, as far as that has the same name everywhere.
    pub has_our_types: bool,
}

/// An INSERT, and the types of what it inserts.
type Insert = (Box<[u8]>, Box<[pg_sys::Oid]>);

/// How the shard's transaction stands to ours.
#[derive(Default)]
pub struct Remote {
    /// The nesting level of the local transaction at which BEGIN was sent; 0: no transaction is open.
    pub begun: Cell<i32>,
    /// Counts the transactions begun by this backend, so that shards are committed in the order of their first use.
    pub turn: Cell<u64>,
    /// The levels above it for which a savepoint was set.
    pub savepoints: RefCell<Vec<i32>>,
    /// Something may have been written, or may fail, at COMMIT.
    pub wrote: Cell<bool>,
    /// The shard allows prepared transactions, as far as it was asked.
    pub prepares: Cell<bool>,
    /// What is known of tables as long as the transaction keeps its locks, by the INSERT for them.
    pub tables: RefCell<HashMap<Insert, Found>>,
    /// It is a replica: its transactions only read, and nothing is lost with one.
    pub reads_only: Cell<bool>,
}

thread_local! {
    /// A shard takes part in the local transaction; else the callbacks have nothing to do.
    static TAKING_PART: Cell<bool> = const { Cell::new(false) };
    /// Interrupts are held until the end of the transaction.
    static HOLDING: Cell<bool> = const { Cell::new(false) };
    /// An administrator's function has done something on a shard in this transaction.
    static ADMINISTERS: Cell<bool> = const { Cell::new(false) };
    /// The shards' transactions begun so far.
    static TURN: Cell<u64> = const { Cell::new(0) };
    /// What the transaction's only statement reads of one shard, it reads in one snapshot.
    static SHARES_SNAPSHOTS: Cell<bool> = const { Cell::new(false) };
    /// Shards are brought to this level of ours at most.
    static HIGHEST: Cell<i32> = const { Cell::new(i32::MAX) };
}

/// Registers the callbacks.
pub fn init() {
    // SAFETY: the callbacks have the declared types and stay loaded for the life of the process.
    unsafe {
        pg_sys::RegisterXactCallback(Some(on_transaction), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(on_subtransaction), std::ptr::null_mut());
    }
}

/// Runs `body` as if it were called at `level`: for work that was taken on there, and is done while a level above is open.
pub fn at_level<T>(level: i32, body: impl FnOnce() -> T) -> T {
    struct Back(i32);
    impl Drop for Back {
        fn drop(&mut self) {
            HIGHEST.set(self.0);
        }
    }
    let _back = Back(HIGHEST.replace(level));
    body()
}

/// The statement that starts is all that the transaction does, and only reads: its scans of one shard, which are statements
/// of their own there, are to see the same rows.
pub fn share_snapshots() {
    SHARES_SNAPSHOTS.set(is_untouched());
}

/// A shard may have to be told of the transaction's end, though nothing was sent to it yet.
pub fn expect() {
    TAKING_PART.set(true);
}

/// The statement that opens a shard's transaction like ours.
fn begin_statement(link: &Link) -> String {
    // SAFETY: reads three variables of the transaction.
    let (isolation, read_only, deferrable) =
        unsafe { (pg_sys::XactIsoLevel, pg_sys::XactReadOnly, pg_sys::XactDeferrable) };
    let read_only = read_only || link.remote.reads_only.get();
    // SAFETY: the statement is the transaction's only one so far.
    let shares = SHARES_SNAPSHOTS.get() && unsafe { ends_transaction() };
    let isolation = match isolation as u32 {
        pg_sys::XACT_SERIALIZABLE => "SERIALIZABLE",
        pg_sys::XACT_REPEATABLE_READ => "REPEATABLE READ",
        _ if shares => "REPEATABLE READ",
        _ => "READ COMMITTED",
    };
    let access = if read_only { "READ ONLY" } else { "READ WRITE" };
    // It means something in this combination only.
    let deferrable = if deferrable && read_only && isolation == "SERIALIZABLE" { ", DEFERRABLE" } else { "" };
    format!("START TRANSACTION ISOLATION LEVEL {isolation}, {access}{deferrable}")
}

/// The commands that bring the shard's transaction to the state in which the next statement belongs. They count as done:
/// send them at once.
pub fn enter(link: &Link) -> Result<Vec<Vec<u8>>> {
    let (begun, level) = (link.remote.begun.get(), savepoint::depth().min(HIGHEST.get()));
    if begun == 0 {
        TURN.set(TURN.get() + 1);
        link.remote.turn.set(TURN.get());
        link.remote.begun.set(level);
        link.remote.wrote.set(false);
        link.remote.tables.borrow_mut().clear();
        if !link.target.pooler.keeps_session() {
            link.carried.set(None);
        }
        TAKING_PART.set(true);
        return Ok(vec![begin_statement(link).into_bytes()]);
    }
    if !link.is_open() {
        return Err(lost(link));
    }
    let top = link.remote.savepoints.borrow().last().copied().unwrap_or(begun);
    if top >= level {
        return Ok(Vec::new());
    }
    link.remote.savepoints.borrow_mut().extend(top + 1..=level);
    Ok((top + 1..=level).map(|level| format!("SAVEPOINT s{level}").into_bytes()).collect())
}

/// Whether nothing has been done on any shard in this transaction.
pub fn is_untouched() -> bool {
    !TAKING_PART.get()
}

/// Notes that an administrator's function does something on a shard.
pub fn note_administration() {
    ADMINISTERS.set(true);
}

/// Whether one has in this transaction.
pub fn administers() -> bool {
    ADMINISTERS.get()
}

/// What the transaction was for is committed on a shard: nothing may stop it any more from ending well here.
pub fn hold_interrupts() {
    if !HOLDING.replace(true) {
        forget_cancel();
        // SAFETY: a counter of this process.
        unsafe { pg_sys::InterruptHoldoffCount += 1 }
    }
}

/// The end of the transaction. (An error has let go already.)
fn resume_interrupts() {
    // SAFETY: as in `hold_interrupts`.
    unsafe {
        if HOLDING.replace(false) && pg_sys::InterruptHoldoffCount > 0 {
            pg_sys::InterruptHoldoffCount -= 1;
        }
    }
}

/// The shard has no transaction of ours any more.
pub fn leave(link: &Link) {
    link.remote.begun.set(0);
    link.remote.savepoints.borrow_mut().clear();
}

/// Gives up what the transaction has read from a replica, which is to be asked nothing more in it.
pub fn give_up(link: &Link) {
    if link.in_transaction() {
        link.close();
        leave(link);
    }
}

/// What a statement's failure means for the shard's transaction and session.
pub fn after_failure(link: &Link, failure: Failure) -> Failure {
    link.carried.set(None);
    if link.status() == Status::Idle {
        // BEGIN itself has failed, or there was none.
        leave(link);
    }
    failure
}

/// Checks that a statement has left the shard's transaction as it found it.
pub fn check_after(link: &Link) -> Result<()> {
    let wrong = link.is_open() && (link.status() == Status::Idle) == link.in_transaction();
    if wrong {
        link.close();
        return Err(Failure::new(
            PgSqlErrorCode::ERRCODE_INVALID_TRANSACTION_TERMINATION,
            "statement for a shard must not begin or end a transaction there",
        )
        .hint("The shard's transaction follows the local one: use BEGIN, COMMIT, ROLLBACK and SAVEPOINT here.")
        .at(&link.target.place));
    }
    Ok(())
}

fn lost(link: &Link) -> Failure {
    let place = &link.target.place;
    Failure::new(
        PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION,
        format!("this transaction has lost its connection to {place}"),
    )
    .detail("What it did on the shard is rolled back, so it cannot go on or be committed.")
    .hint("Roll back, and repeat the transaction.")
    .at(place)
}

unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    // SAFETY: the body of a callback.
    guard(|| {
        if matches!(event, pg_sys::XactEvent::XACT_EVENT_COMMIT | pg_sys::XactEvent::XACT_EVENT_ABORT) {
            resume_interrupts();
            ADMINISTERS.set(false);
            SHARES_SNAPSHOTS.set(false);
            session::forget_pins();
            snapshot::forget();
        }
        match event {
            pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT if TAKING_PART.get() => commit()?,
            pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE if TAKING_PART.get() => {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "cannot PREPARE a transaction that has used shards",
                )
                .hint("Use COMMIT."));
            }
            // Neither of the two may fail.
            pg_sys::XactEvent::XACT_EVENT_COMMIT => committed(),
            pg_sys::XactEvent::XACT_EVENT_ABORT => abort(),
            _ => {}
        }
        let is_end = [
            pg_sys::XactEvent::XACT_EVENT_COMMIT,
            pg_sys::XactEvent::XACT_EVENT_ABORT,
            pg_sys::XactEvent::XACT_EVENT_PREPARE,
        ];
        if is_end.contains(&event) {
            kept::close(None);
            pool::rest();
        }
        Ok(())
    })
}

/// Commits on the shards, or brings them to where nothing but the local commit decides.
fn commit() -> Result<()> {
    reference::flush()?;
    leave_lost_replicas();
    let links = pool::taking_part();
    links.iter().filter(|link| commit::writes(link)).for_each(|link| session::note_write(link.target.id));
    if let Some(gone) = links.iter().find(|link| !link.is_open()) {
        return Err(lost(gone));
    }
    // What a savepoint's clean-up left unread, or a cursor, is read while a cancel can still roll everything back.
    links.iter().try_for_each(|link| link.make_ready())?;
    // A shard that only read may have held row locks: they went with its connection, and what was done since rests on them.
    // SAFETY: reads the transaction's state.
    if unsafe { pg_sys::IsTransactionBlock() } {
        let is_gone = |link: &&Rc<Link>| !link.remote.reads_only.get() && !commit::writes(link) && !link.is_fit();
        if let Some(gone) = links.iter().find(is_gone) {
            return Err(lost(gone));
        }
    }
    if !commit::run(&links)? {
        return Ok(());
    }
    TAKING_PART.set(false);
    // A cancel comes too late now: it must not roll back here what the shards have committed.
    forget_cancel();
    links.iter().for_each(|link| link.tell_notices());
    Ok(())
}

/// Lets go of replicas whose connections are lost: nothing is lost with them, and what they have answered still counts.
fn leave_lost_replicas() {
    let is_lost = |link: &&Rc<Link>| link.remote.reads_only.get() && !link.is_open();
    pool::taking_part().iter().filter(is_lost).for_each(|link| leave(link));
}

/// The local transaction has committed.
fn committed() {
    if TAKING_PART.replace(false) {
        two_phase::commit_prepared();
        pool::taking_part().iter().for_each(|link| commit::end(link));
        pool::forget_closed();
    }
}

/// Rolls back on every shard. All are told before the first is waited for.
fn abort() {
    // Nothing runs here unless the backend is terminating, or rows of a portal were on their way: an error has ended what
    // ran while it came up.
    cancel_running();
    pool::forget_unsent(1);
    cleanup::abandon(&pool::active().iter().map(|link| &**link).collect::<Vec<_>>());
    if !TAKING_PART.replace(false) {
        return;
    }
    let deadline = Instant::now() + ROLLBACK_LIMIT;
    let mut links = two_phase::roll_back_prepared(deadline);
    for link in pool::taking_part() {
        roll_back(&link, deadline);
        links.push(link);
    }
    for link in &links {
        link.settle_quietly(deadline);
    }
    pool::forget_closed();
}

fn roll_back(link: &Link, deadline: Instant) {
    link.carried.set(None);
    leave(link);
    link.send_quietly(b"ROLLBACK", deadline);
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
                pg_sys::SubXactEvent::SUBXACT_EVENT_PRE_COMMIT_SUB => {
                    reference::flush()?;
                    leave_lost_replicas();
                    release(&pool::taking_part(), savepoint::depth())?
                }
                pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => {
                    pool::forget_unsent(savepoint::depth());
                    roll_back_to(&pool::taking_part(), savepoint::depth());
                }
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
            link.send_owed(format!("RELEASE SAVEPOINT s{level}").as_bytes())?;
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
            link.remote.tables.borrow_mut().clear();
            link.carried.set(None);
            link.keep_outer_rows(level, deadline);
            let command = format!("ROLLBACK TO SAVEPOINT s{level}; RELEASE SAVEPOINT s{level}");
            link.send_quietly(command.as_bytes(), deadline);
        }
    }
    for link in links {
        link.settle_quietly(deadline);
    }
}
