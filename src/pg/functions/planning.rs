//! Planning: how many shards, of which size, what a fan-out does to the tail, how a ring spreads.
//!
//! Decides nothing and reads nothing but its arguments: the arithmetic is the core's. Refuses arguments that are out of
//! range (22023). Read next: `shardmap_core::capacity` and `shardmap_core::balance`, and `sql/planning.sql` for the SQL.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::balance;
use shardmap_core::capacity::{self, InstanceClass, PlanError, Topology, TopologyInputs};

use crate::pg::error::Refusal;

impl From<PlanError> for Refusal {
    fn from(error: PlanError) -> Self {
        let PlanError { what, value, least, most } = error;
        // The least positive number has 300 zeros.
        let least = if least == f64::MIN_POSITIVE { "above 0".to_owned() } else { format!("at least {least}") };
        Self::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("argument \"{what}\" is out of range: {value}"),
        )
        .hint(format!("Give it a value {least} and at most {most}."))
    }
}

fn checked<T>(result: Result<T, PlanError>) -> T {
    result.unwrap_or_else(|error| Refusal::from(error).raise())
}

/// An argument that counts things.
fn count(what: &'static str, value: i32, least: u32, most: u32) -> u32 {
    match u32::try_from(value) {
        Ok(count) if (least..=most).contains(&count) => count,
        _ => Refusal::from(PlanError { what, value: f64::from(value), least: f64::from(least), most: f64::from(most) })
            .raise(),
    }
}

#[allow(clippy::cast_possible_wrap)] // at most 10^12
fn whole(number: u64) -> i64 {
    number as i64
}

#[pg_extern(sql = false)]
fn plan_capacity(
    target_writes: f64,
    per_shard_writes: f64,
    headroom: f64,
) -> TableIterator<'static, (name!(minimum, i64), name!(with_headroom, i64))> {
    let plan = checked(capacity::plan_capacity(target_writes, per_shard_writes, headroom));
    TableIterator::once((whole(plan.minimum), whole(plan.with_headroom)))
}

type TopologyRow = (String, i64, i64, f64, f64, f64, f64, f64, i64, f64, f64);

#[allow(clippy::too_many_arguments)] // all inputs are the user's
#[pg_extern(sql = false)]
fn compare_topologies(
    target: f64,
    small_capacity: f64,
    small_price_per_hour: f64,
    large_capacity: f64,
    large_price_per_hour: f64,
    replicas_per_primary: i32,
    operations_per_instance: f64,
    licence_per_instance: f64,
    hours_per_month: f64,
) -> TableIterator<
    'static,
    (
        name!(topology, String),
        name!(primaries, i64),
        name!(instances, i64),
        name!(compute, f64),
        name!(operations, f64),
        name!(licences, f64),
        name!(total, f64),
        name!(writes_lost, f64),
        name!(splits_to_double, i64),
        name!(saving, f64),
        name!(saving_part, f64),
    ),
> {
    let compared = checked(capacity::compare_topologies(&TopologyInputs {
        target,
        small: InstanceClass { capacity: small_capacity, price_per_hour: small_price_per_hour },
        large: InstanceClass { capacity: large_capacity, price_per_hour: large_price_per_hour },
        replicas_per_primary: count("replicas_per_primary", replicas_per_primary, 0, 100),
        operations_per_instance,
        licence_per_instance,
        hours_per_month,
    }));
    let row = |name: &str, of: &Topology, saving: f64, part: f64| -> TopologyRow {
        let (primaries, splits) = (whole(of.primaries), whole(of.splits_to_double));
        let costs = (of.compute, of.operations, of.licences, of.total);
        (
            name.into(),
            primaries,
            whole(of.instances),
            costs.0,
            costs.1,
            costs.2,
            costs.3,
            of.writes_lost,
            splits,
            saving,
            part,
        )
    };
    TableIterator::new([
        row("many small", &compared.small, 0.0, 0.0),
        row("few large", &compared.large, compared.saving, compared.saving_part),
    ])
}

#[pg_extern(sql = false)]
fn fanout_tail(
    mean: f64,
    sd: f64,
    widths: Vec<i32>,
) -> TableIterator<'static, (name!(width, i32), name!(p99, f64), name!(ratio, f64))> {
    let asked: Vec<u32> = widths.iter().map(|width| count("width", *width, 1, 1_000_000)).collect();
    let tails = checked(capacity::fanout_tail(mean, sd, &asked));
    TableIterator::new(widths.into_iter().zip(tails).map(|(width, tail)| (width, tail.p99, tail.ratio)))
}

#[pg_extern(sql = false)]
fn simulate(
    keys: i32,
    shards: i32,
    vnodes: i32,
) -> TableIterator<
    'static,
    (
        name!(moved_ring, i64),
        name!(moved_modulo, i64),
        name!(min, f64),
        name!(max, f64),
        name!(mean, f64),
        name!(stdev, f64),
        name!(max_over_mean, f64),
    ),
> {
    // A backend that counts cannot be cancelled: a second or two is enough.
    let (keys, vnodes) = (count("keys", keys, 1, 5_000_000), count("vnodes", vnodes, 1, 65_536));
    let shards = u16::try_from(count("shards", shards, 1, 1023)).unwrap_or(u16::MAX);
    count("shards times vnodes", i32::from(shards).saturating_mul(vnodes as i32), 1, 1_000_000);
    let found = checked(balance::simulate(keys, shards, vnodes));
    let spread = found.spread;
    TableIterator::once((
        whole(found.moved_ring),
        whole(found.moved_modulo),
        spread.min,
        spread.max,
        spread.mean,
        spread.stdev,
        spread.max_over_mean,
    ))
}
