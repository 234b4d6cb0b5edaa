//! The rows of a local table, each to the shard that owns it, by COPY inside the transaction.
//!
//! Decides nothing about ownership: the query that reads the table asks `shardmap.owner_of` for each row. What always
//! holds: a shard that took another number of rows than it was sent is an error; memory is bounded, since a shard that
//! is slow makes the reader wait. A COPY is ended and begun anew from time to time, because a shard's error is seen only
//! at its end.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Result};
use super::link::{Busy, Link};
use super::pool::Connection;
use super::source::{c_string, for_each_row, quote, table_name};
use super::wait::Patience;
use super::wire::encode::Batch;
use crate::pg::encoding;

/// Sent at once.
const BUFFER: usize = 64 * 1024;
/// Sent in one COPY.
const COPY_BYTES: usize = 32 * 1024 * 1024;
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
    let list = columns.iter().map(|column| quote(column)).collect::<Vec<_>>().join(", ");
    let command = c_string(format!("COPY {}.{} ({list}) FROM STDIN", quote(schema), quote(table)));
    let query = c_string(format!(
        "SELECT shardmap.owner_of({}, $1), {list} FROM ONLY {}.{}",
        quote(key),
        quote(&from_schema),
        quote(&from_table)
    ));
    let mut streams = Streams { user, command, all: Vec::new(), by_shard: HashMap::new() };
    let (count, mut told) = (Cell::new(0_u64), Instant::now());
    for_each_row(
        &query,
        &c_string(keyspace),
        |row| {
            let (owner, values) = row.split_first().expect("the query's first column is the owner");
            let Some(owner) = owner else {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_NOT_NULL_VIOLATION,
                    format!("null value in key column \"{key}\" of \"{from_table}\""),
                )
                .hint("Every row needs a key, which decides its shard."));
            };
            count.set(count.get() + 1);
            streams.of(owner)?.row(values)
        },
        || {
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                pgrx::notice!("copying \"{from_table}\" to the shards: {} rows so far", count.get());
            }
        },
    )?;
    streams.finish()
}

struct Streams {
    user: pg_sys::Oid,
    command: CString,
    all: Vec<Stream>,
    by_shard: HashMap<Vec<u8>, usize>,
}

impl Streams {
    fn of(&mut self, shard: &[u8]) -> Result<&mut Stream> {
        let at = match self.by_shard.get(shard) {
            Some(at) => *at,
            None => {
                let name = encoding::utf8(shard).into_owned();
                let connection = Connection::open(&name, self.user, true)?;
                self.all.push(Stream::new(connection, self.command.clone()));
                self.by_shard.insert(shard.to_owned(), self.all.len() - 1);
                self.all.len() - 1
            }
        };
        Ok(&mut self.all[at])
    }

    /// Ends every COPY, all before the first is waited for.
    fn finish(mut self) -> Result<Vec<(String, i64)>> {
        for stream in &mut self.all {
            stream.send()?;
            stream.end()?;
        }
        for stream in &mut self.all {
            stream.outcome()?;
        }
        let mut counts: Vec<_> =
            self.all.iter().map(|stream| (stream.connection.shard().to_owned(), stream.total)).collect();
        counts.sort_unstable();
        Ok(counts)
    }
}

/// The rows on their way to one shard. Dropped in the middle of a COPY, it abandons the connection.
struct Stream {
    connection: Connection,
    command: CString,
    buffer: Vec<u8>,
    copying: bool,
    /// Of the COPY under way.
    sent_bytes: usize,
    sent_rows: i64,
    total: i64,
}

impl Stream {
    fn new(connection: Connection, command: CString) -> Self {
        let buffer = Vec::with_capacity(BUFFER + BUFFER / 4);
        Self { connection, command, buffer, copying: false, sent_bytes: 0, sent_rows: 0, total: 0 }
    }

    fn link(&self) -> &Link {
        self.connection.link()
    }

    fn row(&mut self, values: &[Option<&[u8]>]) -> Result<()> {
        encode(values, &mut self.buffer);
        self.sent_rows += 1;
        if self.buffer.len() < BUFFER {
            return Ok(());
        }
        self.send()?;
        if self.sent_bytes >= COPY_BYTES {
            self.end()?;
            self.outcome()?;
        }
        Ok(())
    }

    /// Sends what is in the buffer, which opens the COPY if none is.
    fn send(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        if !self.copying {
            self.start()?;
        }
        let mut batch = Batch::default();
        batch.copy_data(&self.buffer);
        self.put(&batch)?;
        self.sent_bytes += self.buffer.len();
        self.buffer.clear();
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        self.connection.enter()?;
        let link = self.link();
        let mut batch = Batch::default();
        batch.query(self.command.as_bytes());
        let busy = link.begin(&batch)?;
        let mut body = Vec::new();
        match link.receive(&mut body, &mut Patience::Interruptible)? {
            b'G' => busy.hand_over(),
            b'E' => {
                let failure = link.error(&body);
                link.finish(&mut Patience::Interruptible).ok();
                return Err(failure);
            }
            _ => return Err(link.lost("The shard did not start the COPY.")),
        }
        self.copying = true;
        Ok(())
    }

    /// Sends something of the COPY; a shard that is slow makes us wait.
    fn put(&self, batch: &Batch) -> Result<()> {
        let busy = Busy::resume(self.link());
        let outcome = self.link().send(batch).and_then(|()| self.link().drain_output(BUFFER));
        busy.hand_over();
        outcome
    }

    fn end(&mut self) -> Result<()> {
        if !self.copying {
            return Ok(());
        }
        let mut batch = Batch::default();
        batch.copy_done();
        self.put(&batch)
    }

    /// Reads the outcome of a COPY that was ended.
    fn outcome(&mut self) -> Result<()> {
        if !self.copying {
            return Ok(());
        }
        let outcome = self.link().finish(&mut Patience::Interruptible);
        self.copying = self.link().is_active();
        self.link().tell_notices();
        let tag = outcome?.tag;
        let (shard, sent) = (self.connection.shard(), self.sent_rows);
        if tag.strip_prefix("COPY ").and_then(|count| count.parse().ok()) != Some(sent) {
            return Err(Failure::new(
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("shard \"{shard}\" was sent {sent} rows and answered \"{tag}\""),
            )
            .hint("Look for a trigger on the shard's table that drops rows.")
            .at_shard(shard));
        }
        self.total += sent;
        (self.sent_rows, self.sent_bytes) = (0, 0);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.copying && self.link().is_active() {
            self.link().abandon();
        }
    }
}

/// One line of COPY's text format.
fn encode(values: &[Option<&[u8]>], line: &mut Vec<u8>) {
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            line.push(b'\t');
        }
        match value {
            None => line.extend_from_slice(b"\\N"),
            Some(value) => escape(value, line),
        }
    }
    line.push(b'\n');
}

fn escape(value: &[u8], line: &mut Vec<u8>) {
    let mut rest = value;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'\\' | b'\t' | b'\n' | b'\r')) {
        line.extend_from_slice(&rest[..at]);
        line.extend_from_slice(match rest[at] {
            b'\t' => b"\\t",
            b'\n' => b"\\n",
            b'\r' => b"\\r",
            _ => b"\\\\",
        });
        rest = &rest[at + 1..];
    }
    line.extend_from_slice(rest);
}
