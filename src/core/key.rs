//! Canonical text of keys.
//!
//! Decides which text stands for a key. What always holds: keys that are equal by their column's own equality have equal
//! text, whatever the driver bound them as; the text equals what [`KeyKind::sql`] computes on a shard, byte for byte.
//! Different keys have different text, but for times from 294247-01-10 on, which Postgres' `extract` rounds to 0.1 ms:
//! these keys share a shard and nothing else. Refuses, by having no kind for them, types for which that cannot
//! be promised (float, jsonb, text of a nondeterministic collation). Read [`crate::hash`] next.

use std::io::Write;

use serde::{Deserialize, Serialize};

/// How the keys of a column's type become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyKind {
    /// int2, int4, int8: one family, equal numbers have equal text.
    Integer,
    /// text and varchar.
    Text,
    /// char(n): trailing blanks do not count.
    Bpchar,
    /// uuid.
    Uuid,
    /// numeric: trailing zeros of the fraction do not count; a whole number has the text of the integer.
    Numeric,
    /// date, as seconds since 1970.
    Date,
    /// timestamp without time zone, as seconds since 1970.
    Timestamp,
    /// timestamp with time zone, as seconds since 1970 UTC.
    Timestamptz,
    /// bytea, as hex digits.
    Bytea,
}

impl KeyKind {
    /// All kinds, for tests and for listings.
    pub const ALL: [Self; 9] = [
        Self::Integer,
        Self::Text,
        Self::Bpchar,
        Self::Uuid,
        Self::Numeric,
        Self::Date,
        Self::Timestamp,
        Self::Timestamptz,
        Self::Bytea,
    ];

    /// Returns the SQL expression of the canonical text of `column_sql`, of built-ins only, under any `search_path`.
    ///
    /// Calls of immutable functions instead of casts through text: postgres_fdw sends the former to shards, not the latter.
    /// `column_sql`: SQL of an expression of this kind's type, already quoted; it is put in parentheses.
    #[must_use]
    pub fn sql(self, column_sql: &str) -> String {
        // EXTRACT is syntax for pg_catalog.extract; it returns numeric since Postgres 14.
        let number = |sql: &str| format!("pg_catalog.textin(pg_catalog.numeric_out(pg_catalog.trim_scale({sql})))");
        match self {
            Self::Integer => format!("pg_catalog.textin(pg_catalog.int8out({column_sql}))"),
            Self::Text | Self::Bpchar => format!("({column_sql})::pg_catalog.text"),
            Self::Uuid => format!("pg_catalog.textin(pg_catalog.uuid_out({column_sql}))"),
            Self::Numeric => number(column_sql),
            Self::Date | Self::Timestamp => number(&format!("EXTRACT(epoch FROM ({column_sql}))")),
            // The same number as without a time zone in UTC, but that is immutable.
            Self::Timestamptz => number(&format!("EXTRACT(epoch FROM pg_catalog.timezone('UTC', {column_sql}))")),
            Self::Bytea => format!("pg_catalog.encode(({column_sql}), 'hex')"),
        }
    }
}

