//! SQL functions: a few lines each, over the core and the other modules. One file an area.

pub mod map;
pub mod remote;
