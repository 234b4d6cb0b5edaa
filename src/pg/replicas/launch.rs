//! When a database's sampler runs.
//!
//! Decides by a slot in shared memory: a database with replicas wants one. The launcher of `resolver` starts it, and starts
//! it again when it has ended, at most once in [`PAUSE`]. What always holds: no database without replicas has one; at most
//! one runs in each; a change of the replicas takes effect at commit, at once.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::PgXactCallbackEvent;

use super::registry;
use super::shared::{self, Slot};
use crate::pg::clock::now;
use crate::pg::resolver;

/// Between two starts of a database's sampler, which ends only by an error or by order.
pub const PAUSE: Duration = Duration::from_secs(5);

fn database() -> u32 {
    // SAFETY: a variable of the session.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

fn runs(slot: &Slot) -> bool {
    let pid = slot.pid.load(Ordering::Acquire);
    // SAFETY: looks the process up in shared memory, under Postgres' own lock.
    pid != 0 && unsafe { !pg_sys::BackendPidGetProc(pid as c_int).is_null() }
}

/// Says that this database has replicas, or may have.
pub fn want() {
    match shared::slot(database(), true) {
        Some(slot) => slot.wanted.store(1, Ordering::Release),
        None if shared::is_there() => log!("pg_shardmap watches the replicas of 64 databases at most, not of this one"),
        None => {}
    }
}

/// Says so if it has. In a transaction.
pub fn want_if_needed() {
    if !registry::all().is_empty() {
        want();
    }
}

/// Whether the launcher has to look after samplers.
pub fn is_any_wanted() -> bool {
    shared::slots().iter().any(|slot| slot.wanted.load(Ordering::Acquire) != 0)
}

/// Starts the samplers that should run and do not. `databases`: those that exist.
pub fn tend(databases: impl Fn() -> Vec<pg_sys::Oid>) {
    for slot in shared::slots() {
        let is_due = now().saturating_sub(slot.started.load(Ordering::Relaxed)) >= PAUSE.as_micros() as i64;
        if slot.wanted.load(Ordering::Acquire) == 0 || !is_due || runs(slot) {
            continue;
        }
        let database = pg_sys::Oid::from(slot.database.load(Ordering::Acquire));
        if !databases().contains(&database) {
            slot.wanted.store(0, Ordering::Release);
            shared::forget_database(database);
            slot.database.store(0, Ordering::Release);
            continue;
        }
        slot.started.store(now(), Ordering::Relaxed);
        // SAFETY: reads a variable of the process.
        let own = unsafe { pg_sys::MyProcPid };
        let started = resolver::worker("pg_shardmap sampler", "shardmap_sampler_main")
            .set_argument(Some(pg_sys::Datum::from(database)))
            .set_restart_time(None)
            .set_notify_pid(own)
            .load_dynamic();
        if started.is_err() {
            log!("pg_shardmap could not start a sampler: raise max_worker_processes");
        }
    }
}

/// Makes this process the sampler of its database. `None`: there is one already, or none is wanted.
pub fn enlist() -> Option<&'static Slot> {
    let slot = shared::slot(database(), false)?;
    if runs(slot) || slot.wanted.load(Ordering::Acquire) == 0 {
        return None;
    }
    // SAFETY: variables of the process; its latch is in shared memory. The callback is a static function.
    unsafe {
        slot.pid.store(pg_sys::MyProcPid, Ordering::Release);
        slot.latch.store(pg_sys::MyLatch, Ordering::Release);
        pg_sys::before_shmem_exit(Some(on_exit), pg_sys::Datum::from(0));
    }
    Some(slot)
}

#[pg_guard]
unsafe extern "C-unwind" fn on_exit(_code: c_int, _argument: pg_sys::Datum) {
    if let Some(slot) = shared::slot(database(), false) {
        slot.pid.store(0, Ordering::Release);
    }
}

/// Makes a change of the replicas, or of their objectives, known when it commits.
#[pg_extern(sql = false)]
fn replicas_changed() {
    if let Some(table) = registry::table(c"replica") {
        // SAFETY: a relation that was just found; the message goes out at commit.
        unsafe { pg_sys::CacheInvalidateRelcacheByRelid(table) }
    }
    pgrx::register_xact_callback(PgXactCallbackEvent::Commit, || {
        want();
        resolver::wake_launcher();
        wake();
    });
}

fn wake() {
    let latch = shared::slot(database(), false).map(|slot| {
        slot.called.store(1, Ordering::Release);
        slot.latch.load(Ordering::Acquire)
    });
    if let Some(latch) = latch.filter(|latch| !latch.is_null()) {
        // SAFETY: a latch of a process slot, in shared memory; setting another process' by mistake is harmless.
        unsafe { pg_sys::SetLatch(latch) };
    }
}
