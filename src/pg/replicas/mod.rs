//! Replicas: which ones there are, and what was last heard of them and of their primaries.
//!
//! Decides nothing: judgement is in `shardmap_core::lag`. What always holds: any session reads what was last heard of a
//! server from shared memory, without a lock and without asking anybody; where the library is not preloaded, nothing is
//! known of any. Read next: [`shared`] for what is published, [`registry`] for the catalog, `sql/replicas.sql`.

// The sampling worker that writes comes next.
#![allow(dead_code)]

pub mod registry;
pub mod shared;

/// Asks for shared memory, if the library is being preloaded.
pub fn init() {
    shared::init();
}
