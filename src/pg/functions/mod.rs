//! SQL functions: a few lines each, over the core and the other modules. One file an area.

pub mod alter;
mod block;
mod call;
mod canary;
pub mod export;
pub mod key_column;
pub mod owner;
pub mod parts;
pub mod planning;
pub mod preview;
pub mod publish;
pub mod relief;
pub mod remote;
pub mod tokens;
pub mod verify;
