//! Replicas: which ones there are, and what was last heard of them and of their primaries.
//!
//! Decides nothing: judgement is in `shardmap_core::lag`. What always holds: any session reads what was last heard of a
//! server from shared memory, without a lock and without asking anybody; where the library is not preloaded, nothing is
//! known of any. Read next: [`shared`] for what is published, `sampler` for who publishes, [`launch`] for when
//! that runs, [`registry`] for the catalog, `sql/replicas.sql` and `sql/lag.sql`.

mod functions;
mod group;
mod keep;
pub mod launch;
mod question;
pub mod registry;
mod roster;
mod sampler;
pub mod settings;
pub mod shared;
mod watched;

/// Defines settings. Before the prefix `shardmap` is reserved.
pub fn init() {
    settings::init();
}
