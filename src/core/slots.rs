//! Slots: which shard owns which remainder of MD5, under strategy `modulo`.
//!
//! Decides how a table of owners is written: as short as it can be, and not at all where it is the plain rule. What
//! always holds: a table repeated, or cut to its period, gives every key the same owner. Refuses tables of more than
//! [`MAX_SLOTS`]. Read [`crate::map`] for the lookup, [`crate::reassign`] for how slots change hands.

use std::collections::BTreeMap;

use crate::ids::ShardNumber;
use crate::map::{ShardSpec, ShardState};

/// Most slots of a keyspace: enough to go from 255 shards to 256.
pub const MAX_SLOTS: usize = 1 << 16;

/// Returns the slots of the plain rule: one for each shard that takes part, in ascending order of their numbers.
#[must_use]
pub fn plain_slots(shards: &[ShardSpec]) -> Vec<ShardNumber> {
    let taking_part = shards.iter().filter(|shard| shard.state != ShardState::Joining);
    let mut slots: Vec<ShardNumber> = taking_part.map(|shard| shard.number).collect();
    slots.sort_unstable();
    slots
}

/// Returns the slots in short: cut to their period, and nothing if they are the plain rule of these shards.
#[must_use]
pub fn shortened(mut slots: Vec<ShardNumber>, shards: &[ShardSpec]) -> Option<Vec<ShardNumber>> {
    let length = slots.len();
    let repeats = |period: &usize| slots.iter().zip(slots.iter().skip(*period)).all(|(a, b)| a == b);
    let period = (1..length).filter(|period| length.is_multiple_of(*period)).find(repeats);
    slots.truncate(period.unwrap_or(length));
    (slots != plain_slots(shards)).then_some(slots)
}

/// Returns the least number of slots that both tables can be repeated to, or nothing if it is above `most`.
pub(crate) fn common_length(a: usize, b: usize, most: usize) -> Option<usize> {
    (a.max(1) / gcd(a, b)).checked_mul(b.max(1)).filter(|length| *length <= most)
}

fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a.max(1),
        _ => gcd(b, a % b),
    }
}

/// Returns how many remainders of the least common multiple each pair of owners has, and that multiple.
///
/// Two remainders meet if they agree modulo the common divisor, and then for one value of the multiple.
pub(crate) fn meetings(a: &[ShardNumber], b: &[ShardNumber]) -> (BTreeMap<(ShardNumber, ShardNumber), u64>, u64) {
    let common = gcd(a.len(), b.len());
    let count = |slots: &[ShardNumber], rest: usize| {
        let mut counts: BTreeMap<ShardNumber, u64> = BTreeMap::new();
        for owner in slots.iter().skip(rest).step_by(common) {
            *counts.entry(*owner).or_default() += 1;
        }
        counts
    };
    let mut pairs = BTreeMap::new();
    for rest in 0..common {
        let theirs = count(b, rest);
        for (giver, given) in count(a, rest) {
            for (gainer, gained) in &theirs {
                *pairs.entry((giver, *gainer)).or_default() += given * gained;
            }
        }
    }
    (pairs, (a.len() / common * b.len()) as u64)
}
