//! Who runs a move: one session at a time, by a lock that it holds from step to step.
//!
//! Decides with locks of the session, of the kind that `pg_locks` calls advisory, in a space of numbers that no user's lock
//! can have. What always holds: the lock goes when the session ends, however it ends, and when a run breaks off with its
//! transaction (a cancel, an error that nobody catches). Slots of workers are locks of the same kind.

use std::cell::RefCell;
use std::ffi::c_void;

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::replicas::registry;

/// The last number of an advisory lock's four; users' locks have 1 or 2.
const MOVE: u16 = 3;
const SLOT: u16 = 4;
/// Source: storage/lock.h, USER_LOCKMETHOD.
const METHOD: u8 = 2;

/// A lock that this session holds.
struct Held {
    tag: pg_sys::LOCKTAG,
    /// To be given back when this transaction ends.
    over: bool,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

fn tag(kind: u16, number: u32) -> Option<pg_sys::LOCKTAG> {
    let table = registry::table(c"move")?;
    // SAFETY: reads a variable of the session.
    let database = unsafe { pg_sys::MyDatabaseId };
    Some(pg_sys::LOCKTAG {
        locktag_field1: database.to_u32(),
        locktag_field2: table.to_u32(),
        locktag_field3: number,
        locktag_field4: kind,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: METHOD,
    })
}

const MODE: i32 = pg_sys::ExclusiveLock as i32;

/// Takes the lock for this session; `None`: another one has it.
fn take(kind: u16, number: u32) -> Option<pg_sys::LOCKTAG> {
    let tag = tag(kind, number)?;
    // SAFETY: a complete tag, in a transaction; it does not wait. A lock that was held before is held once.
    unsafe {
        match pg_sys::LockAcquire(&tag, MODE, true, true) {
            pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL => return None,
            pg_sys::LockAcquireResult::LOCKACQUIRE_OK => {}
            _ => {
                pg_sys::LockRelease(&tag, MODE, true);
            }
        }
    }
    Some(tag)
}

fn is_same(a: &pg_sys::LOCKTAG, b: &pg_sys::LOCKTAG) -> bool {
    (a.locktag_field1, a.locktag_field2, a.locktag_field3) == (b.locktag_field1, b.locktag_field2, b.locktag_field3)
}

/// Moves are far fewer than the numbers of a lock: two that share one exclude each other, which harms nobody.
fn number(id: i64) -> u32 {
    id as u32
}

/// Makes this session the one that runs the move. `false`: another one does.
#[pg_extern(sql = false)]
fn try_hold_move(id: i64) -> bool {
    let Some(tag) = take(MOVE, number(id)) else { return false };
    HELD.with_borrow_mut(|held| {
        held.retain(|one| !is_same(&one.tag, &tag));
        held.push(Held { tag, over: false });
    });
    true
}

/// Gives the move back when this transaction ends.
#[pg_extern(sql = false)]
fn release_move(id: i64) {
    let Some(tag) = tag(MOVE, number(id)) else { return };
    HELD.with_borrow_mut(|held| {
        held.iter_mut().filter(|one| is_same(&one.tag, &tag)).for_each(|one| one.over = true);
    });
}

/// Takes one of `slots` slots until the process ends. In a transaction.
pub fn take_slot(slots: u32) -> bool {
    (0..slots).any(|slot| take(SLOT, slot).is_some())
}

/// # Safety
/// Called by Postgres at the end of a transaction.
#[pg_guard]
unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _argument: *mut c_void) {
    let aborted = event == pg_sys::XactEvent::XACT_EVENT_ABORT;
    if !aborted && event != pg_sys::XactEvent::XACT_EVENT_COMMIT {
        return;
    }
    HELD.with_borrow_mut(|held| {
        for one in held.extract_if(.., |one| aborted || one.over) {
            // Raises no error: a lock that is gone, by DISCARD ALL say, is a warning.
            pg_sys::LockRelease(&one.tag, MODE, true);
        }
    });
}

/// Registers the callback. Once per process.
pub fn init() {
    // SAFETY: a static function.
    unsafe { pg_sys::RegisterXactCallback(Some(on_transaction), std::ptr::null_mut()) }
}