/// A key as Postgres holds it in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyValue<'a> {
    /// Value of an int2, int4 or int8.
    Integer(i64),
    /// Bytes of a text or varchar.
    Text(&'a [u8]),
    /// Bytes of a char(n), padded or not.
    Bpchar(&'a [u8]),
    /// The 16 bytes of a uuid.
    Uuid([u8; 16]),
    /// What `numeric_out` returns.
    Numeric(&'a str),
    /// Days since 2000-01-01; `i32::MIN` and `i32::MAX` are the infinities.
    Date(i32),
    /// Microseconds since 2000-01-01; `i64::MIN` and `i64::MAX` are the infinities.
    Timestamp(i64),
    /// Microseconds since 2000-01-01 UTC; `i64::MIN` and `i64::MAX` are the infinities.
    Timestamptz(i64),
    /// Bytes of a bytea.
    Bytea(&'a [u8]),
}

/// Room for the canonical text of one key. Reused, it allocates only for a bytea longer than any before.
#[derive(Clone, Debug, Default)]
pub struct CanonicalBuf(Vec<u8>);

impl CanonicalBuf {
    /// Returns room that every kind but bytea fits in.
    #[must_use]
    pub fn new() -> Self {
        Self(Vec::with_capacity(64))
    }
}

/// Seconds from 1970-01-01, where Unix time starts, to 2000-01-01, where Postgres' dates start.
const POSTGRES_EPOCH: i64 = 946_684_800;
const SECONDS_PER_DAY: i64 = 86_400;
const MICROS: u64 = 1_000_000;

impl KeyValue<'_> {
    /// Returns the key's kind.
    #[must_use]
    pub fn kind(&self) -> KeyKind {
        match self {
            Self::Integer(_) => KeyKind::Integer,
            Self::Text(_) => KeyKind::Text,
            Self::Bpchar(_) => KeyKind::Bpchar,
            Self::Uuid(_) => KeyKind::Uuid,
            Self::Numeric(_) => KeyKind::Numeric,
            Self::Date(_) => KeyKind::Date,
            Self::Timestamp(_) => KeyKind::Timestamp,
            Self::Timestamptz(_) => KeyKind::Timestamptz,
            Self::Bytea(_) => KeyKind::Bytea,
        }
    }
}

impl<'a> KeyValue<'a> {
    /// Returns the key's canonical text, borrowed from the key where it stands there already, else written to `buf`.
    pub fn canonical<'b>(&self, buf: &'b mut CanonicalBuf) -> &'b [u8]
    where
        'a: 'b,
    {
        match *self {
            Self::Text(text) => text,
            Self::Bpchar(text) => trim_end(text, b' '),
            Self::Numeric(text) => trim_scale(text).as_bytes(),
            Self::Integer(value) => buf.fill(|out| write!(out, "{value}")),
            Self::Uuid(bytes) => buf.fill(|out| {
                for (at, byte) in bytes.iter().enumerate() {
                    if matches!(at, 4 | 6 | 8 | 10) {
                        out.push(b'-');
                    }
                    push_hex(out, *byte);
                }
                Ok(())
            }),
            Self::Date(i32::MIN) | Self::Timestamp(i64::MIN) | Self::Timestamptz(i64::MIN) => b"-Infinity",
            Self::Date(i32::MAX) | Self::Timestamp(i64::MAX) | Self::Timestamptz(i64::MAX) => b"Infinity",
            Self::Date(days) => {
                let seconds = i64::from(days) * SECONDS_PER_DAY + POSTGRES_EPOCH;
                buf.fill(|out| write!(out, "{seconds}"))
            }
            Self::Timestamp(micros) | Self::Timestamptz(micros) => buf.fill(|out| push_epoch(out, micros)),
            Self::Bytea(bytes) => buf.fill(|out| {
                for byte in bytes {
                    push_hex(out, *byte);
                }
                Ok(())
            }),
        }
    }
}

impl CanonicalBuf {
    fn fill(&mut self, write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) -> &[u8] {
        self.0.clear();
        // Writing to a vector cannot fail.
        let _ = write(&mut self.0);
        &self.0
    }
}

fn push_hex(out: &mut Vec<u8>, byte: u8) {
    const fn digit(nibble: u8) -> u8 {
        if nibble < 10 {
            b'0' + nibble
        } else {
            b'a' + nibble - 10
        }
    }
    out.extend_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
}

/// Writes microseconds since 2000 as seconds since 1970, as `trim_scale(extract(epoch from k))::text` does.
fn push_epoch(out: &mut Vec<u8>, micros: i64) -> std::io::Result<()> {
    let value = i128::from(micros) + i128::from(POSTGRES_EPOCH) * i128::from(MICROS);
    if value < 0 {
        out.push(b'-');
    }
    // Past the years that fit, extract divides as numeric does: to four decimals.
    let value = if value < i128::from(i64::MAX) { value } else { (value + 50) / 100 * 100 };
    // |value| < 2^63 + 10^15, which fits.
    let value = u64::try_from(value.unsigned_abs()).unwrap_or(u64::MAX);
    write!(out, "{}", value / MICROS)?;
    let fraction = value % MICROS;
    if fraction != 0 {
        write!(out, ".{fraction:06}")?;
        let trimmed = trim_end(out, b'0').len();
        out.truncate(trimmed);
    }
    Ok(())
}

fn trim_end(mut text: &[u8], blank: u8) -> &[u8] {
    while let Some((last, rest)) = text.split_last() {
        if *last != blank {
            break;
        }
        text = rest;
    }
    text
}

/// Returns the output text of a numeric without the trailing zeros of its fraction, as `trim_scale` does.
fn trim_scale(text: &str) -> &str {
    let trimmed = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text };
    if trimmed == "-0" {
        return "0";
    }
    trimmed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: KeyValue<'_>) -> String {
        String::from_utf8_lossy(value.canonical(&mut CanonicalBuf::new())).into_owned()
    }

    /// Frozen: a changed row moves live data.
    #[test]
    fn canonical_texts() {
        let day = 86_400_000_000;
        for (value, want) in [
            (KeyValue::Integer(0), "0"),
            (KeyValue::Integer(i64::MIN), "-9223372036854775808"),
            (KeyValue::Text(b"007 "), "007 "),
            (KeyValue::Bpchar(b" ab \t  "), " ab \t"),
            (KeyValue::Bpchar(b"   "), ""),
            (
                KeyValue::Uuid([0xA0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xFF]),
                "a0010203-0405-0607-0809-0a0b0c0d0eff",
            ),
            (KeyValue::Numeric("1.00"), "1"),
            (KeyValue::Numeric("100"), "100"),
            (KeyValue::Numeric("100.10"), "100.1"),
            (KeyValue::Numeric("0.00"), "0"),
            (KeyValue::Numeric("-0.0"), "0"),
            (KeyValue::Numeric("-0.50"), "-0.5"),
            (KeyValue::Numeric("NaN"), "NaN"),
            (KeyValue::Numeric("-Infinity"), "-Infinity"),
            (KeyValue::Date(0), "946684800"),
            (KeyValue::Date(-10_957), "0"),
            (KeyValue::Date(-10_958), "-86400"),
            (KeyValue::Date(i32::MAX), "Infinity"),
            (KeyValue::Date(i32::MIN), "-Infinity"),
            (KeyValue::Timestamp(0), "946684800"),
            (KeyValue::Timestamp(1), "946684800.000001"),
            (KeyValue::Timestamp(500_000), "946684800.5"),
            (KeyValue::Timestamp(-10_957 * day - 1), "-0.000001"),
            (KeyValue::Timestamp(-10_957 * day - 1_500_000), "-1.5"),
            (KeyValue::Timestamp(i64::MAX - 946_684_800_000_001), "9223372036854.775806"),
            (KeyValue::Timestamp(i64::MAX - 946_684_800_000_000), "9223372036854.7758"),
            (KeyValue::Timestamp(9_223_371_331_199_999_949), "9224318015999.9999"),
            (KeyValue::Timestamptz(9_223_371_331_199_999_950), "9224318016000"),
            (KeyValue::Timestamptz(i64::MAX), "Infinity"),
            (KeyValue::Timestamptz(i64::MIN), "-Infinity"),
            (KeyValue::Bytea(b"\x00\xabZ"), "00ab5a"),
            (KeyValue::Bytea(b""), ""),
        ] {
            assert_eq!(text(value), want, "{value:?}");
        }
    }

    #[test]
    fn equal_values_of_the_number_and_time_families_have_equal_text() {
        assert_eq!(text(KeyValue::Integer(7)), text(KeyValue::Numeric("7.000")));
        assert_eq!(text(KeyValue::Date(100)), text(KeyValue::Timestamp(100 * 86_400_000_000)));
    }

    #[test]
    fn sql_names_pg_catalog_only() {
        assert_eq!(KeyKind::Integer.sql("k"), "pg_catalog.textin(pg_catalog.int8out(k))");
        assert_eq!(KeyKind::Text.sql("k"), "(k)::pg_catalog.text");
        assert_eq!(KeyKind::Bytea.sql("k"), "pg_catalog.encode((k), 'hex')");
        for kind in KeyKind::ALL {
            assert!(kind.sql("\"k\"").contains("pg_catalog."), "{kind:?}");
        }
    }
}
