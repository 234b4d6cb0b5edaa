//! The sampler: asks every primary and replica of its database again and again, judges, and publishes.
//!
//! Decides the rounds. What always holds: all servers are asked at the same time, and nobody waits for one that is slow; a signal
//! to stop is obeyed at once; an error of a step is logged and ends that step only; what is asked is a few functions of
//! Postgres, in no transaction. Read `roster.rs` for whom, `question.rs` for what, `group.rs` for what is made of the answers, `launch.rs` for when it runs.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::prelude::*;
use shardmap_core::lag::forks::Forks;
use shardmap_core::lag::history::Kept;
use shardmap_core::lag::tracker::Minute;

use super::group::Group;
use super::roster;
use super::settings;
use super::shared::Slot;
use super::watched::Watched;
use super::{keep, launch, shared};
use crate::pg::clock::moment as now;
use crate::pg::remote::wait::{wait_any, WaitSet, Woken};
use crate::pg::resolver;
use crate::pg::worker;

/// A round waits no longer for answers.
const ROUND: Duration = Duration::from_secs(5);
/// Between two looks at what is too old.
const CLEAN: Duration = Duration::from_secs(3600);

/// What a round leaves to be written.
#[derive(Default)]
pub struct Yield {
    pub minutes: Vec<(String, Minute)>,
    pub payloads: Vec<String>,
    /// Where primaries were.
    pub places: Vec<(String, Kept)>,
    pub forks: Vec<(String, Forks)>,
}

impl Yield {
    fn is_empty(&self) -> bool {
        self.minutes.is_empty() && self.payloads.is_empty() && self.places.is_empty() && self.forks.is_empty()
    }
}

/// The sampler of a database.
///
/// # Safety
/// Called by Postgres as a background worker, with the database's OID.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_sampler_main(database: pg_sys::Datum) {
    // SAFETY: in the order that background workers need.
    resolver::handle_signals();
    let database = pg_sys::Oid::from(database.value() as u32);
    pg_sys::BackgroundWorkerInitializeConnectionByOid(database, pg_sys::InvalidOid, 0);
    let Some(slot) = launch::enlist() else { return };
    roster::watch();
    // Whoever wants a lock that this one is in the way of, DROP EXTENSION say, is not to fail by a deadlock.
    pg_sys::SetConfigOption(
        c"lock_timeout".as_ptr(),
        c"100ms".as_ptr(),
        pg_sys::GucContext::PGC_SUSET,
        pg_sys::GucSource::PGC_S_OVERRIDE,
    );
    let scratch = pg_sys::AllocSetContextCreateInternal(
        pg_sys::TopMemoryContext,
        c"pg_shardmap sampler".as_ptr(),
        pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
        pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
        pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
    );
    let (mut groups, mut cleaned) = (Vec::new(), None);
    loop {
        let begin = Instant::now();
        if slot.called.swap(0, Ordering::AcqRel) != 0 {
            // The call comes before the invalidation, but after the commit.
            roster::forget();
        }
        match refresh(&mut groups) {
            Some(true) => {}
            Some(false) => {
                // In this order: whoever adds a replica now wants a sampler after this.
                slot.wanted.store(0, Ordering::Release);
                let is_empty = in_transaction("reading the replicas", || roster::read().is_empty());
                if is_empty == Some(true) {
                    shared::keep_only(&[]);
                    return;
                }
                launch::want();
                groups.clear();
                continue;
            }
            None => roster::forget(),
        }
        pg_sys::MemoryContextSwitchTo(scratch);
        round(&mut groups, begin + settings::interval().min(ROUND));
        let found = look(&mut groups);
        let cleans = cleaned.is_none_or(|at: Instant| at.elapsed() >= CLEAN);
        if cleans {
            cleaned = Some(begin);
        }
        write(&found, cleans);
        pg_sys::MemoryContextReset(scratch);
        rest(begin + settings::interval(), slot);
    }
}

