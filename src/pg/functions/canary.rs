//! The verdict on a canary, for `sql/canary_run.sql`.
//!
//! Decides nothing: the core judges. Read next: `shardmap_core::canary`.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::canary::{judge, Figures, Limits, Outcome};

/// Of the shard at `place`: statements, errors, milliseconds; what is missing or no number is 0.
fn figures(all: &[Option<f64>], place: usize) -> Figures {
    let value = |n: usize| {
        let value = all.get(3 * place + n).copied().flatten();
        value.filter(|value| value.is_finite() && *value > 0.0).unwrap_or(0.0)
    };
    Figures { statements: value(0), errors: value(1), wait_ms: value(2) }
}

/// Judges source (0) and target (1) by their figures before and since, three each in a row.
#[pg_extern(sql = false)]
fn judge_canary(
    before: Vec<Option<f64>>,
    since: Vec<Option<f64>>,
    error_rate: f64,
    slowdown: f64,
    statements: f64,
) -> TableIterator<'static, (name!(place, i32), name!(outcome, &'static str), name!(said, String))> {
    let limits = Limits { error_rate, slowdown, statements };
    let of =
        |place: usize| judge(&figures(&before, place), &figures(&before, 1 - place), &figures(&since, place), &limits);
    let rows: Vec<_> = [(0, of(0)), (1, of(1))]
        .into_iter()
        .flat_map(|(place, findings)| findings.map(|finding| (place, finding)))
        .map(|(place, finding)| {
            let outcome = match finding.outcome {
                Outcome::NotJudged { .. } => "not judged",
                Outcome::Met(_) => "met",
                Outcome::Broken(_) => "broken",
            };
            (place, outcome, finding.to_string())
        })
        .collect();
    TableIterator::new(rows)
}
