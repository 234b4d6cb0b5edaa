//! Statistics of routing: what became of statements, which shards they asked, and which asked them all.
//!
//! Decides nothing about a statement: it is told. What always holds: everything here is a no-op, and the views are
//! empty, unless the library is in `shared_preload_libraries`; nothing here raises an error in a statement that is being
//! counted; nothing waits for anything but one short lock (wait event `pg_shardmap_stats`).
//! Read next: `fanout.rs` and `routing.rs` for the two tables, `sweep.rs` for what dropped databases leave, `file.rs` for
//! what outlives a restart, `functions.rs` for the SQL side.

mod fanout;
mod file;
mod functions;
pub(crate) mod routing;
pub(crate) mod shared;
mod sweep;

use std::time::Duration;

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};
use shardmap_core::fingerprint::{fingerprint, normalize, Backslash};

pub use shardmap_core::statistics::Step;

use crate::pg::area;
use crate::pg::clock::now;

static FANOUT_QUERIES_MAX: GucSetting<i32> = GucSetting::<i32>::new(1000);

/// A statement that asked every shard.
pub struct FanoutSample<'a> {
    /// The statement as the client sent it, without its neighbours (`shardmap_core::fingerprint::statement`).
    pub text: &'a str,
    pub tables: &'a str,
    pub reason: &'a str,
    pub shards: u32,
    pub rows: u64,
    pub millis: f64,
}

/// Defines the setting. Before the prefix `shardmap` is reserved.
pub fn init() {
    GucRegistry::define_int_guc(
        c"shardmap.fanout_queries_max",
        c"Sets the number of statements kept in shardmap.fanout_queries.",
        c"When there are more, the least often called go. Each takes 1.6 kB of shared memory. \
          Has no effect unless pg_shardmap is in shared_preload_libraries.",
        &FANOUT_QUERIES_MAX,
        10,
        100_000,
        // Later than at preload, a setting for the server's start cannot be defined any more.
        if area::is_preloading() { GucContext::Postmaster } else { GucContext::Sighup },
        GucFlags::default(),
    );
}

fn capacity() -> usize {
    usize::try_from(FANOUT_QUERIES_MAX.get()).unwrap_or(10)
}

/// The area of shared memory, with what earlier runs of the server have left.
pub struct Area;

impl area::Shared for Area {
    unsafe fn request(&self) {
        shared::request(capacity());
    }

    /// The setting cannot have changed since the request. The exit callback is the postmaster's: its children forget it
    /// when they are forked.
    unsafe fn attach(&self) {
        let area = shared::attach(capacity());
        if !pg_sys::IsUnderPostmaster {
            file::load(area);
            pg_sys::on_shmem_exit(Some(on_exit), pg_sys::Datum::from(0));
        }
    }
}

/// At the end of the server, after its last session. A code other than 0 is a crash, whose figures may be half done;
/// so may those of an immediate shutdown.
#[pg_guard]
unsafe extern "C-unwind" fn on_exit(code: std::ffi::c_int, _arg: pg_sys::Datum) {
    match shared::get() {
        Some(area) if code == 0 && !area.is_torn() => file::save(area),
        _ => {}
    }
}

/// This session's database; `None` in processes that have none.
fn database() -> Option<u32> {
    // SAFETY: a variable of the server, set once in a process' life.
    match unsafe { pg_sys::MyDatabaseId } {
        pg_sys::Oid::INVALID => None,
        oid => Some(oid.to_u32()),
    }
}

/// Counts a statement in `shardmap.stat_routing`. Allocates nothing.
pub fn count_step(step: Step) {
    if let (Some(area), Some(database)) = (shared::get(), database()) {
        routing::count_step(area, database, step);
    }
}

/// Counts a statement in `shardmap.stat_shards`, once for each shard that it asked. Allocates nothing.
pub fn count_shard(keyspace: &str, shard: u16) {
    if let (Some(area), Some(database)) = (shared::get(), database()) {
        routing::count_shard(area, database, keyspace, shard);
    }
}

/// Adds errors of a shard, and time waited for it, to `shardmap.stat_shards`. Allocates nothing.
pub fn add_to_shard(keyspace: &str, shard: u16, errors: u64, waited: Duration) {
    if let (Some(area), Some(database)) = (shared::get(), database()) {
        let waited_ns = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        routing::add_to_shard(area, database, keyspace, shard, errors, waited_ns);
    }
}

/// Adds a call to `shardmap.fanout_queries`, for the current user.
pub fn record_fanout(sample: &FanoutSample) {
    let (Some(area), Some(database)) = (shared::get(), database()) else {
        return;
    };
    // SAFETY: the user of this session.
    let user = unsafe { pg_sys::GetUserId() };
    let text = normalize(sample.text, backslash());
    let key = fanout::Key { database, user: user.to_u32(), fingerprint: fingerprint(&text) };
    let call = fanout::Call {
        text: &text,
        tables: sample.tables,
        reason: sample.reason,
        shards: sample.shards,
        rows: sample.rows,
        ns: (sample.millis * 1e6) as u64, // saturates; NaN is 0
        now: now(),
    };
    fanout::record(area, key, &call);
}

/// The fingerprint of a statement, as `shardmap.fanout_queries` shows it.
pub fn fingerprint_of(text: &str) -> u64 {
    fingerprint(&normalize(text, backslash()))
}

/// What a backslash in an ordinary string literal means in this session.
pub fn backslash() -> Backslash {
    // SAFETY: a setting's value.
    match unsafe { pg_sys::standard_conforming_strings } {
        true => Backslash::Ordinary,
        false => Backslash::Escape,
    }
}
