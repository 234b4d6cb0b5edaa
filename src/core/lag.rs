//! How far replicas are behind, and what that means for those who read from them.
//!
//! [`history`] remembers where a primary was when, [`forks`] where timelines parted, [`judge`] compares a replica's answer with it, [`window`] keeps the
//! distribution of the last minutes and hours, [`objective`] says how fast the budget for bad moments burns, [`rotation`]
//! who gets reads, [`shape`] what the distribution looks like, [`impact`] what it costs readers; [`tracker`] puts them together
//! for one replica, and [`summary`] is what it publishes. What always holds: clock and samples are passed in; what is not known is
//! counted as such and never as 0; memory is bounded whatever comes. Read [`history`] first.

pub mod forks;
pub mod history;
pub mod impact;
pub mod judge;
pub mod objective;
pub mod rotation;
pub mod shape;
pub mod summary;
pub mod tracker;
pub mod window;
