//! Which reads a replica gets.
//!
//! Decides by how its objective burns: at the first sign it loses the reads that must see their reader's own writes, which
//! suffer most; when it pages, all. It comes back when all has been good for the calm time. What always holds: an
//! administrator's drain comes first; without an objective nothing but that takes a replica out.

use super::objective::{Alert, Burn, FAST};
use crate::replica::{codes, Moment, Rotation};

codes! {
    /// Why a replica gets the reads that it gets.
    Why {
        /// Nothing has happened.
        Start = 0, "nothing against it";
        /// An administrator has drained it.
        Drained = 1, "drained by an administrator";
        /// An administrator has brought it back.
        Undrained = 2, "brought back by an administrator";
        /// The error budget burns fast over the last five minutes.
        Burning = 3, "objective missed in the last five minutes";
        /// The objective pages.
        Paging = 4, "objective burns its error budget";
        /// It has been good for long enough.
        Calm = 5, "within its objective again for the calm time";
        /// There is no objective any more.
        NoObjective = 6, "objective was removed";
    }
}

/// Which reads a replica gets, since when and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    /// Which reads.
    pub rotation: Rotation,
    /// Since when.
    pub since: Moment,
    /// Why.
    pub why: Why,
}

impl State {
    /// In, as a replica begins.
    #[must_use]
    pub fn new(now: Moment) -> Self {
        Self { rotation: Rotation::In, since: now, why: Why::Start }
    }

    /// Decides anew.
    #[must_use]
    pub fn next(self, now: Moment, drained: bool, burn: Option<&mut Burn>) -> Self {
        let (rotation, why) = self.wanted(now, drained, burn);
        if rotation == self.rotation {
            return self;
        }
        Self { rotation, since: now, why }
    }

    fn wanted(&self, now: Moment, drained: bool, burn: Option<&mut Burn>) -> (Rotation, Why) {
        if drained {
            return (Rotation::Drained, Why::Drained);
        }
        let Some(burn) = burn else {
            let undrained = self.rotation == Rotation::Drained;
            return (Rotation::In, if undrained { Why::Undrained } else { Why::NoObjective });
        };
        let back = if self.rotation == Rotation::Drained { Why::Undrained } else { Why::Calm };
        if burn.is_calm(now) {
            return (Rotation::In, back);
        }
        let rates = burn.rates(now);
        let objective = burn.objective();
        let was_out = self.rotation == Rotation::Out;
        if rates.alert(objective) == Alert::Page || was_out {
            return (Rotation::Out, Why::Paging);
        }
        let was_out_of_some = self.rotation == Rotation::OutOfReadYourWrites;
        if rates.five_minutes >= objective.limit(FAST) || was_out_of_some {
            return (Rotation::OutOfReadYourWrites, Why::Burning);
        }
        (Rotation::In, back)
    }
}
