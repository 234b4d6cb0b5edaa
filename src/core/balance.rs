//! How evenly a ring spreads its load.
//!
//! Decides nothing; measures the shares of a map's ring exactly, and repeats the experiment of the golden figures. What
//! always holds: shares add up to the whole ring; deviations are those of the whole population, not of a sample. Refuses
//! experiments that are empty or too large to be useful. Read [`crate::alloc`] for what makes a ring even.

use crate::capacity::PlanError;
use crate::fraction::Fraction;
use crate::hash::md5_u128;
use crate::ids::{ShardName, ShardNumber, Token};
use crate::map::{remainder, KeyspaceMap, Shard};
use crate::ring::{random_tokens, Ring, MAX_TOKENS};

/// How evenly a ring spreads its load over its shards.
#[derive(Clone, Debug, PartialEq)]
pub struct RingBalance {
    /// Every shard of the keyspace, in ascending order of their numbers.
    pub shards: Vec<ShardBalance>,
    /// Figures of the loads of the shards that hold tokens; nothing if none does.
    pub load: Option<Spread>,
}

/// One shard's part of a ring.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardBalance {
    /// The shard.
    pub shard: ShardName,
    /// Of the ring's positions, or of the slots.
    pub share: Fraction,
    /// Tokens.
    pub vnodes: usize,
    /// Its share of load as it should be, in relation to the other shards' weights.
    pub weight: f64,
    /// Its share over the share that its weight stands for among the shards that hold tokens: 1 is even.
    pub load: f64,
}

/// Least, greatest, mean, population deviation, and greatest over mean, of numbers of one unit.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // said above
pub struct Spread {
    pub min: f64,
    pub max: f64,
    pub mean: f64,
    pub stdev: f64,
    pub max_over_mean: f64,
}

impl Spread {
    /// Returns the figures of `values`, or nothing for none.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // far below 2^53 values
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        let (min, max) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        let mean = values.iter().sum::<f64>() / count;
        let stdev = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        Some(Self { min, max, mean, stdev, max_over_mean: max / mean })
    }
}

/// Measures the ring of a map, or its slots under strategy `modulo`, where loads are not measured, as weights do not
/// count; under strategy `range` every share is 0. O(points).
#[must_use]
pub fn ring_balance(map: &KeyspaceMap) -> RingBalance {
    let mut owned = vec![0_u64; usize::from(ShardNumber::MAX.0) + 1];
    let slots = map.slots();
    let whole = if slots.is_empty() { Fraction::RING } else { slots.len() as u64 };
    for (length, shard) in map.arc_lengths().chain(slots.iter().map(|owner| (1, *owner))) {
        if let Some(sum) = owned.get_mut(usize::from(shard.0)) {
            *sum += length;
        }
    }
    let holds = |shard: &&Shard| shard.vnodes > 0 && !map.points().is_empty();
    let total: f64 = map.shards().filter(holds).map(|shard| shard.weight).sum();
    let shards: Vec<ShardBalance> = map
        .shards()
        .map(|shard| {
            let numerator = owned.get(usize::from(shard.number.0)).copied().unwrap_or(0);
            let share = Fraction { numerator, denominator: whole };
            let load = if holds(&shard) { share.value() * total / shard.weight } else { 0.0 };
            ShardBalance { shard: shard.name.clone(), share, vnodes: shard.vnodes, weight: shard.weight, load }
        })
        .collect();
    let loads: Vec<f64> = map.shards().zip(&shards).filter(|(shard, _)| holds(shard)).map(|(_, b)| b.load).collect();
    RingBalance { load: Spread::of(&loads), shards }
}

/// What [`simulate`] counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Keys of each shard `shard-0`, `shard-1` and so on, on a ring.
    pub counts: Vec<u64>,
    /// Figures of `counts`.
    pub spread: Spread,
    /// Keys that change owner on the ring when one more shard is added.
    pub moved_ring: u64,
    /// Keys that change owner under modulo when one more shard is added.
    pub moved_modulo: u64,
}

/// Gives `keys` keys `key-0`, `key-1` and so on to `shards` shards with `vnodes` vnodes each, then adds a shard.
///
/// `keys`: 1 to 10^8. `shards`: 1 to 1023. `vnodes`: 1 to [`MAX_TOKENS`], random allocation.
/// O(keys log + shards * vnodes).
///
/// # Errors
/// [`PlanError`]: an argument out of its range.
#[allow(clippy::cast_precision_loss)] // at most 10^8 keys
pub fn simulate(keys: u32, shards: u16, vnodes: u32) -> Result<Simulation, PlanError> {
    let within = |what, value: u32, most: u32| PlanError::check(what, f64::from(value), 1.0, f64::from(most));
    within("keys", keys, 100_000_000)?;
    within("shards", u32::from(shards), u32::from(ShardNumber::MAX.0))?;
    within("vnodes", vnodes, MAX_TOKENS as u32)?;
    let mut tokens: Vec<(String, ShardNumber, Vec<u32>)> = (0..=shards)
        .map(|number| {
            let name = format!("shard-{number}");
            let tokens = random_tokens(&name, vnodes);
            (name, ShardNumber(number), tokens)
        })
        .collect();
    // A ring takes its shards by name: shard-10 before shard-2.
    tokens.sort_unstable();
    let ring = |most: u16| {
        let taking_part = tokens.iter().filter(|shard| shard.1 .0 < most);
        Ring::build(taking_part.map(|(_, number, tokens)| (*number, &**tokens)))
    };
    let (before, after) = (ring(shards), ring(shards + 1));
    let mut counts = vec![0_u64; usize::from(shards)];
    let (mut moved_ring, mut moved_modulo) = (0, 0);
    for key in 0..keys {
        let digest = md5_u128(format!("key-{key}").as_bytes());
        let token = Token::from_digest(digest);
        let owner = before.owner(token);
        if let Some(count) = owner.and_then(|owner| counts.get_mut(usize::from(owner.0))) {
            *count += 1;
        }
        moved_ring += u64::from(owner != after.owner(token));
        let modulo = |count: u16| remainder(digest, usize::from(count));
        moved_modulo += u64::from(modulo(shards) != modulo(shards + 1));
    }
    let loads: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
    let none = Spread { min: 0.0, max: 0.0, mean: 0.0, stdev: 0.0, max_over_mean: 0.0 };
    Ok(Simulation { counts, spread: Spread::of(&loads).unwrap_or(none), moved_ring, moved_modulo })
}
