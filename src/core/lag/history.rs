//! Where a primary was when, by our own clock.
//!
//! Decides at which moment the primary passed a position. What always holds: the clocks of the servers play no part; a
//! position that the primary has not left is passed now, however long ago it was written; one that is older than the history
//! has no moment. Between two looks at the primary its writing is taken to be even, so that a moment is right to the time
//! between them; while nobody looked for longer than [`GAP`], or between places that were kept over a restart, it is taken to have written all at once at the beginning, so that
//! nobody seems less behind than he is. At most [`POINTS`] looks are kept, the older ones more sparsely.

use std::collections::VecDeque;
use std::time::Duration;

use crate::replica::{Lsn, Moment, SystemIdentifier, Timeline};

/// Most points that are kept.
pub const POINTS: usize = 4096;

/// Longer than this nobody has looked.
pub const GAP: Duration = Duration::from_secs(10);

/// The primary was seen at this position, first and last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    lsn: Lsn,
    first: Moment,
    last: Moment,
    /// Nobody had looked for long before.
    after_gap: bool,
}

impl Point {
    fn new(lsn: Lsn, at: Moment, after_gap: bool) -> Self {
        Self { lsn, first: at, last: at, after_gap }
    }
}

/// A look that outlives the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// When the primary was there.
    pub at: Moment,
    /// Whose log.
    pub system: SystemIdentifier,
    /// The timeline that it wrote.
    pub timeline: Timeline,
    /// Where it was.
    pub lsn: Lsn,
}

/// The positions of one primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    system: Option<SystemIdentifier>,
    timeline: Timeline,
    /// Nobody has looked since the newest point, for all that is known.
    unseen: bool,
    /// In the order of both position and time. Never empty.
    points: VecDeque<Point>,
}

impl History {
    /// Begins with the first look at a primary.
    #[must_use]
    pub fn new(system: Option<SystemIdentifier>, timeline: Timeline, lsn: Lsn, at: Moment) -> Self {
        Self { system, timeline, unseen: false, points: VecDeque::from([Point::new(lsn, at, false)]) }
    }

    /// Begins with what an earlier history has kept, oldest first, and a look now: what is of another log, or of a later timeline
    /// than the primary's, says nothing. `None`: nothing was kept.
    #[must_use]
    pub fn restored(kept: &[Kept], system: Option<SystemIdentifier>, timeline: Timeline) -> Option<Self> {
        let counts = |look: &&Kept| Some(look.system) == system && look.timeline <= timeline;
        let mut looks = kept.iter().filter(counts);
        let first = looks.next()?;
        let mut history = Self::new(system, first.timeline, first.lsn, first.at);
        for look in looks {
            history.unseen = true;
            history.note(system, look.timeline, look.lsn, look.at);
        }
        history.unseen = true;
        Some(history)
    }

    /// The last look, to be kept; `None`: nobody knows whose log it is.
    #[must_use]
    pub fn kept(&self) -> Option<Kept> {
        Some(Kept { at: self.last_seen(), system: self.system?, timeline: self.timeline, lsn: self.newest() })
    }

    /// Whose log it is; `None`: not to be seen.
    #[must_use]
    pub fn system(&self) -> Option<SystemIdentifier> {
        self.system
    }

    /// The timeline that the primary writes.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        self.timeline
    }

    /// The newest position known.
    #[must_use]
    pub fn newest(&self) -> Lsn {
        self.points.back().map_or(Lsn(0), |point| point.lsn)
    }

    /// When the primary was last seen.
    #[must_use]
    pub fn last_seen(&self) -> Moment {
        self.points.back().map_or(Moment(0), |point| point.last)
    }

    /// Adds a look: the primary was at `lsn` when asked at `at`. A new system, or a new timeline, whose log parts from the
    /// old one, takes what cannot be true any more.
    pub fn note(&mut self, system: Option<SystemIdentifier>, timeline: Timeline, lsn: Lsn, at: Moment) {
        if system.zip(self.system).is_some_and(|(new, old)| new != old) {
            *self = Self::new(system, timeline, lsn, at);
            return;
        }
        self.system = system.or(self.system);
        self.timeline = timeline;
        self.set_clock(at);
        while self.points.back().is_some_and(|point| point.lsn > lsn) {
            self.points.pop_back();
        }
        match self.points.back_mut() {
            Some(newest) if newest.lsn == lsn => newest.last = at,
            Some(newest) => {
                let after_gap = self.unseen || at.since(newest.last) > GAP;
                self.points.push_back(Point::new(lsn, at, after_gap));
            }
            None => self.points.push_back(Point::new(lsn, at, false)),
        }
        self.unseen = false;
        if self.points.len() > POINTS {
            self.thin();
        }
    }

    /// Sets all moments back as far as the clock was: else who is behind would seem not to be until it has caught up.
    fn set_clock(&mut self, now: Moment) {
        let back = self.last_seen().since(now);
        if !back.is_zero() {
            for point in &mut self.points {
                (point.first, point.last) = (point.first.minus(back), point.last.minus(back));
            }
        }
    }

    /// Drops every other point of the older half, but the first.
    fn thin(&mut self) {
        let half = self.points.len() / 2;
        let mut gap = false;
        let keep = |(at, mut point): (usize, Point)| {
            let is_kept = at >= half || at % 2 == 0;
            point.after_gap |= gap;
            gap = point.after_gap && !is_kept;
            is_kept.then_some(point)
        };
        self.points = self.points.drain(..).enumerate().filter_map(keep).collect();
    }

    /// How long before `now` the primary passed `lsn`: the time by which a replica that has replayed up to there is behind.
    /// `None`: before the history began.
    ///
    /// `fresh`: a primary that was seen so long ago at most is taken to be where it was then.
    #[must_use]
    pub fn lag(&self, lsn: Lsn, now: Moment, fresh: Duration) -> Option<Duration> {
        let after = self.points.partition_point(|point| point.lsn <= lsn);
        let before = self.points.get(after.checked_sub(1)?)?;
        let Some(next) = self.points.get(after) else {
            let unseen = now.since(before.last);
            return Some(if unseen <= fresh { Duration::ZERO } else { unseen });
        };
        if next.after_gap {
            return Some(now.since(before.last));
        }
        let (done, all) = (lsn.0 - before.lsn.0, next.lsn.0 - before.lsn.0);
        let between = next.first.since(before.last).as_micros();
        let into = between * u128::from(done) / u128::from(all.max(1));
        let passed = before.last.plus(Duration::from_micros(u64::try_from(into).unwrap_or(u64::MAX)));
        Some(now.since(passed))
    }

    /// Bytes from `lsn` to the newest position.
    #[must_use]
    pub fn behind(&self, lsn: Lsn) -> u64 {
        self.newest().0.saturating_sub(lsn.0)
    }

    /// How many points are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }
}
