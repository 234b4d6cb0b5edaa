//! The background workers that finish what a failure left prepared on shards.
//!
//! Decides when to look, and in which databases. One launcher starts, one after the other, a short-lived worker for each
//! database that is due: one where a transaction began to commit in two phases within the last [`RECENT`], or whose last
//! look left something open; and every database at the server's start and every [`SWEEP`]. So nothing stays connected to
//! a database, which can be dropped, and an error ends one look and nothing else. What always holds: no worker runs unless
//! the library is preloaded, nor on a standby; a database without the extension is left at once; a signal to stop is
//! obeyed at once. It starts the samplers of replicas, the workers of moves and the auditors as well.
//! Refuses nothing. Read next: `remote::resolve` for what a look does, `replicas::launch`, `moves::launch`, `audits`.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pgrx::bgworkers::{BackgroundWorkerBuilder, BackgroundWorkerStatus};
use pgrx::pg_sys;
use pgrx::prelude::*;

use super::area::{self, Area};
use super::audits;
use super::catalog::scan;
use super::clock::now;
use super::encoding;
use super::moves::launch as moves;
use super::remote::deadlock::Waiting;
use super::remote::resolve;
use super::replicas::launch;
use super::settings::RESOLVE_INTERVAL;

const NAME: &std::ffi::CStr = c"pg_shardmap_resolver";
/// Postgres' microseconds.
const RECENT: i64 = 60_000_000;
const SWEEP: Duration = Duration::from_secs(300);
/// Databases that are kept apart; more share one entry.
const DATABASES: usize = 64;

pub static AREA: Area<Shared> = Area::new(NAME, complete);

/// What sessions tell the launcher, in shared memory: all zero at first. It is made anew after a crash of a session, when
/// all others have ended.
#[repr(C)]
pub struct Shared {
    start: AtomicU64,
    /// The launcher's. It stays in shared memory when the launcher ends: setting another's by mistake is harmless.
    latch: AtomicPtr<pg_sys::Latch>,
    databases: [AtomicU32; DATABASES],
    /// When a look at it was last called for; the last entry is that of all other databases.
    called: [AtomicI64; DATABASES + 1],
    /// When its moves are to be looked at: `moves::launch`.
    moves: [AtomicI64; DATABASES + 1],
    waiting: Waiting,
}

impl Shared {
    /// The place of a database. `claim`: takes a free one.
    fn place(&self, database: u32, claim: bool) -> usize {
        for (place, known) in self.databases.iter().enumerate() {
            if claim {
                // Fails if it is taken, by this database perhaps.
                let _ = known.compare_exchange(0, database, Ordering::Relaxed, Ordering::Relaxed);
            }
            if known.load(Ordering::Relaxed) == database {
                return place;
            }
        }
        DATABASES
    }

    /// When a look at a database was last called for.
    fn called(&self, database: u32, claim: bool) -> &AtomicI64 {
        &self.called[self.place(database, claim)]
    }
}

fn shared() -> Option<&'static Shared> {
    AREA.get()
}

/// # Safety
/// At the server's start.
unsafe fn complete(shared: &'static Shared) {
    let mut start = [0u8; 8];
    if pg_sys::pg_strong_random(start.as_mut_ptr().cast(), start.len()) {
        shared.start.store(u64::from_ne_bytes(start), Ordering::Relaxed);
    }
}

/// A random number of the server's start, which a restart after a crash is too; `None`: the library is not preloaded.
pub fn server_start() -> Option<u64> {
    shared().map(|shared| shared.start.load(Ordering::Relaxed)).filter(|start| *start != 0)
}

/// Where sessions wait; `None`: the library is not preloaded.
pub fn waiting() -> Option<&'static Waiting> {
    shared().map(|shared| &shared.waiting)
}

/// Notes that a transaction of this database begins to commit in two phases.
pub fn note_commit() {
    if let Some(shared) = shared() {
        // SAFETY: a variable of the session.
        let database = unsafe { pg_sys::MyDatabaseId };
        shared.called(database.to_u32(), true).store(now(), Ordering::Relaxed);
    }
}

/// When the moves of a database are to be looked at; `None`: the library is not preloaded.
pub fn moves_due(database: pg_sys::Oid) -> Option<&'static AtomicI64> {
    shared().map(|shared| &shared.moves[shared.place(database.to_u32(), true)])
}

