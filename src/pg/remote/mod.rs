//! The layer that owns every connection to a shard.
//!
//! What always holds: whatever the extension does on a shard in one local transaction goes over one connection to it, so
//! that a transaction sees its own writes; waits act on cancel, timeout and shutdown, and end the shard's query too; a
//! shard's error reaches the client with its own SQLSTATE and says which shard.
//! Refuses to go on over a new connection after a transaction has lost its connection.
//!
//! From the bottom up: [`libpq`] (the only one with C's view of it), `wait`, [`failure`] (errors as values, and
//! [`guard`]), `target` (server and mapping as options), `dial` and `link` (one connection), `portal` and `stream` (what is
//! on it: rows that come, rows that go), `transaction` (BEGIN to COMMIT), `commit`, `two_phase`, `resolve` (of several
//! shards), `deadlock` (waits in a circle), `pool` (which connection), `copy` and `source` (a table's rows to their shards), `pipe` (from shard to shard), `together` (one question to several),
//! `scatter` (one statement on many shards, each in a session of its own), `kept` (for the next one), `line` (one question again and again), `json`. The
//! SQL functions are in `functions::remote`.

mod admit;
mod ahead;
pub mod answer;
pub mod carried;
mod cleanup;
mod commit;
mod copy;
pub mod crash;
pub mod deadlock;
mod dial;
pub mod failure;
mod idle;
mod json;
mod kept;
pub mod libpq;
pub mod line;
mod link;
pub mod occupant;
mod pipe;
mod pool;
pub mod pooler;
pub mod portal;
pub mod prepared;
mod record;
pub mod resolve;
mod scatter;
mod slots;
mod source;
pub mod stream;
pub mod target;
mod together;
pub mod traffic;
pub mod transaction;
mod two_phase;
pub mod wait;
pub mod wire;

pub use ahead::connect_ahead;
pub use copy::{copy_rows, copy_rows_to_each};
pub use failure::{guard, Failure, Result};
pub use pipe::pipe;
pub use pool::{any_wrote, forget_lent, generation, Connection};
pub use scatter::{ask_everywhere, run_everywhere, Outcome};
pub use slots::{figures as connections, AREA as CONNECTIONS};
pub use together::ask_together;

/// Registers callbacks. Called once per process.
pub fn init() {
    pool::init();
    transaction::init();
}
