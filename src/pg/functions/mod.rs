//! SQL functions: a few lines each, over the core and the other modules. One file an area.

pub mod export;
pub mod map;
pub mod planning;
pub mod preview;
pub mod remote;
pub mod tokens;