/// Calls the launcher: something was left prepared. Raises no error.
pub fn wake() {
    note_commit();
    wake_launcher();
}

/// Lets the launcher look at once.
pub fn wake_launcher() {
    let latch = shared().map(|shared| shared.latch.load(Ordering::Relaxed));
    if let Some(latch) = latch.filter(|latch| !latch.is_null()) {
        // SAFETY: a latch of a process slot, in shared memory.
        unsafe { pg_sys::SetLatch(latch) };
    }
}

/// Registers the launcher, if the library is being preloaded.
pub fn init() {
    if !area::is_preloading() {
        return;
    }
    worker("pg_shardmap launcher", "shardmap_launcher_main").set_restart_time(Some(Duration::from_secs(5))).load();
}

pub fn worker(name: &str, function: &str) -> BackgroundWorkerBuilder {
    BackgroundWorkerBuilder::new(name)
        .set_type(name)
        .set_library("pg_shardmap")
        .set_function(function)
        .enable_spi_access() // which starts it once recovery is over
}

/// Lets the worker be stopped and reloaded like any session.
///
/// # Safety
/// At the start of a background worker.
pub unsafe fn handle_signals() {
    unsafe extern "C-unwind" {
        // Source: tcop/tcopprot.h, postmaster/interrupt.h. Handlers, called by nobody here.
        fn die(signal: c_int);
        fn SignalHandlerForConfigReload(signal: c_int);
    }
    #[cfg(not(feature = "pg18"))]
    use pg_sys::pqsignal;
    #[cfg(feature = "pg18")]
    use pg_sys::pqsignal_be as pqsignal;
    pqsignal(pg_sys::SIGTERM as c_int, Some(die));
    pqsignal(pg_sys::SIGHUP as c_int, Some(SignalHandlerForConfigReload));
    pg_sys::BackgroundWorkerUnblockSignals();
}

/// The launcher.
///
/// # Safety
/// Called by Postgres as a background worker.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_launcher_main(_argument: pg_sys::Datum) {
    // SAFETY: in the order that background workers need; no database, so that only shared catalogs can be read.
    handle_signals();
    pg_sys::BackgroundWorkerInitializeConnectionByOid(pg_sys::InvalidOid, pg_sys::InvalidOid, 0);
    let Some(shared) = shared() else { return };
    shared.latch.store(pg_sys::MyLatch, Ordering::Relaxed);
    let mut swept: Option<Instant> = None;
    loop {
        let interval_now = interval();
        // Sweeps find the databases with replicas too.
        let sweeps = swept.is_none_or(|swept| swept.elapsed() >= SWEEP);
        let begin = Instant::now();
        // A database that called in the last look counts until the one after the next.
        let recent = interval_now.map(|interval| RECENT.max(2 * interval.as_micros() as i64));
        let moves = || shared.moves.iter().filter_map(moves::wait_of).min();
        if sweeps || recent.is_some() || moves().is_some_and(|wait| wait.is_zero()) {
            for database in databases() {
                let called = shared.called(database.to_u32(), false).load(Ordering::Relaxed);
                let due = &shared.moves[shared.place(database.to_u32(), false)];
                let has_moves = moves::wait_of(due).is_some_and(|wait| wait.is_zero());
                if sweeps || has_moves || recent.is_some_and(|recent| now().saturating_sub(called) < recent) {
                    if has_moves {
                        moves::begin(due);
                    }
                    look_at(database);
                }
            }
        }
        if sweeps {
            swept = Some(begin);
        }
        let wait = interval().unwrap_or(SWEEP);
        rest(moves().map_or(wait, |moves| moves.min(wait)), true);
        rest(resolve::YOUNG, false);
    }
}

fn interval() -> Option<Duration> {
    match RESOLVE_INTERVAL.get() {
        0 => None,
        seconds => Some(Duration::from_secs(seconds.unsigned_abs().into())),
    }
}

