//! Names of transactions prepared on shards, and what to do with one that is found there.
//!
//! Decides what a crash left open. What always holds: a transaction's id is never used twice, for it holds the
//! coordinator's cluster and database, the full transaction id, which does not wrap round, and a random number of the
//! server's start, for after a crash, or in a cluster restored from a backup, numbers are given out a second time. A prepared
//! transaction is committed only on the evidence of the coordinator's record, and rolled back only if the coordinator's
//! transaction is surely over without one. Refuses to guess: evidence that does not fit together leaves it as it is.

use std::fmt;
use std::time::Duration;

/// What all ids begin with.
pub const PREFIX: &str = "shardmap_";

/// A transaction of a coordinator, as the beginning of its ids on shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransactionId {
    /// The coordinator's system identifier.
    pub system: u64,
    /// OID of its database.
    pub database: u32,
    /// The full 64-bit transaction id there.
    pub transaction: u64,
    /// The random number that the server chose when it started.
    pub start: u64,
}

impl fmt::Display for TransactionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}_{}_{}_{:016x}", self.system, self.database, self.transaction, self.start)
    }
}

/// The part of a transaction that one connection to a shard has done: what stands in PREPARE TRANSACTION.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PreparedId {
    /// The transaction.
    pub whole: TransactionId,
    /// OID of the shard's foreign server on the coordinator.
    pub server: u32,
    /// Its place among the parts, from 1: two users' connections to one shard are two parts.
    pub part: u32,
}

impl fmt::Display for PreparedId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}_{}", self.whole, self.server, self.part)
    }
}

impl PreparedId {
    /// Reads an id that a shard shows; `None` if it is not just as [`PreparedId`] is written.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.strip_prefix(PREFIX)?.split('_');
        let mut next = || fields.next();
        let whole = TransactionId {
            system: next()?.parse().ok()?,
            database: next()?.parse().ok()?,
            transaction: next()?.parse().ok()?,
            start: u64::from_str_radix(next()?, 16).ok()?,
        };
        let id = Self { whole, server: next()?.parse().ok()?, part: next()?.parse().ok()? };
        // Nothing after it, no signs, no other zeros: the text is the id's only one.
        (id.to_string() == text).then_some(id)
    }
}

/// What the coordinator knows of the number of one of its transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// It runs, or is just ending.
    Running,
    /// It is over, and has committed.
    Committed,
    /// It is over, and has not.
    Aborted,
    /// It is over for so long that how it ended is forgotten.
    Forgotten,
    /// There has not been such a number yet.
    Future,
}

/// What to do with a prepared transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// COMMIT PREPARED.
    Commit,
    /// ROLLBACK PREPARED.
    RollBack,
    /// Look again later: its coordinator has not decided.
    Wait,
    /// Leave it to a person.
    Leave,
    /// Another coordinator's.
    Foreign,
}

impl Decision {
    /// As `shardmap.in_doubt` says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::RollBack => "roll back",
            Self::Wait => "running",
            Self::Leave => "unclear",
            Self::Foreign => "foreign",
        }
    }
}

/// What is known of a prepared transaction.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    /// Its id names this coordinator's cluster and database.
    pub ours: bool,
    /// The coordinator's catalog holds, committed, the record of this very transaction. Looked up after the others, so
    /// that a transaction which ended in between is not taken for one without a record.
    pub recorded: bool,
    /// It was begun since the server started last.
    pub this_start: bool,
    /// What is known of its number, if it is of this start.
    pub local: Local,
    /// How long it has been prepared, by the shard's own clock.
    pub age: Duration,
}

/// How old a transaction of an earlier start must be to be rolled back. A copy of the coordinator, restored for a test
/// say, takes what the original does for its own from before: those last some milliseconds.
pub const SETTLED: Duration = Duration::from_secs(5);

/// Decides on a prepared transaction.
#[must_use]
pub fn decide(evidence: Evidence) -> Decision {
    match evidence {
        Evidence { recorded: true, .. } => Decision::Commit,
        Evidence { ours: false, .. } => Decision::Foreign,
        // No session outlives the server: it is over. Its number may be another's by now.
        Evidence { this_start: false, age, .. } if age >= SETTLED => Decision::RollBack,
        Evidence { this_start: false, .. } => Decision::Wait,
        Evidence { local: Local::Running, .. } => Decision::Wait,
        Evidence { local: Local::Aborted | Local::Forgotten, .. } => Decision::RollBack,
        // The record is written before the transaction commits and goes after its parts have: somebody took it away.
        Evidence { local: Local::Committed, .. } => Decision::Leave,
        // No start has such a transaction.
        Evidence { local: Local::Future, .. } => Decision::Leave,
    }
}

/// What the administrator wants of a commit that one shard alone cannot make atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// PREPARE TRANSACTION, and the decision here.
    TwoPhase,
    /// No such commit.
    Refuse,
    /// One shard after the other, then here.
    OnePhase,
}

/// How a transaction is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// COMMIT on each shard, then here.
    OnePhase,
    /// PREPARE TRANSACTION on each shard, commit here with a record of it, COMMIT PREPARED on each shard.
    TwoPhase,
    /// Not at all.
    Refused,
}

/// Decides how to commit a transaction that may have written on `shards` connections to shards, and `here`.
#[must_use]
pub fn protocol(shards: usize, here: bool, policy: Policy) -> Protocol {
    match (shards + usize::from(here), policy) {
        // What only the coordinator wrote is no matter of shards.
        _ if shards == 0 => Protocol::OnePhase,
        (1, _) | (_, Policy::OnePhase) => Protocol::OnePhase,
        (_, Policy::TwoPhase) => Protocol::TwoPhase,
        (_, Policy::Refuse) => Protocol::Refused,
    }
}
