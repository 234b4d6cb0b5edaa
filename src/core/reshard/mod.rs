//! A move: rows of one key or of many change their shard while they are read and written.
//!
//! Decides in which order the steps of a move come, and what may be broken off when. What always holds: until the flip
//! the source owns the rows and those on the target are hidden; from the flip on it is the other way round; what is deleted
//! was hidden before. Every state is durable, and its step can be taken again after a crash in the middle of it. Until the
//! source's rows are being deleted, a flipped move can turn back: it is *reversed*, goes through the states from
//! [`State::CatchingUp`] on a second time with the two shards in each other's place, and flips back. A reversed move can be
//! turned forward again. Refuses, with [`Refused`], an event that does not belong to a state.
//!
//! The steps themselves are SQL on shards: read `sql/moves_steps.sql` next. `tests/reshard.rs` explores a small model.

use std::fmt;

/// Where a move has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It is entered in the catalog; nothing has been looked at.
    Planned,
    /// All that could stand in its way was looked at. The target's rows are being hidden, changes are about to be logged.
    Prechecked,
    /// Changes on the source are logged; rows are copied in batches.
    Copying,
    /// All rows were copied; the changes since are applied until the rest is small.
    CatchingUp,
    /// Both sides are compared.
    Verifying,
    /// They were equal; the writers are to be held off for the last changes.
    Fencing,
    /// The map names the target. The source's rows are hidden, and kept for those who still read them.
    Flipped,
    /// The source's rows are being deleted.
    Cleaning,
    /// The end: the target alone has the rows.
    Done,
    /// The target's rows are being deleted.
    RollingBack,
    /// The end: the source alone has the rows.
    RolledBack,
}

/// What brings a move on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Nothing stands in the way.
    Checked,
    /// The target's rows are hidden from everybody, and changes are logged.
    Prepared,
    /// The last row was copied.
    Copied,
    /// The changes that were not applied are few.
    CaughtUp,
    /// Both sides are equal.
    Verified,
    /// Many changes came after the comparison, or the fence was lifted.
    FellBehind,
    /// The map names the target.
    Flip,
    /// Nobody reads the source's rows any more.
    Released,
    /// All rows that were to be deleted are.
    Cleaned,
    /// It is not wanted any more; if it is reversed, the way back is not.
    Cancel,
    /// What has moved is wanted back.
    Reverse,
}

/// An event that does not belong to a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Where the move is.
    pub state: State,
    /// What should have happened.
    pub event: Event,
    /// Whether it is on its way back.
    pub reversed: bool,
}

/// The one table of names: SQL stores them.
macro_rules! names {
    ($kind:ident: $($variant:ident = $name:literal),* $(,)?) => {
        impl $kind {
            /// All of them, in their order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// As SQL stores it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Reads what [`Self::as_str`] writes.
            #[must_use]
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($name => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

names! { State:
    Planned = "planned", Prechecked = "prechecked", Copying = "copying", CatchingUp = "catching_up",
    Verifying = "verifying", Fencing = "fencing", Flipped = "flipped", Cleaning = "cleaning", Done = "done",
    RollingBack = "rolling_back", RolledBack = "rolled_back",
}
names! { Event:
    Checked = "checked", Prepared = "prepared", Copied = "copied", CaughtUp = "caught_up", Verified = "verified",
    FellBehind = "fell_behind", Flip = "flip", Released = "released", Cleaned = "cleaned", Cancel = "cancel",
    Reverse = "reverse",
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let back = if self.reversed { ", on its way back," } else { "" };
        write!(f, "a move that is {}{back} cannot take \"{}\"", self.state, self.event)
    }
}

impl State {
    /// The state after an event, and whether the move is on its way back then.
    ///
    /// # Errors
    /// [`Refused`] (SQLSTATE 55000): the event does not belong to the state.
    pub fn after(self, event: Event, reversed: bool) -> Result<(Self, bool), Refused> {
        let next = match (self, event) {
            (Self::Planned, Event::Checked) => Self::Prechecked,
            (Self::Prechecked, Event::Prepared) => Self::Copying,
            (Self::Copying, Event::Copied) | (Self::Fencing, Event::FellBehind) => Self::CatchingUp,
            (Self::CatchingUp, Event::CaughtUp) => Self::Verifying,
            // What was compared before the last changes need not be compared again: they are, under the fence.
            (Self::Verifying | Self::CatchingUp, Event::Verified) => Self::Fencing,
            // Back at the source, the target's rows are what is to be deleted.
            (Self::Fencing, Event::Flip) if reversed => Self::RollingBack,
            (Self::Fencing, Event::Flip) => Self::Flipped,
            (Self::Flipped, Event::Reverse) => return Ok((Self::CatchingUp, true)),
            (state, Event::Cancel) if state.can_turn_forward(reversed) => return Ok((Self::Flipped, false)),
            (Self::Flipped, Event::Released) => Self::Cleaning,
            (Self::Cleaning, Event::Cleaned) => Self::Done,
            (state, Event::Cancel) if state.can_cancel(reversed) => Self::RollingBack,
            (Self::RollingBack, Event::Cleaned) => Self::RolledBack,
            (state, event) => return Err(Refused { state, event, reversed }),
        };
        Ok((next, reversed))
    }

    /// Whether it can be broken off: the map does not name the target yet.
    #[must_use]
    pub fn can_cancel(self, reversed: bool) -> bool {
        self < Self::Flipped && !reversed
    }

    /// Whether the map still names the target of a move on its way back, which then goes forward again.
    #[must_use]
    pub fn can_turn_forward(self, reversed: bool) -> bool {
        self < Self::Flipped && reversed
    }

    /// Whether there is nothing left to do.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::RolledBack)
    }

    /// Whether the map names the target.
    #[must_use]
    pub fn is_flipped(self, reversed: bool) -> bool {
        matches!(self, Self::Flipped | Self::Cleaning | Self::Done) || self.can_turn_forward(reversed)
    }

    /// Whether its step needs one snapshot of the source for all that it reads.
    #[must_use]
    pub fn needs_snapshot(self) -> bool {
        matches!(self, Self::Copying | Self::CatchingUp | Self::Verifying)
    }
}