/// Runs a step in a transaction of its own. `None`: it failed, which the log says.
pub fn in_transaction<T>(what: &str, step: impl FnOnce() -> T) -> Option<T> {
    let outcome = worker::transaction(false, || Ok::<_, Box<CaughtError>>(step()));
    worker::is_idle();
    outcome.inspect_err(|error| log!("pg_shardmap sampler failed {what}: {error:?}")).ok()
}

/// Brings the groups up to the catalog. `Some(false)`: there is nothing to watch. `None`: it could not be read.
fn refresh(groups: &mut Vec<Group>) -> Option<bool> {
    let read = in_transaction("reading the replicas", || roster::is_stale().then(roster::read))?;
    let Some(shards) = read else { return Some(!groups.is_empty()) };
    if shards.is_empty() {
        return Some(false);
    }
    let mut kept: Vec<_> = shards.iter().map(|shard| shard.primary.oid).collect();
    kept.extend(shards.iter().flat_map(|shard| &shard.replicas).map(|replica| replica.server.oid));
    let mut old: HashMap<_, _> =
        std::mem::take(groups).into_iter().map(|group| (group.primary.server.oid, group)).collect();
    *groups = shards.into_iter().map(|shard| Group::new(old.remove(&shard.primary.oid), shard)).collect();
    shared::keep_only(&kept);
    Some(true)
}

fn all(groups: &mut [Group]) -> impl Iterator<Item = &mut Watched> {
    groups.iter_mut().flat_map(|group| {
        std::iter::once(&mut group.primary).chain(group.replicas.iter_mut().map(|follower| &mut follower.watched))
    })
}

/// Asks everybody, and collects what comes until all have answered or the time is up.
fn round(groups: &mut [Group], deadline: Instant) {
    all(groups).for_each(Watched::ask);
    loop {
        let sockets: Vec<_> = all(groups).filter_map(|watched| watched.line().waits_for()).collect();
        let left = deadline.saturating_duration_since(Instant::now());
        if sockets.is_empty() || left.is_zero() {
            return;
        }
        let dialing = all(groups).filter_map(|watched| watched.line().time_left()).min();
        wait_any(&sockets, Some(dialing.map_or(left, |time| time.min(left))));
        all(groups).filter(|watched| watched.line().is_busy()).for_each(Watched::step);
    }
}

/// Judges what has come, and publishes.
fn look(groups: &mut [Group]) -> Yield {
    let interval = settings::interval();
    let mut found = Yield::default();
    groups.iter_mut().for_each(|group| group.look(interval, &mut found));
    found
}

fn write(found: &Yield, cleans: bool) {
    if found.is_empty() && !cleans {
        return;
    }
    in_transaction("writing what it found", || {
        // Nobody waits for statistics.
        Spi::run("SET LOCAL synchronous_commit = off")?;
        keep::write(&found.minutes)?;
        keep::write_places(&found.places)?;
        keep::write_forks(&found.forks)?;
        keep::notify(&found.payloads)?;
        if cleans {
            keep::clean(now(), settings::retention())?;
        }
        spi::Result::Ok(())
    })
    .and_then(Result::err)
    .into_iter()
    .for_each(|error| log!("pg_shardmap sampler failed writing what it found: {error}"));
}

/// Waits for the next round, or until something changes.
fn rest(until: Instant, slot: &Slot) {
    let latch = WaitSet::new(&[]);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // A call may have come while something else was waited for.
        if left.is_zero() || slot.called.load(Ordering::Acquire) != 0 || latch.wait(Some(left)) == Woken::Latch {
            break;
        }
    }
    // SAFETY: flags that signal handlers set; a reload is done where no transaction runs.
    unsafe {
        pgrx::check_for_interrupts!();
        if pg_sys::ConfigReloadPending != 0 {
            pg_sys::ConfigReloadPending = 0;
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
    }
}
