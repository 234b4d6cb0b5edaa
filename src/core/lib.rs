//! The rules of `pg_shardmap`, without Postgres: values in, values out.
//!
//! Decides which shard owns a key, what a change of the map would move, and what a plan would cost. What always holds:
//! no clock, no I/O, no logging, no `unsafe`, no panics; the same input gives the same output on every machine, because
//! a different answer would look for rows on the wrong shard. Refuses by returning a value of [`error`], never by
//! stopping. Read [`key`] and [`hash`] next, then [`map`].

#![forbid(unsafe_code)]

pub mod alloc;
pub mod balance;
pub mod batch;
pub mod burden;
pub mod canary;
pub mod capacity;
pub mod checksum;
pub mod deadlock;
pub mod diff;
pub mod error;
pub mod export;
pub mod fingerprint;
pub mod fraction;
pub mod hash;
pub mod ids;
pub mod key;
pub mod lag;
pub mod layout;
pub mod map;
pub mod normal;
pub mod parts;
pub mod pins;
pub mod range;
pub mod reads;
pub mod reassign;
pub mod relief;
pub mod replica;
pub mod reshard;
pub mod ring;
pub mod route;
pub mod slots;
pub mod statistics;
pub mod two_phase;
mod validate;
