//! What is counted, and how it is kept in a file from one run of the server to the next.
//!
//! Decides the steps of the ladder that have a counter, and the layout of the file. What always holds: a file that
//! [`decode`] accepts was written whole by [`encode`] of a version that meant the same by every field; anything else is
//! refused with a reason, since wrong figures are worse than none. Layout: one line `pg_shardmap statistics VERSION
//! MD5`, then JSON; MD5 is that of the JSON, in hex. Read `src/pg/stats` for the memory that is kept.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::hash::md5_u128;

/// The layout that is written and read. Grows when a field changes its meaning.
const VERSION: u32 = 1;

const TITLE: &str = "pg_shardmap statistics";

/// What became of a statement on logical tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Ran whole on one shard.
    Routed,
    /// Ran here on one shard's tables.
    Substituted,
    /// Asked some shards, not all.
    Narrowed,
    /// Asked every shard.
    FanOut,
    /// Was not run.
    Refused,
    /// Inserted rows, each on its shard.
    Insert,
}

impl Step {
    /// All steps, from the ladder's top down.
    pub const ALL: [Self; 6] =
        [Self::Routed, Self::Substituted, Self::Narrowed, Self::FanOut, Self::Refused, Self::Insert];

    /// Returns the name by which users know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::Substituted => "substituted",
            Self::Narrowed => "narrowed",
            Self::FanOut => "fan_out",
            Self::Refused => "refused",
            Self::Insert => "insert",
        }
    }
}

/// One shape of statement that asked every shard, by one user in one database.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FanoutQuery {
    /// OID of the database.
    pub database: u32,
    /// OID of the user.
    pub user: u32,
    /// [`crate::fingerprint::fingerprint`] of the whole normalised text.
    pub fingerprint: u64,
    /// The normalised text, cut to its bound.
    pub text: String,
    /// Names of the logical tables, as of the last call.
    pub tables: String,
    /// Why it asked every shard, as of the last call.
    pub reason: String,
    /// Most shards that one call asked.
    pub shards: u32,
    /// How often it ran.
    pub calls: u64,
    /// Rows returned or changed, all calls together.
    pub rows: u64,
    /// Nanoseconds, all calls together.
    pub total_ns: u64,
    /// Nanoseconds of the shortest call.
    pub min_ns: u64,
    /// Nanoseconds of the longest call.
    pub max_ns: u64,
    /// First call: microseconds since 2000-01-01 UTC, as Postgres counts.
    pub first_seen: i64,
    /// Last call, likewise.
    pub last_seen: i64,
}

/// Statements of one database by step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepCount {
    /// OID of the database.
    pub database: u32,
    /// What became of them.
    pub step: Step,
    /// How many.
    pub statements: u64,
}

/// Statements of one database by shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardCount {
    /// OID of the database.
    pub database: u32,
    /// Name of the keyspace.
    pub keyspace: String,
    /// Number of the shard in its keyspace.
    pub shard: u16,
    /// How many.
    pub statements: u64,
    /// Errors of the shard, and connections to it that were lost.
    #[serde(default)]
    pub errors: u64,
    /// Nanoseconds that sessions have waited for it alone.
    #[serde(default)]
    pub waited_ns: u64,
}

/// All that is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // the types say it
pub struct Statistics {
    pub fanout: Vec<FanoutQuery>,
    pub steps: Vec<StepCount>,
    pub shards: Vec<ShardCount>,
    /// Fan-out queries that made room for others.
    pub evicted: u64,
    /// When fan-out queries were first kept, or last reset: microseconds since 2000-01-01 UTC.
    pub fanout_since: i64,
    /// When statements were first counted, or the counters last reset, likewise.
    pub routing_since: i64,
}

/// Why a file is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileError {
    /// Not such a file at all, or cut in its first line.
    NotStatistics,
    /// Of a version with another layout.
    OtherVersion,
    /// Changed or cut since it was written.
    Damaged,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStatistics => "it is no file of pg_shardmap statistics",
            Self::OtherVersion => "another version of pg_shardmap wrote it",
            Self::Damaged => "its checksum does not match",
        })
    }
}

impl std::error::Error for FileError {}

