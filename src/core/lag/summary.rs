//! What is published of a replica beside its last observation: distribution, objective, rotation; and its words.
//!
//! What always holds: [`Summary::of_words`] gives back what [`Summary::words`] was given, but for counts beyond 2^64; words
//! of all zeros are no summary.

use super::objective::{Alert, Rates};
use super::rotation::{State, Why};
use super::shape::Shape;
use super::window::Figures;
use crate::replica::{Moment, Rotation};

/// Words that a summary takes.
pub const WORDS: usize = 25;

/// The lengths of the windows, as users know them.
pub const WINDOWS: [&str; 4] = ["1 minute", "5 minutes", "1 hour", "24 hours"];

/// All of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The distributions over [`WINDOWS`].
    pub figures: [Figures; 4],
    /// How the objective burns, if there is one.
    pub rates: Option<Rates>,
    /// Who should look.
    pub alert: Alert,
    /// Since when.
    pub alert_since: Moment,
    /// A growing maximum under a steady p99.
    pub early_warning: bool,
    /// The look of the last 24 hours.
    pub shape: Shape,
    /// Hours of the day, UTC, that had bursts in the last 24: bit 0 stands for midnight to one.
    pub burst_hours: u32,
    /// Which reads it gets.
    pub state: State,
}

impl Summary {
    /// Returns the words for it.
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let rates = self.rates.unwrap_or_default();
        let head = [
            1 | u64::from(self.rates.is_some()) << 1
                | u64::from(self.early_warning) << 2
                | self.alert.code() << 8
                | self.shape.code() << 16
                | self.state.rotation.code() << 24
                | self.state.why.code() << 32,
            self.burst_hours.into(),
            self.alert_since.0.cast_unsigned(),
            self.state.since.0.cast_unsigned(),
            rates.five_minutes.to_bits(),
            rates.half_hour.to_bits(),
            rates.hour.to_bits(),
            rates.six_hours.to_bits(),
            rates.three_days.to_bits(),
        ];
        let figures = self
            .figures
            .iter()
            .flat_map(|each| [each.samples, each.unknown, pair(each.p50, each.p90), pair(each.p99, each.max)]);
        for (word, value) in words.iter_mut().zip(head.into_iter().chain(figures)) {
            *word = value;
        }
        words
    }

    /// Returns what the words stand for; `None` if they are not a summary's.
    #[must_use]
    pub fn of_words(words: &[u64; WORDS]) -> Option<Self> {
        let [head, hours, alert_since, since, five_minutes, half_hour, hour, six_hours, three_days, rest @ ..] = *words;
        if head & 1 == 0 {
            return None;
        }
        let byte = |at: u32| head >> at & 0xff;
        let mut figures = [Figures::default(); 4];
        for (figures, words) in figures.iter_mut().zip(rest.chunks_exact(4)) {
            if let [samples, unknown, low, high] = *words {
                let ((p50, p90), (p99, max)) = (split(low), split(high));
                *figures = Figures { samples, unknown, p50, p90, p99, max };
            }
        }
        let rates = Rates {
            five_minutes: f64::from_bits(five_minutes),
            half_hour: f64::from_bits(half_hour),
            hour: f64::from_bits(hour),
            six_hours: f64::from_bits(six_hours),
            three_days: f64::from_bits(three_days),
        };
        Some(Self {
            figures,
            rates: (head & 2 != 0).then_some(rates),
            alert: Alert::of_code(byte(8))?,
            alert_since: Moment(alert_since.cast_signed()),
            early_warning: head & 4 != 0,
            shape: Shape::of_code(byte(16))?,
            burst_hours: u32::try_from(hours).ok()?,
            state: State {
                rotation: Rotation::of_code(byte(24))?,
                since: Moment(since.cast_signed()),
                why: Why::of_code(byte(32))?,
            },
        })
    }
}

/// What listeners are told when a replica's state changes, as JSON; `None`: nothing has changed. A replica begins in a good
/// state, so that a good one is no news.
#[must_use]
pub fn news(shard: &str, replica: &str, before: Option<&Summary>, after: &Summary) -> Option<String> {
    let good = (Alert::Ok, Rotation::In, false);
    let state = |summary: &Summary| (summary.alert, summary.state.rotation, summary.early_warning);
    let (before, now) = (before.map_or(good, state), state(after));
    let text = |(alert, rotation, early_warning): (Alert, Rotation, bool)| serde_json::json!({"alert": alert.text(), "rotation": rotation.text(), "early_warning": early_warning});
    let news = || {
        let (alert, rotation, early_warning) = now;
        serde_json::json!({
            "shard": shard, "replica": replica, "alert": alert.text(), "rotation": rotation.text(),
            "early_warning": early_warning, "why": after.state.why.text(), "was": text(before),
        })
        .to_string()
    };
    (before != now).then(news)
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn split(word: u64) -> (u32, u32) {
    ((word & 0xffff_ffff) as u32, (word >> 32) as u32)
}
