//! Who bears too much, and who too little.
//!
//! Decides which shards give a part of what they own to which (hot ones), and which give up all of it (cold ones), by
//! limits of rows, bytes and load. What always holds: measures are taken to follow the keys evenly; nobody gets more than
//! the giver keeps, so that relief never makes a new shard the worst; at least one shard stays. Refuses nothing: without
//! limits nobody is hot or cold. Read [`crate::relief`] for which keys they are.

use crate::ids::ShardName;
use crate::map::ShardState;

/// Least part that is worth a move.
const LEAST_PART: f64 = 0.01;

/// What is measured of a shard: rows, bytes, statements a second.
pub type Measures = [f64; 3];

/// Limits of the measures; nothing: it does not count.
pub type Limits = [Option<f64>; 3];

/// A shard and what it bears.
#[derive(Clone, Debug, PartialEq)]
pub struct Burden {
    /// The shard.
    pub shard: ShardName,
    /// What it does at the moment.
    pub state: ShardState,
    /// What it bears, finite and not below 0.
    pub measures: Measures,
}

/// A part of what a shard owns that another one is to get.
#[derive(Clone, Debug, PartialEq)]
pub struct Relief {
    /// The shard that has too much.
    pub giver: ShardName,
    /// The shard that gets a part of it.
    pub gainer: ShardName,
    /// Of what the giver owns when it is this relief's turn: above 0, at most a half.
    pub part: f64,
}

/// The greatest measure in terms of its limit.
fn level(measures: &Measures, limits: &Limits) -> f64 {
    let of_limit = |(value, limit): (&f64, &Option<f64>)| match limit {
        Some(limit) if *value > 0.0 => value / limit,
        _ => 0.0,
    };
    measures.iter().zip(limits).map(of_limit).fold(0.0, f64::max)
}

/// The greatest part with which the gainer does not bear more than the giver keeps.
fn evening_part(giver: &Measures, gainer: &Measures, limits: &Limits) -> f64 {
    let whole = level(giver, limits);
    let parts = giver.iter().zip(gainer).zip(limits).filter_map(|((given, held), limit)| {
        let limit = limit.as_ref()?;
        Some((whole - held / limit) / (given / limit + whole))
    });
    parts.fold(0.5, f64::min)
}

/// Returns what relieves the shards that are above a limit: each gives to the least burdened of the others, to as few as
/// will do, or to `target` alone, until it is below its limits or nobody is left who bears less.
///
/// `most`: limits above 0. Shards that are being emptied neither give nor get; hot ones do not get.
#[must_use]
pub fn relieve(shards: &[Burden], most: &Limits, target: Option<&ShardName>) -> Vec<Relief> {
    let is_hot = |shard: &&Burden| shard.state == ShardState::Active && level(&shard.measures, most) > 1.0;
    let mut givers: Vec<Burden> = shards.iter().filter(is_hot).cloned().collect();
    givers.sort_by(|a, b| {
        level(&b.measures, most).total_cmp(&level(&a.measures, most)).then_with(|| a.shard.cmp(&b.shard))
    });
    let may_gain = |shard: &&Burden| {
        let bears_enough = level(&shard.measures, most) > 1.0;
        shard.state != ShardState::Draining && !bears_enough && target.is_none_or(|target| *target == shard.shard)
    };
    let mut gainers: Vec<Burden> = shards.iter().filter(may_gain).cloned().collect();
    let mut reliefs = Vec::new();
    for giver in &mut givers {
        // What follows another measure than the keys it was planned by is planned again.
        while level(&giver.measures, most) > 1.0 && share_out(giver, &mut gainers, most, &mut reliefs) {}
    }
    reliefs
}

/// Lets a shard give to others until they are even with it by its worst measure. Returns whether it gave anything.
fn share_out(giver: &mut Burden, gainers: &mut [Burden], most: &Limits, reliefs: &mut Vec<Relief>) -> bool {
    let worst = |measures: &Measures| {
        let levels = measures.iter().zip(most).map(|(value, limit)| limit.map_or(0.0, |limit| value / limit));
        levels.enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(at, _)| at)
    };
    let (at, before) = (worst(&giver.measures), reliefs.len());
    let value = |measures: &Measures| measures.get(at).copied().unwrap_or(0.0);
    let limit = most.get(at).copied().flatten().unwrap_or(1.0);
    let takes = |gainer: &&mut Burden| evening_part(&giver.measures, &gainer.measures, most) >= LEAST_PART;
    let mut takers: Vec<&mut Burden> = gainers.iter_mut().filter(takes).collect();
    takers.sort_by(|a, b| value(&a.measures).total_cmp(&value(&b.measures)).then_with(|| a.shard.cmp(&b.shard)));
    let (mut even, mut count) = (value(&giver.measures), 0);
    for (taker, others) in takers.iter().zip(2_u16..) {
        if even <= limit {
            break;
        }
        even = (even * f64::from(others - 1) + value(&taker.measures)) / f64::from(others);
        count += 1;
    }
    for taker in takers.into_iter().take(count) {
        let wished = (even - value(&taker.measures)) / value(&giver.measures);
        let part = wished.min(evening_part(&giver.measures, &taker.measures, most));
        if part < LEAST_PART || level(&giver.measures, most) <= 1.0 {
            continue;
        }
        for (given, held) in giver.measures.iter_mut().zip(&mut taker.measures) {
            *held += *given * part;
            *given -= *given * part;
        }
        reliefs.push(Relief { giver: giver.shard.clone(), gainer: taker.shard.clone(), part });
    }
    reliefs.len() > before
}

/// Returns the shards that are to be emptied because they are below all limits, in the order in which they are: the
/// least burdened first, what it bears spread evenly over the others, and so on while one of them is below.
///
/// `least`: limits above 0. Only active shards count.
#[must_use]
#[allow(clippy::cast_precision_loss)] // at most 1024 shards
pub fn fold(shards: &[Burden], least: &Limits) -> Vec<ShardName> {
    let mut staying: Vec<Burden> = shards.iter().filter(|shard| shard.state == ShardState::Active).cloned().collect();
    let mut folded = Vec::new();
    if least.iter().all(Option::is_none) {
        return folded;
    }
    while staying.len() > 1 {
        let coldest = staying.iter().enumerate().min_by(|(_, a), (_, b)| {
            level(&a.measures, least).total_cmp(&level(&b.measures, least)).then(a.shard.cmp(&b.shard))
        });
        let Some(at) = coldest.filter(|(_, shard)| level(&shard.measures, least) < 1.0).map(|(at, _)| at) else {
            break;
        };
        let cold = staying.remove(at);
        let others = staying.len() as f64;
        for shard in &mut staying {
            for (held, given) in shard.measures.iter_mut().zip(&cold.measures) {
                *held += given / others;
            }
        }
        folded.push(cold.shard);
    }
    folded
}
