//! Step 1 of the ladder: a statement that is about one shard as a whole runs there as a whole, in one round trip.
//!
//! [`whole`] decides whether a statement may go; [`ship`] rewrites it for the shard, with what must be computed here as
//! parameters; [`plan`] makes the plan, whose only node is a CustomScan `ShardRoute`; [`run`] executes it. What always
//! holds: the plan names no shard, only the key's value or the expression for it, so that one generic plan serves every
//! key; a statement that may not go whole takes a lower step, with the same answer.

mod explain;
mod insert;
mod merge;
mod names;
pub mod plan;
mod reference;
pub mod refused;
mod run;
mod security;
pub mod ship;
mod stable;
pub mod whole;

/// Registers the node. Once per process.
pub fn init() {
    plan::register();
    refused::register();
}
