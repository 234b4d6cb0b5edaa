//! Fan-outs flagged and counted: once a statement, at executor start, before any shard is asked.
//!
//! The policy is read when the statement starts, not when it was planned, so a cached plan obeys the setting of the
//! moment. The first foreign scan or modification of a statement that starts brings the plan's [`Note`]; the rest of
//! the statement is recognised by its executor state. Executor hooks then time it and count its rows.
//! Read next: `fdw::note` for where the note comes from, `stats` for where counts go.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::time::Instant;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;
use pgrx::PgLogLevel;
use shardmap_core::fingerprint::{comments_contain, statement_with_comments};
use shardmap_core::route::Step;

use crate::pg::alone::stands_alone;
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::fdw::note::{self, Note};
use crate::pg::fdw::{bulk, one_map, order, together, users};
use crate::pg::remote::{guard, transaction};
use crate::pg::savepoint;
use crate::pg::settings::{allows_fanout, FanoutPolicy, FANOUT_POLICY};
use crate::pg::stats;

/// A statement that runs and has a note.
struct Running {
    estate: *mut pg_sys::EState,
    /// The start that it belongs to: an executor state's address may be used again.
    start: u64,
    /// The depth of subtransactions at which it started.
    depth: i32,
    note: Note,
    since: Instant,
    /// The servers counted for it.
    servers: Vec<pg_sys::Oid>,
}

thread_local! {
    /// The starts that are under way, innermost last, and how many there have been.
    static STARTING: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static STARTS: Cell<u64> = const { Cell::new(0) };
    /// The COPY that was counted last: its executor state and command.
    static COPY: Cell<(usize, pg_sys::CommandId)> = const { Cell::new((0, 0)) };
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
    static EXPLAINED: Cell<*mut pg_sys::EState> = const { Cell::new(std::ptr::null_mut()) };
}

/// Acts on the note in `private` when the first node of a statement starts: counts the statement, and applies the
/// fan-out policy. Later nodes do nothing. EXPLAIN without ANALYZE runs nothing and is not flagged.
///
/// # Safety
/// `estate` is the running statement's; `private` a list or NIL.
pub unsafe fn at_start(estate: *mut pg_sys::EState, private: *const pg_sys::List, eflags: i32) {
    let rechecks = !(*estate).es_epq_active.is_null();
    if rechecks || eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 != 0 {
        return;
    }
    if let Some(start) = STARTING.with_borrow(|starts| starts.last().copied()) {
        // Left over from a statement that had the same address.
        RUNNING.with_borrow_mut(|running| running.retain(|r| r.estate != estate || r.start == start));
    }
    if !is_running(estate) {
        let Some(note) = note::read(private) else { return };
        if note.step == Step::FanOut {
            apply_policy(&note, &source_text(estate));
        }
        stats::count_step(counted_as(note.step));
        if note.one_moment && stands_alone(estate) {
            transaction::share_snapshots();
        }
        start(estate, note);
    }
}

/// Counts a statement whose rows go to their shards by tuple routing, which no plan node announces.
///
/// # Safety
/// `estate` is the running statement's.
pub unsafe fn at_insert(estate: *mut pg_sys::EState) {
    if (*estate).es_plannedstmt.is_null() {
        // COPY, which has no executor start and end.
        let copy = (estate as usize, pg_sys::GetCurrentCommandId(false));
        if COPY.replace(copy) != copy {
            stats::count_step(stats::Step::Insert);
        }
    } else if !is_running(estate) {
        stats::count_step(stats::Step::Insert);
        start(estate, Note::distributed());
    }
}

unsafe fn start(estate: *mut pg_sys::EState, note: Note) {
    let depth = savepoint::depth();
    let start = STARTING.with_borrow(|starts| starts.last().copied()).unwrap_or(STARTS.get());
    let running = Running { estate, start, depth, note, since: Instant::now(), servers: Vec::new() };
    RUNNING.with_borrow_mut(|all| all.push(running));
}

