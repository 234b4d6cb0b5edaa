//! Query trees at the edge: read into plain values for the core, and rewritten by what it decides.
//!
//! Read next: [`read`] for the way in, [`substitute`] for the way out, `planner` for who calls both.

mod columns;
mod facts;
pub mod inline;
pub mod late;
pub mod read;
pub mod substitute;
pub mod tree;
