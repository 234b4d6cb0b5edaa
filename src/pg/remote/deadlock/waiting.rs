//! Where the sessions of this server wait, in shared memory, so that a look need not ask every shard.
//!
//! What always holds: only sessions that have waited for long are here; a session that ended without taking itself out
//! does no harm but costs a look a question. If the library is not preloaded, or the table is full, nobody's whereabouts are
//! known.

use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use pgrx::pg_sys;

use crate::pg::resolver;

const PLACES: usize = 1024;
/// For a session that waits for several shards.
const SEVERAL: u32 = u32::MAX;

#[repr(C)]
struct Entry {
    /// 0: free.
    pid: AtomicI32,
    database: AtomicU32,
    server: AtomicU32,
}

/// A part of shared memory; all zero at first.
#[repr(C)]
pub struct Waiting([Entry; PLACES]);

/// Where a session waits.
#[derive(Debug, PartialEq)]
pub enum Whereabouts {
    /// On no shard, or not for long.
    Nowhere,
    /// By its foreign server's OID.
    Shard(u32),
    Unknown,
}

fn own() -> (i32, u32) {
    // SAFETY: reads variables of the session.
    unsafe { (pg_sys::MyProcPid, pg_sys::MyDatabaseId.to_u32()) }
}

fn is_alive(pid: i32) -> bool {
    // SAFETY: searches shared memory under its own lock.
    !unsafe { pg_sys::BackendPidGetProc(pid) }.is_null()
}

/// Where the session with this process waits.
pub fn waits_of(pid: i32) -> Whereabouts {
    let Some(Waiting(entries)) = resolver::waiting() else { return Whereabouts::Unknown };
    match entries.iter().find(|entry| entry.pid.load(Ordering::Acquire) == pid) {
        Some(entry) => match entry.server.load(Ordering::Relaxed) {
            SEVERAL => Whereabouts::Unknown,
            _ if entry.database.load(Ordering::Relaxed) != own().1 => Whereabouts::Unknown,
            server => Whereabouts::Shard(server),
        },
        None if entries.iter().all(|entry| entry.pid.load(Ordering::Relaxed) != 0) => Whereabouts::Unknown,
        None => Whereabouts::Nowhere,
    }
}

/// This session is in the table, until dropped.
pub struct Published(&'static Entry);

impl Published {
    /// `None`: there is no table, or no room in it.
    pub fn at(servers: &[u32]) -> Option<Self> {
        let Waiting(entries) = resolver::waiting()?;
        let (pid, database) = own();
        let claim = |entry: &&Entry| {
            let before = entry.pid.load(Ordering::Relaxed);
            let is_free = before == 0 || before == pid || !is_alive(before);
            // Negative: taken, and not yet to be read.
            is_free && entry.pid.compare_exchange(before, -pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let entry = entries.iter().find(claim)?;
        entry.database.store(database, Ordering::Relaxed);
        entry.server.store(if let [one] = servers { *one } else { SEVERAL }, Ordering::Relaxed);
        entry.pid.store(pid, Ordering::Release);
        Some(Self(entry))
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.0.pid.store(0, Ordering::Release);
    }
}
