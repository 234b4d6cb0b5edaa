//! What was last heard of a shard's servers, as plain values.
//!
//! Decides how an observation looks as words of shared memory. What always holds: what is not known is `None` or says why,
//! and is never 0; words that this version has not written decode to nothing. Read [`crate::lag`] for who judges.

mod words;

use std::fmt;
use std::time::Duration;

pub use words::WORDS;

/// A place in the write-ahead log, in bytes from its beginning. Means something on one timeline only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

/// A number that each failover raises; 1 at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timeline(pub u32);

/// Names the log itself: given when a cluster is made, and kept by its physical copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SystemIdentifier(pub u64);

/// A moment: microseconds since 2000-01-01 UTC, as Postgres counts, by the coordinator's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub i64);

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

impl Lsn {
    /// Reads an LSN as Postgres writes it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (high, low) = text.split_once('/')?;
        let part = |digits: &str| {
            let is_hex = (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_hex.then(|| u64::from_str_radix(digits, 16).ok())?
        };
        Some(Self(part(high)? << 32 | part(low)?))
    }
}

impl Moment {
    /// The time from `earlier` to this; nothing if that is later, as after the clock was set back.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// This much later.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(micros(time)))
    }

    /// This much earlier.
    #[must_use]
    pub fn minus(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(micros(time)))
    }
}

fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$each:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$each])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The number that stands for it in shared memory.
            #[must_use]
            pub fn code(self) -> u64 {
                match self { $(Self::$variant => $code,)* }
            }

            /// What a number stands for.
            #[must_use]
            pub fn of_code(code: u64) -> Option<Self> {
                Self::ALL.iter().copied().find(|each| each.code() == code)
            }

            /// The words by which users know it.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

pub(crate) use codes;

codes! {
    /// Why it is not known where a server stands.
    Unknown {
        /// It has not been asked yet.
        NotAsked = 1, "not asked yet";
        /// No connection could be made, or it was lost.
        Unreachable = 2, "not reachable";
        /// It did not answer in time.
        NoAnswer = 3, "no answer in time";
        /// It answered with an error.
        Refused = 4, "answered with an error";
        /// Nothing feeds it: its WAL receiver does not run.
        NoReceiver = 5, "WAL receiver is not running";
        /// The user of the shard may not see on which timeline it is.
        TimelineHidden = 6, "timeline may be old; grant pg_monitor to see it";
        /// It is behind the primary, by more time than the primary has been watched.
        NotLongEnough = 7, "primary not watched long enough";
        /// The shard's primary has not answered yet, so that there is nothing to compare with.
        NoPrimary = 8, "primary has not answered yet";
        /// What is known of it is old.
        Stale = 9, "not sampled lately";
    }
}

codes! {
    /// Why a server is not what it is registered as.
    Invalid {
        /// A replica's server that is not in recovery.
        NotReplica = 1, "not a replica: it is not in recovery";
        /// A primary's server that is in recovery.
        NotPrimary = 2, "not a primary: it is in recovery";
        /// Not a copy of the shard's primary.
        OtherSystem = 3, "copy of another server: other system identifier";
        /// A copy that has parted from the primary.
        OtherTimeline = 4, "on another timeline than the primary";
        /// It shows another database of the same copy.
        OtherDatabase = 5, "another database than the shard's";
        /// A clone of the primary's image that has a log of its own since.
        OtherLog = 6, "follows another server: it has replayed what the primary has not written";
    }
}

/// Where a server stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The shard's primary.
    Primary,
    /// A replica that shows what the primary was this long ago, or a later state.
    Replica {
        /// Time by which it is behind.
        lag: Duration,
    },
    /// It cannot be told. Not the same as no lag.
    Unknown(Unknown),
    /// Not what it is registered as.
    Invalid(Invalid),
}

codes! {
    /// What feeds a replica.
    Receiver {
        /// It streams.
        Running = 1, "running";
        /// It should stream and does not.
        Stopped = 2, "stopped";
        /// It reads an archive, and has no connection to stream from.
        NotUsed = 3, "not used";
    }
}

codes! {
    /// Which reads a replica gets.
    Rotation {
        /// All reads.
        In = 0, "in";
        /// Not those that must see the reader's own writes.
        OutOfReadYourWrites = 1, "out of read-your-writes";
        /// None.
        Out = 2, "out";
        /// None, because an administrator says so.
        Drained = 3, "drained";
    }
}

/// What was last heard of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// When it answered; or when it was found that it does not.
    pub taken_at: Moment,
    /// Where it stands.
    pub standing: Standing,
    /// Which reads it gets.
    pub rotation: Rotation,
    /// How long its answer took.
    pub round_trip: Option<Duration>,
    /// It is in recovery.
    pub in_recovery: Option<bool>,
    /// Whose log it has.
    pub system: Option<SystemIdentifier>,
    /// The timeline it is on.
    pub timeline: Option<Timeline>,
    /// Up to where a replica has replayed, or a primary has flushed. A replica has at least this.
    pub replayed: Option<Lsn>,
    /// Up to where a replica has received.
    pub received: Option<Lsn>,
    /// Bytes by which a replica is behind.
    pub behind: Option<u64>,
    /// What feeds a replica.
    pub receiver: Option<Receiver>,
    /// Its replay is paused.
    pub paused: Option<bool>,
}

impl Observation {
    /// What is known of a server that has not been asked.
    #[must_use]
    pub fn unknown(taken_at: Moment, why: Unknown) -> Self {
        Self {
            taken_at,
            standing: Standing::Unknown(why),
            rotation: Rotation::In,
            round_trip: None,
            in_recovery: None,
            system: None,
            timeline: None,
            replayed: None,
            received: None,
            behind: None,
            receiver: None,
            paused: None,
        }
    }
}

impl Observation {
    /// What is left of it at `now`: an old observation is none.
    #[must_use]
    pub fn at(self, now: Moment, limit: Duration) -> Self {
        if now.since(self.taken_at) <= limit {
            return self;
        }
        Self { rotation: self.rotation, ..Self::unknown(self.taken_at, Unknown::Stale) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lsn_reads_what_it_writes() {
        for (text, lsn) in [("0/0", 0), ("16/B374D848", 0x16_B374_D848), ("FFFFFFFF/FFFFFFFF", u64::MAX)] {
            assert_eq!(Lsn::parse(text), Some(Lsn(lsn)));
            assert_eq!(Lsn(lsn).to_string(), text);
        }
        for wrong in ["", "/", "0", "0/", "/0", "0/123456789", "G/0", "+1/0", "0/0/0"] {
            assert_eq!(Lsn::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_old_observation_is_none() {
        let mut fresh = Observation::unknown(Moment(0), Unknown::NotAsked);
        (fresh.standing, fresh.replayed) = (Standing::Primary, Some(Lsn(1)));
        assert_eq!(fresh.at(Moment(5), Duration::from_micros(5)), fresh);
        let old = fresh.at(Moment(6), Duration::from_micros(5));
        assert_eq!((old.standing, old.replayed), (Standing::Unknown(Unknown::Stale), None));
    }

    #[test]
    fn time_does_not_run_backwards() {
        assert_eq!(Moment(5).since(Moment(2)), Duration::from_micros(3));
        assert_eq!(Moment(2).since(Moment(5)), Duration::ZERO);
        assert_eq!(Moment(i64::MIN).since(Moment(i64::MAX)), Duration::ZERO);
    }
}