/// Counts a shard that is asked, once a statement.
///
/// # Safety
/// `estate` is the running statement's.
pub unsafe fn count_shard(estate: *mut pg_sys::EState, server: pg_sys::Oid) {
    let is_copy = (*estate).es_plannedstmt.is_null();
    let first = RUNNING.with_borrow_mut(|running| {
        // COPY comes here once for each partition.
        let Some(own) = running.iter_mut().rfind(|r| r.estate == estate) else { return is_copy };
        let first = !own.servers.contains(&server);
        if first {
            own.servers.push(server);
        }
        first
    });
    if !first {
        return;
    }
    if let Some((keyspace, shard)) = crate::pg::catalog::current().as_ref().and_then(|c| c.servers.get(&server)) {
        stats::count_shard(&keyspace.name, shard.0);
    }
}

/// The step under which statistics count a statement.
fn counted_as(step: Step) -> stats::Step {
    match step {
        Step::Routed => stats::Step::Routed,
        Step::Substituted => stats::Step::Substituted,
        Step::Narrowed => stats::Step::Narrowed,
        Step::Distributed => stats::Step::Insert,
        Step::FanOut => stats::Step::FanOut,
    }
}

fn is_running(estate: *mut pg_sys::EState) -> bool {
    RUNNING.with_borrow(|running| running.iter().any(|r| r.estate == estate))
}

/// True once for every executed or explained statement.
pub fn first_explained(estate: *mut pg_sys::EState) -> bool {
    EXPLAINED.replace(estate) != estate
}

/// The text of the statement that `estate` runs, without its neighbours in the same string; or "".
unsafe fn source_text(estate: *mut pg_sys::EState) -> String {
    let (text, planned) = ((*estate).es_sourceText, (*estate).es_plannedstmt);
    if text.is_null() || planned.is_null() {
        return String::new();
    }
    let text = encoding::shape(text);
    statement_with_comments(&text, stats::backslash(), (*planned).stmt_location, (*planned).stmt_len).to_owned()
}

/// The comment by which a statement says that its fan-out is meant.
const ALLOWED: &str = "/* shardmap: allow fan-out */";

fn apply_policy(note: &Note, text: &str) {
    let policy = FANOUT_POLICY.get().max(note.policy);
    if policy == FanoutPolicy::Allow {
        return;
    }
    // Without a text, all statements would have the same one.
    let fingerprint = Some(text).filter(|text| !text.is_empty()).map(stats::fingerprint_of);
    let (level, code) = match policy {
        FanoutPolicy::Allow => return,
        _ if comments_contain(text, stats::backslash(), ALLOWED) => return,
        _ if fingerprint.is_some_and(allows_fanout) => return,
        FanoutPolicy::Notice => (PgLogLevel::NOTICE, PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION),
        FanoutPolicy::Warning => (PgLogLevel::WARNING, PgSqlErrorCode::ERRCODE_WARNING),
        FanoutPolicy::Error => (PgLogLevel::ERROR, PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED),
    };
    let refusal = Refusal::new(code, format!("query on {} asks all {} shards", note.tables, note.shards))
        .detail(note.reason.clone())
        .hint(hint(&note.hint, fingerprint));
    match policy {
        FanoutPolicy::Error => refuse(refusal),
        _ => refusal.report(level),
    }
}

/// What can be done about a fan-out: `instead`, or to allow it.
fn hint(instead: &str, fingerprint: Option<u64>) -> String {
    let by_number = fingerprint.map_or(String::new(), |fingerprint| {
        format!(" or its fingerprint, {}, in shardmap.allowed_fanouts", fingerprint.cast_signed())
    });
    format!(
        "{instead}, or allow this statement with the comment {ALLOWED}{by_number}, or all of them with \
         SET shardmap.fanout_policy = 'allow'."
    )
}

/// Refuses a statement on logical tables before it runs, and counts it as refused.
pub fn refuse(refusal: Refusal) -> ! {
    stats::count_step(stats::Step::Refused);
    refusal.raise()
}

static PREVIOUS_START: OnceLock<pg_sys::ExecutorStart_hook_type> = OnceLock::new();
static PREVIOUS_END: OnceLock<pg_sys::ExecutorEnd_hook_type> = OnceLock::new();

