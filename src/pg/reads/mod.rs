//! Reads answered by replicas, none of which shows a user less than he has written or seen.
//!
//! [`settings`] say what is wanted; [`session`] what must not be missed; [`servers`] what is known of the servers; [`ask`]
//! asks them; [`route`] puts it together for a statement, by the rules of `shardmap_core::reads`. [`reader`] is the one
//! that a scan or a routed statement uses: a connection that moves on to another server if its replica is lost. [`fence`]
//! keeps writes from former primaries, [`snapshot`] tells what a REPEATABLE READ transaction can see, [`doubt`] keeps commits that are
//! not seen on every shard yet out of tokens, [`count`] counts who has answered.
//! What always holds: with `shardmap.read_preference = primary` nothing here costs more than a look at it and a count; a transaction
//! that has written, here or on a shard, reads from primaries only.

pub mod ask;
mod count;
pub mod doubt;
pub mod explain;
pub mod fence;
pub mod functions;
pub mod reader;
pub mod route;
pub mod servers;
pub mod session;
pub mod settings;
pub mod snapshot;
