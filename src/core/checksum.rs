//! Rows of two shards compared by bucket: counts and sums of checksums first, single rows only where these differ.
//!
//! Decides which bucket a key is in, what a bucket's summary is, and what the difference of two lists of rows is called.
//! What always holds: a summary does not depend on the order of its rows, and two of them can be added; a row that is
//! missing, doubled or changed changes the summary of its bucket and of no other (changes, also several that would cancel
//! each other out in a sum of the values, go unseen with a chance of 2^-63); what is not in a document is not taken for equal. Refuses documents that are not as `sql/verify.sql` makes
//! them. The same sums in SQL, of built-ins only, are there.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::ops::AddAssign;

use serde::Deserialize;

use crate::hash::md5_u128;
use crate::ids::Token;

/// Most bits by which the token space is cut: a summary of a table has 2^16 buckets at most.
pub const MAX_BITS: u32 = 16;
/// Bits by which a bucket is cut once more, by row.
pub const PART_BITS: u32 = 12;

/// Into how many buckets the token space is cut: 2 to the power of `bits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    bits: u32,
}

/// A bucket, or a part of one.
pub type BucketId = u32;

impl Buckets {
    /// Cuts the token space by its first `bits` bits, at most [`MAX_BITS`].
    #[must_use]
    pub fn new(bits: u32) -> Self {
        Self { bits: bits.min(MAX_BITS) }
    }

    /// Returns the bucket of a token.
    #[must_use]
    pub fn of(self, token: Token) -> BucketId {
        token.0.checked_shr(32 - self.bits).unwrap_or(0)
    }

    /// Returns the bucket's first and last token.
    #[must_use]
    pub fn tokens(self, bucket: BucketId) -> (Token, Token) {
        let first = bucket.checked_shl(32 - self.bits).unwrap_or(0);
        let rest = u32::MAX.checked_shr(self.bits).unwrap_or(0);
        (Token(first), Token(first | rest))
    }

    /// Returns the part of its bucket that a row is in: `bucket` and the first [`PART_BITS`] of the MD5 of what
    /// identifies the row.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // twelve bits
    pub fn part(self, token: Token, row: &str) -> BucketId {
        self.of(token) << PART_BITS | (md5_u128(row.as_bytes()) >> (128 - PART_BITS)) as u32
    }
}

/// Sum of the checksums of rows, so that order does not count: of each 63 bits of a hash of its text, which the shards
/// compute (`_checksum_sql` in `sql/verify.sql`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u128);

impl AddAssign for Checksum {
    /// Exact for 2^65 rows, then modulo 2^128.
    fn add_assign(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }
}

/// What a shard has of a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of rows.
    pub rows: u64,
    /// Sum of their checksums.
    pub checksum: Checksum,
    /// Number of different keys, by their checksums.
    pub keys: u64,
    /// Sum, least and greatest value of each numeric column, as text; nothing where all are NULL.
    pub figures: Vec<Option<String>>,
}

/// Summaries of the buckets that have rows.
pub type Side = BTreeMap<BucketId, Summary>;

/// What of two summaries differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aspect {
    /// The numbers of rows.
    Rows,
    /// The numbers of keys.
    Keys,
    /// The checksums.
    Checksum,
    /// Sum, least or greatest value of a numeric column: the figure's place.
    Figure(usize),
}

/// A bucket of which the shards have not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketDifference {
    /// The bucket.
    pub bucket: BucketId,
    /// Rows that the source has.
    pub source_rows: u64,
    /// Rows that the target has.
    pub target_rows: u64,
    /// What differs; never empty.
    pub aspects: Vec<Aspect>,
}

/// Returns the buckets of which the two sides have not the same, in ascending order.
#[must_use]
pub fn compare_buckets(source: &Side, target: &Side) -> Vec<BucketDifference> {
    let none = Summary::default();
    let buckets: BTreeSet<BucketId> = source.keys().chain(target.keys()).copied().collect();
    let differences = buckets.into_iter().filter_map(|bucket| {
        let (a, b) = (source.get(&bucket).unwrap_or(&none), target.get(&bucket).unwrap_or(&none));
        let aspects = aspects(a, b);
        (!aspects.is_empty()).then_some(BucketDifference { bucket, source_rows: a.rows, target_rows: b.rows, aspects })
    });
    differences.collect()
}

fn aspects(a: &Summary, b: &Summary) -> Vec<Aspect> {
    let mut aspects = Vec::new();
    let mut note = |differs: bool, aspect| {
        if differs {
            aspects.push(aspect);
        }
    };
    note(a.rows != b.rows, Aspect::Rows);
    note(a.keys != b.keys, Aspect::Keys);
    note(a.checksum != b.checksum, Aspect::Checksum);
    for place in 0..a.figures.len().max(b.figures.len()) {
        note(a.figures.get(place).cloned().flatten() != b.figures.get(place).cloned().flatten(), Aspect::Figure(place));
    }
    aspects
}

