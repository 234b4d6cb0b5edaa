//! What an answer says about a server.
//!
//! Decides whether a replica's lag is known, unknown or no lag at all, with the reason. What always holds: only an answer
//! of a server in recovery, with the primary's system identifier and timeline, fed by a receiver that runs, gives a lag; a
//! server that may not say its timeline is not taken to be on the right one.

use std::time::Duration;

use super::history::History;
use crate::replica::{
    Invalid, Lsn, Moment, Observation, Receiver, Rotation, Standing, SystemIdentifier, Timeline, Unknown,
};

/// What a server said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// It is in recovery.
    pub in_recovery: bool,
    /// Whose log it has; `None`: the user may not see it.
    pub system: Option<SystemIdentifier>,
    /// The timeline it is on; `None`: the user may not see it.
    pub timeline: Option<Timeline>,
    /// The timeline is the one it is on now, not one of some time ago.
    pub timeline_is_current: bool,
    /// Up to where a primary has flushed, or a replica replayed.
    pub position: Option<Lsn>,
    /// Up to where a replica has received.
    pub received: Option<Lsn>,
    /// What feeds a replica.
    pub receiver: Option<Receiver>,
    /// Its replay is paused.
    pub paused: Option<bool>,
}

/// A question to a server, and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// When it was asked.
    pub sent: Moment,
    /// When it answered, or was found not to.
    pub came: Moment,
    /// What it said, or why nothing is known.
    pub heard: Result<Answer, Unknown>,
}

impl Asked {
    fn observation(&self, standing: Standing) -> Observation {
        let mut observation = Observation::unknown(self.came, Unknown::NotAsked);
        observation.standing = standing;
        if let Ok(answer) = self.heard {
            observation.round_trip = Some(self.came.since(self.sent));
            observation.in_recovery = Some(answer.in_recovery);
            observation.system = answer.system;
            observation.timeline = answer.timeline;
            observation.replayed = answer.position;
            if answer.in_recovery {
                (observation.received, observation.receiver) = (answer.received, answer.receiver);
                observation.paused = answer.paused;
            }
        }
        observation.rotation = Rotation::In;
        observation
    }
}

/// Judges a primary, and adds what it said to its history.
pub fn primary(asked: &Asked, history: &mut Option<History>) -> Observation {
    let answer = match asked.heard {
        Ok(answer) => answer,
        Err(why) => return asked.observation(Standing::Unknown(why)),
    };
    if answer.in_recovery {
        return asked.observation(Standing::Invalid(Invalid::NotPrimary));
    }
    let (Some(timeline), Some(lsn)) = (answer.timeline, answer.position) else {
        return asked.observation(Standing::Unknown(Unknown::TimelineHidden));
    };
    match history {
        Some(history) if history.timeline() > timeline && !differ(history.system(), answer.system) => {
            // A former primary, which somebody has brought back.
            return asked.observation(Standing::Invalid(Invalid::OtherTimeline));
        }
        // Asked then, so there by then at the latest: the earlier moment makes replicas seem behind, not ahead.
        Some(history) => history.note(answer.system, timeline, lsn, asked.sent),
        None => *history = Some(History::new(answer.system, timeline, lsn, asked.sent)),
    }
    asked.observation(Standing::Primary)
}

fn differ(one: Option<SystemIdentifier>, other: Option<SystemIdentifier>) -> bool {
    one.zip(other).is_some_and(|(one, other)| one != other)
}

/// Judges a replica by its primary's history.
///
/// `fresh`: see [`History::lag`].
#[must_use]
pub fn replica(asked: &Asked, history: Option<&History>, fresh: Duration) -> Observation {
    let answer = match asked.heard {
        Ok(answer) => answer,
        Err(why) => return asked.observation(Standing::Unknown(why)),
    };
    let standing = standing(&answer, history, asked.came, fresh);
    let mut observation = asked.observation(standing);
    if !matches!(standing, Standing::Invalid(_)) {
        observation.behind = history.zip(answer.position).map(|(history, lsn)| history.behind(lsn));
    }
    observation
}

/// A replica as judged, unless it shows another database than its primary. `None`: not known.
#[must_use]
pub fn of_database(judged: Observation, own: Option<u32>, primary: Option<u32>) -> Observation {
    match judged.standing {
        Standing::Invalid(_) => judged,
        _ if own.zip(primary).is_some_and(|(own, primary)| own != primary) => {
            Observation { standing: Standing::Invalid(Invalid::OtherDatabase), behind: None, ..judged }
        }
        _ => judged,
    }
}

/// Whether a replica had replayed what its primary, asked later, had not written: it follows another server, though one of the same
/// system and timeline, which clones of one image share.
#[must_use]
pub fn is_ahead(replica: &Observation, primary: &Asked) -> bool {
    let Ok(answer) = primary.heard else { return false };
    let is_of = replica.system.is_some() && (replica.system, replica.timeline) == (answer.system, answer.timeline);
    let is_later = replica.taken_at <= primary.sent;
    let is_ahead = replica.replayed.zip(answer.position).is_some_and(|(replayed, written)| replayed > written);
    is_of && is_later && is_ahead && replica.in_recovery == Some(true) && !answer.in_recovery
}

fn standing(answer: &Answer, history: Option<&History>, now: Moment, fresh: Duration) -> Standing {
    if !answer.in_recovery {
        return Standing::Invalid(Invalid::NotReplica);
    }
    let Some(history) = history else { return Standing::Unknown(Unknown::NoPrimary) };
    if differ(answer.system, history.system()) {
        return Standing::Invalid(Invalid::OtherSystem);
    }
    match answer.timeline {
        Some(timeline) if timeline == history.timeline() => {}
        // One that is not current may be newer than it says, never older.
        Some(timeline) if answer.timeline_is_current || timeline > history.timeline() => {
            return Standing::Invalid(Invalid::OtherTimeline);
        }
        _ => return Standing::Unknown(Unknown::TimelineHidden),
    }
    if answer.receiver == Some(Receiver::Stopped) {
        return Standing::Unknown(Unknown::NoReceiver);
    }
    match answer.position.and_then(|lsn| history.lag(lsn, now, fresh)) {
        Some(lag) => Standing::Replica { lag },
        None => Standing::Unknown(Unknown::NotLongEnough),
    }
}
