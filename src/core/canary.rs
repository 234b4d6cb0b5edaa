//! Whether a shard bears what it got, by statistics from before and since.
//!
//! Decides of one shard's errors and waits whether they are within bounds. What always holds: figures of too few statements
//! are not judged, and that is said; what is as it was before is within bounds. Refuses nothing. Read `sql/canary.sql` for
//! what is done about it.

use std::fmt;

/// Milliseconds by which statements may become slower, whatever they took before: that much is chance.
const CHANCE_MS: f64 = 1.0;

/// What was counted of a shard in some time. Finite, and not below 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Statements that asked it.
    pub statements: f64,
    /// Its errors, and connections that were lost.
    pub errors: f64,
    /// Milliseconds that sessions have waited for it.
    pub wait_ms: f64,
}

/// What is allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Errors per statement beyond those from before.
    pub error_rate: f64,
    /// How many times as long as before a statement may be waited for; at least 1.
    pub slowdown: f64,
    /// Statements that are needed for a judgement.
    pub statements: f64,
}

/// What is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Errors per statement.
    Errors,
    /// Milliseconds per statement.
    Wait,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// There were too few statements: since, or before.
    NotJudged {
        /// That is, before.
        before: bool,
    },
    /// Within bounds.
    Met(Values),
    /// Out of bounds.
    Broken(Values),
}

/// By statement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Values {
    /// Before.
    pub before: f64,
    /// Since.
    pub since: f64,
    /// Allowed.
    pub most: f64,
}

/// One measure of one shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finding {
    /// What was judged.
    pub measure: Measure,
    /// What came of it.
    pub outcome: Outcome,
    /// Since when it got what it got.
    pub since: Figures,
    /// Statements that were needed.
    pub needed: f64,
}

impl Figures {
    /// An error may come before its statement is counted.
    fn attempts(&self) -> f64 {
        self.statements.max(self.errors)
    }

    fn error_rate(&self) -> f64 {
        self.errors / self.attempts().max(1.0)
    }

    fn wait(&self) -> f64 {
        self.wait_ms / self.statements.max(1.0)
    }
}

/// Judges a shard by what it was `before`, or, if it had too few statements then, by what the `other` shard of the move was.
///
/// Without either, errors are judged as if there had been none, and waits not at all.
#[must_use]
pub fn judge(before: &Figures, other: &Figures, since: &Figures, limits: &Limits) -> [Finding; 2] {
    let needed = limits.statements.max(1.0);
    let base = [before, other].into_iter().find(|figures| figures.attempts() >= needed);
    let waited = [before, other].into_iter().find(|figures| figures.statements >= needed);
    let judged = |before: f64, since: f64, most: f64| {
        let values = Values { before, since, most };
        if since > most {
            Outcome::Broken(values)
        } else {
            Outcome::Met(values)
        }
    };
    let errors = if since.attempts() >= needed {
        let was = base.map_or(0.0, Figures::error_rate);
        judged(was, since.error_rate(), was + limits.error_rate)
    } else {
        Outcome::NotJudged { before: false }
    };
    let wait = match waited {
        _ if since.statements < needed => Outcome::NotJudged { before: false },
        None => Outcome::NotJudged { before: true },
        Some(base) => judged(base.wait(), since.wait(), (base.wait() * limits.slowdown).max(base.wait() + CHANCE_MS)),
    };
    let finding = |measure, outcome| Finding { measure, outcome, since: *since, needed };
    [finding(Measure::Errors, errors), finding(Measure::Wait, wait)]
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = match self.measure {
            Measure::Errors => "errors",
            Measure::Wait => "waits",
        };
        match (self.outcome, self.measure) {
            (Outcome::NotJudged { before }, _) => {
                let when = if before { " before" } else { "" };
                write!(f, "{named} not judged: fewer than {} statements{when}", self.needed)
            }
            (Outcome::Met(v) | Outcome::Broken(v), Measure::Errors) => write!(
                f,
                "errors in {:.2} % of {} statements, {:.2} % before, {:.2} % allowed",
                100.0 * v.since,
                self.since.attempts(),
                100.0 * v.before,
                100.0 * v.most
            ),
            (Outcome::Met(v) | Outcome::Broken(v), Measure::Wait) => write!(
                f,
                "waits of {:.2} ms for each of {} statements, {:.2} ms before, {:.2} ms allowed",
                v.since, self.since.statements, v.before, v.most
            ),
        }
    }
}
