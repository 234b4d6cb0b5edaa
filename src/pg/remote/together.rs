//! One question to several shards at once, in the local transaction.
//!
//! What always holds: it is sent to all before the first answer is waited for, so that it takes as long as the slowest
//! shard; a shard's failure is the statement's, and ends the question on the others. Answers are small: they are kept
//! whole. Questions in sessions of their own are those of `scatter`.

use std::ffi::CStr;

use super::answer::Answer;
use super::failure::Result;
use super::pool::Connection;
use super::transaction;
use super::wait::Patience;
use super::wire::encode::Batch;

/// Runs one or more statements that write nothing on each of `connections`, which are of different shards. Returns the last
/// one's rows of each, as text.
///
/// # Errors
/// The first failing shard's own; 08006 if a connection is lost.
pub fn ask_together(connections: &[Connection], sql: &CStr) -> Result<Vec<Answer>> {
    let mut batch = Batch::default();
    batch.query(sql.to_bytes());
    connections.iter().try_for_each(Connection::enter_to_read)?;
    // Dropped early, they cancel what is still asked.
    let _asked = connections.iter().map(|one| one.link().begin(&batch)).collect::<Result<Vec<_>>>()?;
    connections.iter().map(answer).collect()
}

fn answer(connection: &Connection) -> Result<Answer> {
    let link = connection.link();
    let outcome = link.finish(&mut Patience::Interruptible);
    link.tell_notices();
    let after = transaction::check_after(link);
    let answer = outcome?;
    after?;
    Ok(answer)
}
