//! What a transaction has noted, when one of its savepoints ends.
//!
//! A note bears the depth of subtransactions at which it was taken ([`depth`]). Rolling back to a savepoint undoes what
//! was done at its depth and deeper, so such notes go; releasing it hands them to the depth above. (PL/pgSQL's exception
//! blocks are savepoints too.) Read next: `flag`, which hears of both, and those whom it tells.

use pgrx::pg_sys;

/// How deep in subtransactions the session is now; 1 is the transaction itself.
pub fn depth() -> i32 {
    // SAFETY: reads a field of the session's transaction state, which is there in and outside of transactions.
    unsafe { pg_sys::GetCurrentTransactionNestLevel() }
}

/// The end of the subtransaction of a depth.
#[derive(Clone, Copy)]
pub enum End {
    Released(i32),
    RolledBack(i32),
}

impl End {
    /// The end of the current subtransaction, if `event` is one.
    pub fn of(event: pg_sys::SubXactEvent::Type) -> Option<Self> {
        match event {
            pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => Some(Self::Released(depth())),
            pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => Some(Self::RolledBack(depth())),
            _ => None,
        }
    }

    /// Whether a note that was taken at depth `taken` outlives this end; `taken` becomes the depth that it has then.
    pub fn keeps(self, taken: &mut i32) -> bool {
        match self {
            Self::Released(ended) => {
                *taken = (*taken).min(ended - 1);
                true
            }
            Self::RolledBack(ended) => *taken < ended,
        }
    }
}
