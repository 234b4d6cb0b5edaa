//! Whether a statement is all that its transaction does.

use pgrx::pg_sys;

use super::query::tree::items;
use super::raw;

/// Whether the statement is all that its READ COMMITTED transaction does, as far as can be seen: it was sent by the client
/// by itself. More may follow by a pipeline: [`ends_transaction`].
///
/// # Safety
/// `estate` must be the running statement's.
pub unsafe fn stands_alone(estate: *mut pg_sys::EState) -> bool {
    let portal = pg_sys::ActivePortal;
    pg_sys::XactIsoLevel as u32 == pg_sys::XACT_READ_COMMITTED
        && !pg_sys::IsTransactionBlock()
        && pg_sys::GetCurrentTransactionNestLevel() == 1
        && !portal.is_null()
        && *(*portal).name == 0
        && items::<pg_sys::PlannedStmt>((*portal).stmts).eq([(*estate).es_plannedstmt])
}

/// Whether no other statement can follow in the transaction of the one that the client has asked to be run now.
///
/// # Safety
/// In a transaction whose only statement so far is one that [`stands_alone`].
pub unsafe fn ends_transaction() -> bool {
    let portal = pg_sys::ActivePortal;
    !portal.is_null()
        && pg_sys::MyXactFlags & pg_sys::XACT_FLAGS_PIPELINING as i32 == 0
        && (!(*portal).visible || raw::next_message() == Some(b'S'))
}