/// A row as it is named in findings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowDigest {
    /// Canonical text of its key.
    pub key: String,
    /// Its primary key as text, or for want of one its digest.
    pub row: String,
    /// MD5 of its text.
    pub digest: String,
}

/// What has happened to a row on the way from source to target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowFault {
    /// The target has it fewer times, most often not at all.
    Missing,
    /// The target has a row that the source does not have.
    Extra,
    /// The target has it more times than the source.
    Doubled,
    /// As often here as there, with other contents.
    Changed,
}

impl RowFault {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Extra => "extra",
            Self::Doubled => "doubled",
            Self::Changed => "changed",
        }
    }
}

/// A row that the shards do not have alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowDifference {
    /// Canonical text of its key.
    pub key: String,
    /// Its primary key as text, or for want of one its digest.
    pub row: String,
    /// What it is about.
    pub fault: RowFault,
    /// How many times the source has it.
    pub source: u64,
    /// How many times the target has it.
    pub target: u64,
}

/// Returns the rows that the two lists do not have alike, in ascending order of key and row.
#[must_use]
pub fn compare_rows(source: &[RowDigest], target: &[RowDigest]) -> Vec<RowDifference> {
    /// What both sides have of a row, by key and row.
    type Pairs<'a> = BTreeMap<(&'a str, &'a str), (Vec<&'a str>, Vec<&'a str>)>;
    let mut rows = Pairs::new();
    for row in source {
        rows.entry((&row.key, &row.row)).or_default().0.push(&row.digest);
    }
    for row in target {
        rows.entry((&row.key, &row.row)).or_default().1.push(&row.digest);
    }
    let differences = rows.into_iter().filter_map(|((key, row), (mut a, mut b))| {
        a.sort_unstable();
        b.sort_unstable();
        let fault = match (a.len(), b.len()) {
            _ if a == b => return None,
            (0, _) => RowFault::Extra,
            (here, there) if there > here => RowFault::Doubled,
            (here, there) if there < here => RowFault::Missing,
            _ => RowFault::Changed,
        };
        let (source, target) = (a.len() as u64, b.len() as u64);
        Some(RowDifference { key: key.to_owned(), row: row.to_owned(), fault, source, target })
    });
    differences.collect()
}

/// A shard's answer that cannot be read. SQLSTATE 22023.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a shard's summary of rows is malformed: {}", self.0)
    }
}

impl Error for Malformed {}

#[derive(Deserialize)]
struct BucketRow(BucketId, String, String, String, Vec<Option<String>>);

#[derive(Deserialize)]
struct DigestRow(String, String, String, #[allow(dead_code)] BucketId);

fn malformed(error: impl fmt::Display) -> Malformed {
    Malformed(error.to_string())
}

/// Reads summaries: `[[bucket, "rows", "checksum", "keys", ["figure", ..]], ..]`.
///
/// # Errors
/// [`Malformed`]: also for a bucket that stands there twice, or without rows.
pub fn read_side(json: &str) -> Result<Side, Malformed> {
    let mut side = Side::new();
    for row in serde_json::from_str::<Vec<BucketRow>>(json).map_err(malformed)? {
        let BucketRow(bucket, rows, checksum, keys, figures) = row;
        let summary = Summary {
            rows: rows.parse().map_err(malformed)?,
            checksum: Checksum(checksum.parse().map_err(malformed)?),
            keys: keys.parse().map_err(malformed)?,
            figures,
        };
        if summary.rows == 0 || side.insert(bucket, summary).is_some() {
            return Err(malformed(format_args!("bucket {bucket} has no rows or stands there twice")));
        }
    }
    Ok(side)
}

/// Reads rows: `[["key", "row", "digest", bucket], ..]`.
///
/// # Errors
/// [`Malformed`].
pub fn read_rows(json: &str) -> Result<Vec<RowDigest>, Malformed> {
    let rows = serde_json::from_str::<Vec<DigestRow>>(json).map_err(malformed)?;
    Ok(rows.into_iter().map(|DigestRow(key, row, digest, _)| RowDigest { key, row, digest }).collect())
}

/// Reads the names of the figures: `["name", ..]`.
///
/// # Errors
/// [`Malformed`].
pub fn read_names(json: &str) -> Result<Vec<String>, Malformed> {
    serde_json::from_str(json).map_err(malformed)
}
