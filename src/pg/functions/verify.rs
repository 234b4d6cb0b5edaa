//! Summaries and rows of two shards, compared by the core for `sql/verify_shards.sql`.
//!
//! Decides nothing. Refuses documents that are not as `sql/verify.sql` makes them. Read next: `shardmap_core::checksum`.

use pgrx::iter::TableIterator;
use pgrx::prelude::*;
use shardmap_core::checksum::{
    compare_buckets, compare_rows, read_names, read_rows, read_side, Aspect, Buckets, Malformed, PART_BITS,
};

use crate::pg::encoding;
use crate::pg::error::Refusal;

/// What was read, or the error raised.
fn read<T>(read: impl FnOnce(&str) -> Result<T, Malformed>, json: &[u8]) -> T {
    read(&encoding::utf8(json)).unwrap_or_else(|error| {
        Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, error.to_string()).raise()
    })
}

fn text(value: &str) -> Vec<u8> {
    encoding::server(value).into_owned()
}

fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The buckets that differ; `parts`: the documents are of parts of buckets. `figures`: their names.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn compare_summaries(
    source: &[u8],
    target: &[u8],
    bits: i32,
    parts: bool,
    figures: &[u8],
) -> TableIterator<
    'static,
    (
        name!(bucket, i64),
        name!(token_from, i64),
        name!(token_to, i64),
        name!(source_rows, i64),
        name!(target_rows, i64),
        name!(aspects, Vec<u8>),
    ),
> {
    let buckets = Buckets::new(u32::try_from(bits).unwrap_or(0));
    let (source, target, figures) = (read(read_side, source), read(read_side, target), read(read_names, figures));
    let rows = compare_buckets(&source, &target).into_iter().map(move |found| {
        let (first, last) = buckets.tokens(if parts { found.bucket >> PART_BITS } else { found.bucket });
        let name = |aspect: &Aspect| match aspect {
            Aspect::Rows => "rows",
            Aspect::Keys => "keys",
            Aspect::Checksum => "checksum",
            Aspect::Figure(place) => figures.get(*place).map_or("figure", String::as_str),
        };
        let aspects: Vec<&str> = found.aspects.iter().map(name).collect();
        let (source, target) = (count(found.source_rows), count(found.target_rows));
        (found.bucket.into(), first.0.into(), last.0.into(), source, target, text(&aspects.join(", ")))
    });
    TableIterator::new(rows.collect::<Vec<_>>())
}

/// The rows that differ.
#[pg_extern(sql = false)]
#[allow(clippy::type_complexity)]
fn compare_row_digests(
    source: &[u8],
    target: &[u8],
) -> TableIterator<
    'static,
    (
        name!(finding, Vec<u8>),
        name!(key, Vec<u8>),
        name!(row_id, Vec<u8>),
        name!(source_rows, i64),
        name!(target_rows, i64),
    ),
> {
    let found = compare_rows(&read(read_rows, source), &read(read_rows, target));
    TableIterator::new(found.into_iter().map(|row| {
        let (source, target) = (count(row.source), count(row.target));
        (text(row.fault.as_str()), text(&row.key), text(&row.row), source, target)
    }))
}