/// Waits, and looks after the samplers. `wakes`: until somebody calls; else a call is left for the next wait.
fn rest(limit: Duration, wakes: bool) {
    let end = Instant::now() + limit;
    let mut called = false;
    loop {
        launch::tend(databases);
        audits::tend(databases);
        let mut left = end.saturating_duration_since(Instant::now());
        if launch::is_any_wanted() {
            left = left.min(launch::PAUSE);
        }
        left = left.min(audits::time_left());
        let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
        // SAFETY: this process' own latch; a reload is done where no transaction runs.
        unsafe {
            let milliseconds = left.as_millis() as std::ffi::c_long + 1;
            let woken = pg_sys::WaitLatch(pg_sys::MyLatch, events as c_int, milliseconds, pg_sys::PG_WAIT_EXTENSION);
            if woken as u32 & pg_sys::WL_LATCH_SET != 0 {
                pg_sys::ResetLatch(pg_sys::MyLatch);
                called = true;
            }
            pgrx::check_for_interrupts!();
            if pg_sys::ConfigReloadPending != 0 {
                pg_sys::ConfigReloadPending = 0;
                pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
            }
            if wakes && called {
                return;
            }
            if Instant::now() >= end {
                if called {
                    pg_sys::SetLatch(pg_sys::MyLatch);
                }
                return;
            }
        }
    }
}

/// The databases that sessions can be in.
fn databases() -> Vec<pg_sys::Oid> {
    /// Source: pg_database.h, DATCONNLIMIT_INVALID_DB: its DROP was broken off.
    const INVALID: i32 = -2;
    let mut databases = Vec::new();
    // SAFETY: a transaction of its own around the scan of a shared catalog.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        scan::rows(pg_sys::DatabaseRelationId, |row| {
            let is_open = row.get::<bool>("datallowconn") == Some(true)
                && row.get::<bool>("datistemplate") == Some(false)
                && row.get::<i32>("datconnlimit") != Some(INVALID);
            databases.extend(row.oid("oid").filter(|_| is_open));
        });
        pg_sys::CommitTransactionCommand();
    }
    databases
}

/// Runs a worker in the database, and waits for its end.
fn look_at(database: pg_sys::Oid) {
    // SAFETY: reads a variable of the process.
    let own = unsafe { pg_sys::MyProcPid };
    let started = worker("pg_shardmap resolver", "shardmap_resolver_main")
        .set_argument(Some(pg_sys::Datum::from(database)))
        .set_restart_time(None)
        .set_notify_pid(own)
        .load_dynamic();
    match started {
        // However it ends, it said so itself; the latch is set when it does.
        Ok(worker) => {
            while !matches!(worker.pid(), Err(BackgroundWorkerStatus::Stopped | BackgroundWorkerStatus::PostmasterDied))
            {
                rest(launch::PAUSE, true);
            }
        }
        Err(_) => log!("pg_shardmap could not start a worker: raise max_worker_processes"),
    }
}

/// One look at the shards of a database.
///
/// # Safety
/// Called by Postgres as a background worker, with the database's OID.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_resolver_main(database: pg_sys::Datum) {
    // SAFETY: in the order that background workers need.
    handle_signals();
    let database = pg_sys::Oid::from(database.value() as u32);
    pg_sys::BackgroundWorkerInitializeConnectionByOid(database, pg_sys::InvalidOid, 0);
    pg_sys::SetCurrentStatementStartTimestamp();
    pg_sys::StartTransactionCommand();
    if resolve::is_installed() {
        pg_sys::pgstat_report_activity(
            pg_sys::BackendState::STATE_RUNNING,
            c"looking for prepared transactions".as_ptr(),
        );
        launch::want_if_needed();
        let looked = interval().map(|_| resolve::look_around(Some(resolve::YOUNG)));
        if let Some(Ok(shards)) = looked {
            tell(&shards);
            if !resolve::is_clean(&shards) {
                note_commit();
            }
        }
    }
    pg_sys::CommitTransactionCommand();
    moves::start_due();
}

fn tell(shards: &[resolve::Shard]) {
    for shard in shards {
        let name = encoding::message(shard.name.clone());
        match &shard.parts {
            Ok(parts) => {
                for part in parts.iter().filter(|part| part.done) {
                    log!("prepared transaction {} on shard \"{}\": {}", part.id, name, part.decision.as_str());
                }
            }
            Err(failure) => {
                debug1!("shard \"{name}\" not looked at: {}", encoding::message(failure.to_text()));
            }
        }
    }
}
