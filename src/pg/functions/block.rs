//! What the running transaction is to its client.

use pgrx::pg_sys;
use pgrx::prelude::*;

/// Whether the client has begun it by BEGIN, or sent several statements at once: then no procedure can commit.
#[pg_extern(sql = false)]
fn is_in_block() -> bool {
    // SAFETY: reads the state of the transaction.
    unsafe { pg_sys::IsTransactionBlock() }
}
