//! Places in a write-ahead log, and when a server that is at one has all that another one stands for.
//!
//! A failover starts a new timeline at a fork point; what the old primary wrote behind it is lost. So a position is a
//! timeline and an LSN. What always holds: on the timeline of a position, whoever has replayed up to its LSN has it; a
//! server of an older timeline has nothing of it; on a newer timeline a server has it only if it lies before the fork.

use std::fmt;

pub use crate::replica::{Lsn, Timeline};

/// A place on a timeline. Ordered by the timeline first: a position of a later one stands for all that there is of the
/// earlier ones, for what it lacks is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The timeline.
    pub timeline: Timeline,
    /// The place on it.
    pub lsn: Lsn,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on timeline {}", self.lsn, self.timeline.0)
    }
}

/// Where a timeline began, on the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    /// The timeline that was left.
    pub from: Timeline,
    /// The timeline that began.
    pub to: Timeline,
    /// Up to where that has what the older one had; never more than it has.
    pub at: Lsn,
}

/// What a server at one position has of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// All.
    All,
    /// Not yet; it is on the way.
    NotYet,
    /// It is on an older timeline.
    Older,
    /// It is on a newer timeline, which may never have had it.
    Lost,
}

/// Tells what a server has of `wanted` that was at `server` when it was last heard of, and may be further on by now.
/// `forks`: those that are known of the log, in any order.
#[must_use]
pub fn holds(server: Position, wanted: Position, forks: &[Fork]) -> Holds {
    if server.timeline < wanted.timeline {
        return Holds::Older;
    }
    if !has_kept(server.timeline, wanted, forks) {
        return Holds::Lost;
    }
    // A replica may be known to follow a timeline before it has replayed up to where that begins.
    match server.lsn >= wanted.lsn {
        true => Holds::All,
        false => Holds::NotYet,
    }
}

/// Whether the log of `timeline` goes through `wanted`: that lies before every fork on the way.
fn has_kept(mut timeline: Timeline, wanted: Position, forks: &[Fork]) -> bool {
    while timeline > wanted.timeline {
        let fork = forks.iter().find(|fork| fork.to == timeline && fork.from < timeline);
        match fork {
            Some(fork) if wanted.lsn <= fork.at => timeline = fork.from,
            _ => return false,
        }
    }
    timeline == wanted.timeline
}
