//! When a canary is taken back.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;
use shardmap_core::canary::{judge, Figures, Limits, Outcome};

const LIMITS: Limits = Limits { error_rate: 0.01, slowdown: 2.0, statements: 100.0 };

fn of(statements: f64, errors: f64, wait_ms: f64) -> Figures {
    Figures { statements, errors, wait_ms }
}

fn figures() -> impl Strategy<Value = Figures> {
    let count = || prop_oneof![Just(0.0), (0_u32..200).prop_map(f64::from), (0_u32..1_000_000).prop_map(f64::from)];
    (count(), count(), prop_oneof![Just(0.0), 0.0..1e3, 0.0..1e8])
        .prop_map(|(statements, errors, wait_ms)| of(statements, errors, wait_ms))
}

fn limits() -> impl Strategy<Value = Limits> {
    (0.0..1.0, 1.0..10.0, prop_oneof![Just(0.0), 1.0..1000.0]).prop_map(|(error_rate, slowdown, statements)| Limits {
        error_rate,
        slowdown,
        statements,
    })
}

fn is_broken(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Broken(_))
}

fn is_judged(outcome: Outcome) -> bool {
    !matches!(outcome, Outcome::NotJudged { .. })
}

#[test]
fn what_is_said() {
    let nothing = Figures::default();
    let before = of(1000.0, 1.0, 2000.0);
    for (own, other, since, errors, waits) in [
        (
            before,
            nothing,
            of(500.0, 0.0, 1000.0),
            "errors in 0.00 % of 500 statements, 0.10 % before, 1.10 % allowed",
            "waits of 2.00 ms for each of 500 statements, 2.00 ms before, 4.00 ms allowed",
        ),
        (
            nothing,
            before,
            of(200.0, 20.0, 2000.0),
            "errors in 10.00 % of 200 statements, 0.10 % before, 1.10 % allowed",
            "waits of 10.00 ms for each of 200 statements, 2.00 ms before, 4.00 ms allowed",
        ),
        (
            of(99.0, 0.0, 1.0),
            nothing,
            of(100.0, 0.0, 9000.0),
            "errors in 0.00 % of 100 statements, 0.00 % before, 1.00 % allowed",
            "waits not judged: fewer than 100 statements before",
        ),
        (
            before,
            before,
            of(99.0, 99.0, 9000.0),
            "errors not judged: fewer than 100 statements",
            "waits not judged: fewer than 100 statements",
        ),
        (
            before,
            before,
            of(0.0, 100.0, 9000.0),
            "errors in 100.00 % of 100 statements, 0.10 % before, 1.10 % allowed",
            "waits not judged: fewer than 100 statements",
        ),
    ] {
        let said = judge(&own, &other, &since, &LIMITS).map(|finding| finding.to_string());
        assert_eq!(said, [errors, waits]);
    }
}

#[test]
fn chance_is_no_slowness() {
    let before = of(1000.0, 0.0, 100.0); // 0.1 ms each
    let outcome = |wait_ms| judge(&before, &before, &of(1000.0, 0.0, wait_ms), &LIMITS)[1].outcome;
    assert!(!is_broken(outcome(1099.0)));
    assert!(is_broken(outcome(1101.0)));
}

proptest! {
    #[test]
    fn what_is_as_before_is_within_bounds(before in figures(), other in figures(), limits in limits()) {
        for finding in judge(&before, &other, &before, &limits) {
            prop_assert!(!is_broken(finding.outcome) || before.statements.max(before.errors) < limits.statements.max(1.0));
        }
    }

    #[test]
    fn too_few_statements_are_not_judged(before in figures(), other in figures(), since in figures(), limits in limits()) {
        let needed = limits.statements.max(1.0);
        let [errors, waits] = judge(&before, &other, &since, &limits);
        prop_assert_eq!(is_judged(errors.outcome), since.statements.max(since.errors) >= needed);
        let has_base = [before, other].iter().any(|figures| figures.statements >= needed);
        prop_assert_eq!(is_judged(waits.outcome), since.statements >= needed && has_base);
    }

    #[test]
    fn worse_is_never_better(before in figures(), other in figures(), since in figures(), limits in limits(), more in 0.0..1e6_f64) {
        let [errors, waits] = judge(&before, &other, &since, &limits);
        let worse = of(since.statements, since.errors + more.floor(), since.wait_ms + more);
        let [worse_errors, worse_waits] = judge(&before, &other, &worse, &limits);
        prop_assert!(!is_broken(errors.outcome) || is_broken(worse_errors.outcome));
        prop_assert!(!is_broken(waits.outcome) || is_broken(worse_waits.outcome));
    }

    #[test]
    fn the_definition_word_by_word(before in figures(), other in figures(), since in figures(), limits in limits()) {
        let needed = limits.statements.max(1.0);
        let attempts = |figures: &Figures| figures.statements.max(figures.errors);
        let rate = |figures: &Figures| figures.errors / attempts(figures);
        let wait = |figures: &Figures| figures.wait_ms / figures.statements;
        let [errors, waits] = judge(&before, &other, &since, &limits);
        if is_judged(errors.outcome) {
            let was = match (attempts(&before) >= needed, attempts(&other) >= needed) {
                (true, _) => rate(&before),
                (false, true) => rate(&other),
                (false, false) => 0.0,
            };
            prop_assert_eq!(is_broken(errors.outcome), rate(&since) > was + limits.error_rate);
        }
        if is_judged(waits.outcome) {
            let (was, is) = (wait(if before.statements >= needed { &before } else { &other }), wait(&since));
            prop_assert_eq!(is_broken(waits.outcome), is > was * limits.slowdown && is > was + 1.0);
        }
    }
}
