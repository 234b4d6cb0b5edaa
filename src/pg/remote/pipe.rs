//! Rows from a query on one shard into a table of another, by COPY on both sides.
//!
//! What always holds: rows go through as they come, so that memory does not depend on how many there are; the shard that
//! reads is slowed down to the one that writes; both COPYs belong to the local transaction, or commit by themselves. The
//! last row's first values are returned: by them a batch knows where the next begins. Read next: `stream`.

use std::ffi::CString;

use super::carried::Needs;
use super::failure::Result;
use super::link::Link;
use super::pool::Connection;
use super::stream::{Destination, Stream};
use super::transaction;
use super::wait::Patience;
use super::wire::copy::{self, Format};
use super::wire::encode::Batch;
use crate::pg::savepoint;

/// What went through.
#[derive(Default)]
pub struct Piped {
    pub rows: u64,
    pub bytes: u64,
    /// The first values of the last row.
    pub last: Vec<Option<Vec<u8>>>,
}

/// Runs `COPY (query) TO STDOUT` on `source`, and sends what it yields to `command`, a COPY FROM STDIN, on the other
/// shard; other statements may stand before it. Returns the last row's first `keys` values.
///
/// # Errors
/// Either shard's own; 08006 if a connection is lost; XX001 if the target takes another number of rows.
pub fn pipe(
    source: &Connection,
    query: &CString,
    target: &Connection,
    command: &CString,
    keys: usize,
) -> Result<Piped> {
    let destination = Destination { command: command.to_bytes().into(), format: Format::Text, needs: Needs::Plain };
    let stream = Stream::new(target, destination, savepoint::depth());
    source.enter_to_read()?;
    let link: &Link = source.link();
    let mut batch = Batch::default();
    batch.query(&[b"COPY (".as_slice(), query.to_bytes(), b") TO STDOUT"].concat());
    let busy = link.begin(&batch)?;
    let (mut piped, mut last, mut body, mut failure) = (Piped::default(), Vec::new(), Vec::new(), None);
    while link.is_active() {
        match link.receive_or(&mut body, &mut Patience::Interruptible, &failure)? {
            b'd' => {
                piped.rows += 1;
                piped.bytes += body.len() as u64;
                stream.row(|out, _| out.extend_from_slice(&body))?;
                std::mem::swap(&mut last, &mut body);
            }
            b'E' => failure = failure.or_else(|| Some(link.error(&body))),
            _ => {}
        }
    }
    drop(busy);
    link.tell_notices();
    if let Some(failure) = failure {
        return Err(transaction::after_failure(link, failure));
    }
    stream.finish()?;
    if piped.rows > 0 {
        piped.last = copy::values(&last).take(keys).collect();
    }
    Ok(piped)
}