/// # Safety
/// Called by Postgres' executor.
#[pg_guard]
unsafe extern "C-unwind" fn executor_start(desc: *mut pg_sys::QueryDesc, eflags: i32) {
    EXPLAINED.set(std::ptr::null_mut());
    let _starting = Starting::begin();
    // SAFETY: the previous hook may raise an error; the boundary turns it into a panic that pg_guard re-raises.
    match PREVIOUS_START.get().copied().flatten() {
        Some(previous) => pg_guard_ffi_boundary(|| previous(desc, eflags)),
        None => pg_sys::standard_ExecutorStart(desc, eflags),
    }
    if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 == 0 && is_running((*desc).estate) {
        together::gather(desc);
    }
}

/// An executor start that is under way, until it is dropped.
struct Starting;

impl Starting {
    fn begin() -> Self {
        let number = STARTS.get() + 1;
        STARTS.set(number);
        STARTING.with_borrow_mut(|starts| starts.push(number));
        Self
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        STARTING.with_borrow_mut(Vec::pop);
    }
}

/// # Safety
/// Called by Postgres' executor.
unsafe extern "C-unwind" fn executor_end(desc: *mut pg_sys::QueryDesc) {
    // SAFETY: the body of a callback.
    guard(|| {
        // Here, because an error of a shard that passes a boundary loses its context.
        bulk::end_statement((*desc).estate)?;
        finish(desc);
        // SAFETY: as in executor_start.
        match PREVIOUS_END.get().copied().flatten() {
            Some(previous) => pg_guard_ffi_boundary(|| previous(desc)),
            None => pg_sys::standard_ExecutorEnd(desc),
        }
        Ok(())
    })
}

/// Records a statement that has come to its end.
unsafe fn finish(desc: *mut pg_sys::QueryDesc) {
    let estate = (*desc).estate;
    if estate.is_null() {
        return;
    }
    let ended = RUNNING.with_borrow_mut(|running| {
        let at = running.iter().rposition(|r| r.estate == estate)?;
        Some(running.swap_remove(at))
    });
    let Some(ended) = ended else { return };
    if ended.note.step != Step::FanOut {
        return;
    }
    stats::record_fanout(&stats::FanoutSample {
        text: &source_text(estate),
        tables: &ended.note.tables,
        reason: &ended.note.reason,
        shards: ended.note.shards,
        rows: (*estate).es_processed,
        millis: ended.since.elapsed().as_secs_f64() * 1000.0,
    });
}

/// # Safety
/// Called by Postgres at the end of a transaction.
#[pg_guard]
unsafe extern "C-unwind" fn at_transaction_end(event: pg_sys::XactEvent::Type, _arg: *mut std::ffi::c_void) {
    // A statement that failed never reached ExecutorEnd, and its executor state is gone.
    if event == pg_sys::XactEvent::XACT_EVENT_ABORT || event == pg_sys::XactEvent::XACT_EVENT_COMMIT {
        RUNNING.with_borrow_mut(Vec::clear);
        users::forget();
        one_map::forget();
        order::forget();
    }
}

/// # Safety
/// Called by Postgres at the end of a subtransaction.
#[pg_guard]
unsafe extern "C-unwind" fn at_subtransaction_end(
    event: pg_sys::SubXactEvent::Type,
    _own: pg_sys::SubTransactionId,
    _parent: pg_sys::SubTransactionId,
    _arg: *mut std::ffi::c_void,
) {
    let Some(end) = savepoint::End::of(event) else { return };
    RUNNING.with_borrow_mut(|running| running.retain_mut(|r| end.keeps(&mut r.depth)));
    users::at_savepoint_end(end);
    order::at_savepoint_end(end);
}

/// Installs the executor hooks. Once per process.
pub fn init() {
    // SAFETY: hooks are changed in _PG_init only, in a single thread.
    unsafe {
        let _ = PREVIOUS_START.set(pg_sys::ExecutorStart_hook);
        pg_sys::ExecutorStart_hook = Some(executor_start);
        let _ = PREVIOUS_END.set(pg_sys::ExecutorEnd_hook);
        pg_sys::ExecutorEnd_hook = Some(executor_end);
        pg_sys::RegisterXactCallback(Some(at_transaction_end), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(at_subtransaction_end), std::ptr::null_mut());
    }
}