/// Returns the file that holds `statistics`.
///
/// # Errors
/// None that is known: every field is a number or text.
pub fn encode(statistics: &Statistics) -> Result<String, serde_json::Error> {
    let body = serde_json::to_string(statistics)?;
    Ok(format!("{TITLE} {VERSION} {:032x}\n{body}", md5_u128(body.as_bytes())))
}

/// Returns what a file holds.
///
/// # Errors
/// [`FileError`]: whatever [`encode`] of this version has not written.
pub fn decode(file: &[u8]) -> Result<Statistics, FileError> {
    let text = std::str::from_utf8(file).map_err(|_| FileError::NotStatistics)?;
    let (head, body) = text.split_once('\n').ok_or(FileError::NotStatistics)?;
    let rest = head.strip_prefix(TITLE).and_then(|rest| rest.strip_prefix(' ')).ok_or(FileError::NotStatistics)?;
    let (version, sum) = rest.split_once(' ').ok_or(FileError::NotStatistics)?;
    if version != VERSION.to_string() {
        return Err(FileError::OtherVersion);
    }
    if sum != format!("{:032x}", md5_u128(body.as_bytes())) {
        return Err(FileError::Damaged);
    }
    serde_json::from_str(body).map_err(|_| FileError::OtherVersion)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    fn sample() -> Statistics {
        Statistics {
            fanout: vec![FanoutQuery {
                database: 5,
                user: u32::MAX,
                fingerprint: u64::MAX,
                text: "SELECT \"é\\\n\" FROM t".into(),
                tables: "public.t".into(),
                reason: "no condition on the key".into(),
                shards: 8,
                calls: 3,
                rows: 24,
                total_ns: u64::MAX,
                min_ns: 1,
                max_ns: u64::MAX - 1,
                first_seen: i64::MIN,
                last_seen: i64::MAX,
            }],
            steps: Step::ALL.map(|step| StepCount { database: 5, step, statements: 7 }).to_vec(),
            shards: vec![ShardCount {
                database: 5,
                keyspace: "main".into(),
                shard: 1023,
                statements: 9,
                errors: 2,
                waited_ns: 77,
            }],
            evicted: 2,
            fanout_since: -1,
            routing_since: 1,
        }
    }

    #[test]
    fn round_trip_is_exact() {
        for statistics in [Statistics::default(), sample()] {
            assert_eq!(decode(encode(&statistics).unwrap().as_bytes()), Ok(statistics));
        }
    }

    /// Frozen: figures that users have kept must stay readable, or [`VERSION`] must grow.
    #[test]
    fn layout_is_golden() {
        let file = encode(&sample()).unwrap();
        let (head, body) = file.split_once('\n').unwrap();
        assert_eq!(head, "pg_shardmap statistics 1 27be5a62395203ff07440bcdf154355f", "{body}");
    }

    #[test]
    fn a_file_from_before_errors_and_waits_were_counted_is_read() {
        let body = encode(&sample()).unwrap().split_once('\n').unwrap().1.replace(",\"errors\":2,\"waited_ns\":77", "");
        let file = format!("{TITLE} 1 {:032x}\n{body}", md5_u128(body.as_bytes()));
        assert!(file.starts_with("pg_shardmap statistics 1 7e56af6dcf4dce222abc73aa6cf624d3"));
        let mut before = sample();
        before.shards.iter_mut().for_each(|count| (count.errors, count.waited_ns) = (0, 0));
        assert_eq!(decode(file.as_bytes()), Ok(before));
    }

    #[test]
    fn names_are_those_of_the_file() {
        for step in Step::ALL {
            assert_eq!(serde_json::to_string(&step).unwrap(), format!("\"{}\"", step.name()));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let file = encode(&sample()).unwrap();
        assert_eq!(decode(b""), Err(FileError::NotStatistics));
        assert_eq!(decode(b"\xff\xfe"), Err(FileError::NotStatistics));
        assert_eq!(decode(file.replacen(" 1 ", " 2 ", 1).as_bytes()), Err(FileError::OtherVersion));
        for cut in 0..file.len() {
            assert!(decode(&file.as_bytes()[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..file.len() {
            let mut bytes = file.clone().into_bytes();
            bytes[at] ^= 1;
            assert!(decode(&bytes).is_err(), "changed at {at}");
        }
    }
}
