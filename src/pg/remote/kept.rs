//! Connections of their own that questions leave open for the next question of the same transaction.
//!
//! Decides how long they are kept: until the local transaction ends, or this session needs their places. What always
//! holds: only a connection at rest, outside of any transaction there, is kept; it serves the same user mapping and
//! options only. Who gets one runs nothing that outlives its statement. Read next: `scatter`.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use pgrx::pg_sys;

use super::libpq::{Conn, TransactionStatus};
use super::target::Target;

thread_local! {
    // Never dropped: see `pool`.
    static KEPT: ManuallyDrop<RefCell<Vec<(Rc<Target>, Conn)>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// Puts a connection by.
pub fn put(target: Rc<Target>, conn: Conn) {
    if conn.is_ok() && conn.transaction_status() == TransactionStatus::Idle {
        KEPT.with(|kept| kept.borrow_mut().push((target, conn)));
    }
}

/// Takes one that serves the target, if there is one.
pub fn take(target: &Target) -> Option<Conn> {
    KEPT.with(|kept| {
        let mut kept = kept.borrow_mut();
        let serves = |(own, conn): &(Rc<Target>, Conn)| {
            own.same_connection(target) && (conn.used_password() || !target.needs_password)
        };
        let at = kept.iter().position(serves)?;
        Some(kept.swap_remove(at).1)
    })
}

/// Closes those to `server`, or all if `None`. Whether there were any.
pub fn close(server: Option<pg_sys::Oid>) -> bool {
    // Taken out first, so that nothing is borrowed while they are closed.
    let dropped: Vec<(Rc<Target>, Conn)> = KEPT.with(|kept| {
        let Ok(mut kept) = kept.try_borrow_mut() else { return Vec::new() };
        let (drop, keep) = kept.drain(..).partition(|(target, _)| server.is_none_or(|server| target.id == server));
        *kept = keep;
        drop
    });
    !dropped.is_empty()
}
