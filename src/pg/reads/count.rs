//! Counts of who has answered reads, in shared memory.
//!
//! What always holds: only statements that read and lock nothing are counted, once for each shard, whatever their session prefers;
//! counting waits for nothing, and does nothing for a server that is not watched.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pgrx::pg_sys::Oid;

use super::route::Chosen;
use crate::pg::replicas::shared;

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// A primary answers, as it does whatever replicas there are.
pub fn primary(shard: Oid) {
    if let Some(counts) = shared::reads(shard) {
        add(&counts.reads, 1);
    }
}

/// The server that was chosen answers.
pub fn chosen(chosen: &Chosen) {
    let own = shared::reads(chosen.server);
    if let Some(counts) = own {
        add(&counts.reads, 1);
        if chosen.is_fallback {
            add(&counts.fallbacks, 1);
        }
    }
    chosen.lost.iter().for_each(|server| moved(*server, None));
    let waited_for = match chosen.in_vain {
        Some(replica) => shared::reads(replica),
        None => own.filter(|_| chosen.is_replica),
    };
    if let Some(counts) = waited_for.filter(|_| chosen.waited > Duration::ZERO) {
        add(if chosen.in_vain.is_some() { &counts.in_vain } else { &counts.waited }, 1);
        add(&counts.waited_us, u64::try_from(chosen.waited.as_micros()).unwrap_or(0));
    }
}

/// A replica was lost, or could not run a statement, which moves on; `to_primary`: that answers without being chosen.
pub fn moved(from: Oid, to_primary: Option<Oid>) {
    if let Some(counts) = shared::reads(from) {
        add(&counts.lost, 1);
    }
    if let Some(counts) = to_primary.and_then(shared::reads) {
        add(&counts.reads, 1);
        add(&counts.fallbacks, 1);
    }
}
