//! Arithmetic of capacity: how many shards, of which size, and what a fan-out does to the tail.
//!
//! Decides nothing for its user: every figure is an input, none is a price or a measurement of ours. What always holds:
//! the same inputs give the same plan, and every input is checked. Refuses inputs that are not finite or out of range.
//! Read [`crate::normal`] for the distribution behind [`fanout_tail`].

use std::error::Error;
use std::fmt;

use crate::normal::{density, quantile_of_tail};

/// An input of a plan that is out of its range. SQLSTATE 22023.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanError {
    /// The argument's name.
    pub what: &'static str,
    /// What it was.
    pub value: f64,
    /// Least that it may be.
    pub least: f64,
    /// Most that it may be.
    pub most: f64,
}

impl PlanError {
    /// Refuses a `value` that is not a number from `least` to `most`.
    pub(crate) fn check(what: &'static str, value: f64, least: f64, most: f64) -> Result<(), Self> {
        if (least..=most).contains(&value) {
            Ok(())
        } else {
            Err(Self { what, value, least, most })
        }
    }

    fn positive(what: &'static str, value: f64) -> Result<(), Self> {
        Self::check(what, value, f64::MIN_POSITIVE, 1e15)
    }

    fn not_negative(what: &'static str, value: f64) -> Result<(), Self> {
        Self::check(what, value, 0.0, 1e15)
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" is {}, but must be from {} to {}", self.what, self.value, self.least, self.most)
    }
}

impl Error for PlanError {}

/// How many shards a load needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityPlan {
    /// Shards that just carry the load.
    pub minimum: u64,
    /// Shards with headroom for skew and for failover.
    pub with_headroom: u64,
}

/// Returns how many shards carry `target_writes` when each carries `per_shard_writes`.
///
/// Both in writes a second, above 0. `headroom`: 0.3 for 30 %, from 0; it is added to the whole number of shards.
///
/// # Errors
/// [`PlanError`]: an argument out of its range, or more than 10^12 shards.
pub fn plan_capacity(target_writes: f64, per_shard_writes: f64, headroom: f64) -> Result<CapacityPlan, PlanError> {
    PlanError::positive("target_writes", target_writes)?;
    PlanError::positive("per_shard_writes", per_shard_writes)?;
    PlanError::check("headroom", headroom, 0.0, 1e3)?;
    let minimum = whole_number("target_writes", target_writes / per_shard_writes)?;
    let with_headroom = whole_number("headroom", minimum as f64 * (1.0 + headroom))?;
    Ok(CapacityPlan { minimum, with_headroom })
}

/// Rounds up, but not for what only the binary fractions add: 10 shards and 10 % are 11, not 11.000000000000002.
fn whole_number(what: &'static str, value: f64) -> Result<u64, PlanError> {
    const MOST: f64 = 1e12;
    PlanError::check(what, value, 0.0, MOST)?;
    Ok((value * (1.0 - 1e-12)).ceil().max(1.0) as u64)
}

/// A kind of instance that shards could run on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceClass {
    /// Queries a second that one primary carries, above 0.
    pub capacity: f64,
    /// Price of one instance for an hour, from 0.
    pub price_per_hour: f64,
}

/// What [`compare_topologies`] compares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopologyInputs {
    /// Queries a second to carry, above 0.
    pub target: f64,
    /// The smaller instances.
    pub small: InstanceClass,
    /// The larger instances.
    pub large: InstanceClass,
    /// Replicas of each primary, on instances of its own kind.
    pub replicas_per_primary: u32,
    /// Work of keeping one instance for a month, from 0.
    pub operations_per_instance: f64,
    /// Licence of one instance for a month, from 0.
    pub licence_per_instance: f64,
    /// Hours of a month, above 0.
    pub hours_per_month: f64,
}

/// A set of instances that carries the load. Money is for a month.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Topology {
    /// Primaries, one a shard.
    pub primaries: u64,
    /// Primaries and replicas.
    pub instances: u64,
    /// Price of the instances.
    pub compute: f64,
    /// Work of keeping them.
    pub operations: f64,
    /// Their licences.
    pub licences: f64,
    /// All of it.
    pub total: f64,
    /// Part of the writes, 0 to 1, that wait while one primary is lost.
    pub writes_lost: f64,
    /// Shards to split for twice the capacity.
    pub splits_to_double: u64,
}

