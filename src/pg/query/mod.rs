//! Query trees at the edge: read into plain values for the core, and rewritten by what it decides.
//!
//! Read next: [`read`] for the way in, [`substitute`] for the way out, `planner` for who calls both.

mod columns;
mod facts;
pub mod inline;
mod join_tree;
pub mod late;
mod levels;
pub mod merge;
mod outputs;
pub mod read;
pub mod same_key;
mod sublinks;
pub mod substitute;
pub mod sums;
mod targets;
pub mod tree;
