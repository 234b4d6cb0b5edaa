//! Room taken back from databases that were dropped.
//!
//! Decides when to look for them: when a table is full, and at most once a minute on the whole server, so that a table
//! full of living databases costs its sessions nothing. What always holds: catalogs are read without the lock held. A
//! session that counts at this very moment may add one statement to a row that is another's by then.
//! Read next: `fanout.rs` and `routing.rs`.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use pgrx::pg_sys;

use super::shared::Shared;
use super::{fanout, now, routing};

const MINUTE: i64 = 60_000_000;

/// Forgets everything of databases that are gone. Returns false if it did not look, or found nothing.
pub fn sweep(shared: &Shared) -> bool {
    // SAFETY: asks for the state of this session.
    if !unsafe { pg_sys::IsTransactionState() } || !is_due(shared, now()) {
        return false;
    }
    let mut databases: BTreeSet<u32> = routing::databases(shared).collect();
    {
        let _lock = shared.shared();
        databases.extend(fanout::databases(shared));
    }
    databases.retain(|database| !exists(*database));
    if databases.is_empty() {
        return false;
    }
    let _lock = shared.exclusive();
    routing::forget(shared, &databases);
    fanout::forget(shared, &databases);
    true
}

fn is_due(shared: &Shared, now: i64) -> bool {
    let last = shared.swept.load(Ordering::Relaxed);
    let due = last == 0 || now.saturating_sub(last) >= MINUTE;
    due && shared.swept.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

fn exists(database: u32) -> bool {
    // SAFETY: within a transaction, any OID may be asked for; the name is freed with the statement's memory.
    unsafe { !pg_sys::get_database_name(pg_sys::Oid::from(database)).is_null() }
}