/// Many small instances against few large ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopologyComparison {
    /// Of the smaller instances.
    pub small: Topology,
    /// Of the larger instances.
    pub large: Topology,
    /// What the larger ones save a month; below 0 if they cost more.
    pub saving: f64,
    /// The saving as a part of the smaller ones' total, 0 if that is 0.
    pub saving_part: f64,
}

/// Compares a cluster of many small instances with one of few large ones.
///
/// # Errors
/// [`PlanError`]: an input out of its range.
pub fn compare_topologies(inputs: &TopologyInputs) -> Result<TopologyComparison, PlanError> {
    PlanError::positive("target", inputs.target)?;
    PlanError::not_negative("operations_per_instance", inputs.operations_per_instance)?;
    PlanError::not_negative("licence_per_instance", inputs.licence_per_instance)?;
    PlanError::positive("hours_per_month", inputs.hours_per_month)?;
    let (small, large) = (topology(inputs, &inputs.small)?, topology(inputs, &inputs.large)?);
    let saving = small.total - large.total;
    let saving_part = if small.total > 0.0 { saving / small.total } else { 0.0 };
    Ok(TopologyComparison { small, large, saving, saving_part })
}

fn topology(inputs: &TopologyInputs, class: &InstanceClass) -> Result<Topology, PlanError> {
    PlanError::positive("capacity", class.capacity)?;
    PlanError::not_negative("price_per_hour", class.price_per_hour)?;
    let primaries = whole_number("target", inputs.target / class.capacity)?;
    let instances = primaries.saturating_mul(1 + u64::from(inputs.replicas_per_primary));
    let each = instances as f64;
    let compute = each * class.price_per_hour * inputs.hours_per_month;
    let (operations, licences) = (each * inputs.operations_per_instance, each * inputs.licence_per_instance);
    Ok(Topology {
        primaries,
        instances,
        compute,
        operations,
        licences,
        total: compute + operations + licences,
        writes_lost: 1.0 / primaries as f64,
        splits_to_double: primaries,
    })
}

/// Tail of a statement that waits for the slowest of several shards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FanoutTail {
    /// Shards asked at once.
    pub width: u32,
    /// 99th percentile of the slowest, in the unit of the mean.
    pub p99: f64,
    /// The same over that of one shard.
    pub ratio: f64,
}

/// Returns the 99th percentile of the slowest of N shards, for each N of `widths`.
///
/// `mean`, `sd`: of one shard's latency, in any unit, normal and independent; `mean` above 0, `sd` from 0. All N are
/// below x with probability F(x)^N, so that the percentile is F's quantile at 0.99^(1/N): exact, no sampling. A
/// distribution that is cut off below (no latency is negative) has the same figures, if it is cut off below its own
/// 99th percentile, as cutting keeps the order.
///
/// # Errors
/// [`PlanError`]: an argument out of its range.
///
/// Source: order statistics, David and Nagaraja, 2003, section 2.1.
pub fn fanout_tail(mean: f64, sd: f64, widths: &[u32]) -> Result<Vec<FanoutTail>, PlanError> {
    PlanError::positive("mean", mean)?;
    PlanError::not_negative("sd", sd)?;
    let p99 = |width: u32| mean + sd * quantile_of_tail(tail(width));
    let tails = widths.iter().map(|width| {
        PlanError::check("width", f64::from(*width), 1.0, f64::from(u32::MAX))?;
        Ok(FanoutTail { width: *width, p99: p99(*width), ratio: p99(*width) / p99(1) })
    });
    tails.collect()
}

/// Returns the standard error of the 99th percentile of [`fanout_tail`] when it is estimated from `samples` draws.
///
/// Source: asymptotic normality of the sample quantile, sqrt(p (1 - p) / n) / f(x), same book, section 10.2.
#[must_use]
pub fn fanout_sampling_error(sd: f64, width: u32, samples: u32) -> f64 {
    let x = quantile_of_tail(tail(width));
    let below = 1.0 - tail(width);
    let density_of_slowest = f64::from(width) * density(x) * below.powf(f64::from(width) - 1.0);
    sd * (0.99 * 0.01 / f64::from(samples)).sqrt() / density_of_slowest
}

/// Probability that one shard is above the percentile of the slowest of `width`: 1 - 0.99^(1/width), without loss.
fn tail(width: u32) -> f64 {
    -(0.99_f64.ln() / f64::from(width)).exp_m1()
}
