//! How batches come to take their time.
#![allow(missing_docs, clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]

use std::time::Duration;

use proptest::prelude::*;
use shardmap_core::batch::{next_batch, BATCH_TIME, LEAST_BATCH};

/// The batches of a table that has `rows` left, copied at a speed, with what each costs besides.
fn batches(mut left: u64, rows_per_second: f64, besides: Duration) -> Vec<(u64, Duration)> {
    let (mut batches, mut asked) = (Vec::new(), LEAST_BATCH);
    while left > 0 {
        let rows = left.min(asked);
        let took = besides + Duration::from_secs_f64(rows as f64 / rows_per_second);
        batches.push((rows, took));
        left -= rows;
        asked = next_batch(rows, asked, took);
    }
    batches
}

#[test]
fn few_batches_are_small() {
    let batches = batches(1_000_000, 400_000.0, Duration::from_millis(10));
    assert!(batches.len() <= 12, "{batches:?}");
}

#[test]
fn a_batch_does_not_shrink_to_nothing() {
    assert_eq!(next_batch(LEAST_BATCH, LEAST_BATCH, Duration::from_secs(4 * 3600)), LEAST_BATCH);
    assert_eq!(next_batch(7, 7, Duration::from_secs(60)), LEAST_BATCH);
    assert_eq!(next_batch(7, 7, Duration::ZERO), LEAST_BATCH);
}

#[test]
fn shards_that_are_far_away_get_large_batches() {
    let batches = batches(1_000_000, 200_000.0, Duration::from_secs(2));
    assert!(batches.iter().rev().skip(1).all(|(rows, _)| *rows >= LEAST_BATCH), "{batches:?}");
}

#[test]
fn the_end_of_a_table_says_nothing_of_speed() {
    assert_eq!(next_batch(3, 50_000, Duration::from_millis(20)), 50_000);
    assert_eq!(next_batch(0, 50_000, Duration::from_secs(20)), 50_000);
    assert_eq!(next_batch(0, 0, Duration::ZERO), LEAST_BATCH);
}

proptest! {
    #[test]
    fn no_batch_is_empty_and_none_grows_at_once(rows in 0..1_u64 << 40, asked in 0..1_u64 << 40, took in 0..1_u64 << 40) {
        let next = next_batch(rows, asked, Duration::from_micros(took));
        prop_assert!(next >= LEAST_BATCH);
        prop_assert!(next <= asked.max(rows.saturating_mul(4)).max(LEAST_BATCH));
    }

    #[test]
    fn after_a_few_a_batch_takes_its_time(speed in 25_000.0..1e7_f64, besides in 0..50_u64) {
        let all = batches((speed * 60.0) as u64 + 200_000, speed, Duration::from_millis(besides));
        let settled = &all[all.len().min(8)..all.len() - 1];
        prop_assert!(settled.iter().all(|(_, took)| *took <= BATCH_TIME * 3 / 2), "{all:?}");
    }
}
