//! The rows of a local table, each to the shard that owns it, or all to each of some shards, by COPY inside the
//! transaction.
//!
//! Decides nothing about ownership: the query that reads the table asks `shardmap.owner_of` for each row. Read next:
//! `stream`, which sends the rows.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::CString;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::carried::Needs;
use super::failure::{Failure, Result};
use super::pool::Connection;
use super::source::{c_string, for_each_row, quote, table_name};
use super::stream::{Destination, Stream};
use super::wire::copy::{Format, Row};
use crate::pg::encoding;
use crate::pg::savepoint;

const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// Copies every row of the ordinary table `source` to the table `schema.table` of the shard that owns the row's `key`.
/// Returns the shards that got rows, each with its number of rows.
///
/// `columns`: those to copy, which must not be generated ones.
///
/// # Errors
/// The shards' own; 23502 if a key is NULL; XX001 if a shard counts other than we do.
pub fn copy_rows(
    source: pg_sys::Oid,
    user: pg_sys::Oid,
    (schema, table): (&str, &str),
    (key, keyspace): (&str, &str),
    columns: &[String],
) -> Result<Vec<(String, i64)>> {
    let (from_schema, from_table) = table_name(source)?;
    let list = list(columns);
    let mut streams = Streams::new(user, &format!("{}.{}", quote(schema), quote(table)), &list);
    let query = format!(
        "SELECT shardmap.owner_of({}, $1), {list} FROM ONLY {}.{}",
        quote(key),
        quote(&from_schema),
        quote(&from_table)
    );
    read(&query, keyspace, &from_table, |row| {
        let (owner, values) = row.split_first().expect("the query's first column is the owner");
        let Some(owner) = owner else {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_NOT_NULL_VIOLATION,
                format!("null value in key column \"{key}\" of \"{from_table}\""),
            )
            .hint("Every row needs a key, which decides its shard."));
        };
        put(streams.of(owner)?, values)
    })?;
    streams.finish()
}

/// Copies every row of the ordinary table `source` to the table `schema.table` of each of `shards`. Returns the shards,
/// each with its number of rows.
///
/// # Errors
/// As [`copy_rows`].
pub fn copy_rows_to_each(
    source: pg_sys::Oid,
    user: pg_sys::Oid,
    (schema, table): (&str, &str),
    shards: &[String],
    columns: &[String],
) -> Result<Vec<(String, i64)>> {
    let (from_schema, from_table) = table_name(source)?;
    let list = list(columns);
    let mut streams = Streams::new(user, &format!("{}.{}", quote(schema), quote(table)), &list);
    for shard in shards {
        streams.of(&encoding::server(shard))?;
    }
    let query = format!("SELECT {list} FROM ONLY {}.{}", quote(&from_schema), quote(&from_table));
    read(&query, "", &from_table, |row| streams.all.iter().try_for_each(|(_, stream)| put(stream, row)))?;
    streams.finish()
}

fn list(columns: &[String]) -> String {
    columns.iter().map(|column| quote(column)).collect::<Vec<_>>().join(", ")
}

/// Reads the rows of `query`, and says how far it has come.
fn read(query: &str, parameter: &str, table: &str, mut each: impl FnMut(&[Option<&[u8]>]) -> Result<()>) -> Result<()> {
    let (count, mut told) = (Cell::new(0_u64), Instant::now());
    for_each_row(
        &c_string(query),
        &c_string(parameter),
        |row| {
            count.set(count.get() + 1);
            each(row)
        },
        || {
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                pgrx::notice!("copying \"{table}\" to the shards: {} rows so far", count.get());
            }
        },
    )
}

fn put(stream: &Rc<Stream>, values: &[Option<&[u8]>]) -> Result<()> {
    stream.row(|out, format| {
        let mut line = Row::begin(out, format, values.len());
        values.iter().for_each(|value| line.push(*value));
        line.end();
    })
}

struct Streams {
    user: pg_sys::Oid,
    command: CString,
    all: Vec<(String, Rc<Stream>)>,
    by_shard: HashMap<Vec<u8>, usize>,
}

impl Streams {
    fn new(user: pg_sys::Oid, table: &str, columns: &str) -> Self {
        let command = c_string(format!("COPY {table} ({columns}) FROM STDIN"));
        Self { user, command, all: Vec::new(), by_shard: HashMap::new() }
    }

    fn of(&mut self, shard: &[u8]) -> Result<&Rc<Stream>> {
        let at = match self.by_shard.get(shard) {
            Some(at) => *at,
            None => {
                let name = encoding::utf8(shard).into_owned();
                let connection = Connection::open(&name, self.user, true)?;
                let command = self.command.to_bytes().into();
                let destination = Destination { command, format: Format::Text, needs: Needs::Plain };
                self.all.push((name, Stream::new(&connection, destination, savepoint::depth())));
                self.by_shard.insert(shard.to_owned(), self.all.len() - 1);
                self.all.len() - 1
            }
        };
        Ok(&self.all[at].1)
    }

    /// Ends every COPY, all before the first is waited for.
    fn finish(self) -> Result<Vec<(String, i64)>> {
        self.all.iter().try_for_each(|(_, stream)| stream.end())?;
        self.all.iter().try_for_each(|(_, stream)| stream.finish())?;
        let mut counts: Vec<_> = self.all.into_iter().map(|(shard, stream)| (shard, stream.total() as i64)).collect();
        counts.sort_unstable();
        Ok(counts)
    }
}
