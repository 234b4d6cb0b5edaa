//! How a transaction that has used shards commits: the choice of a protocol, and the one-phase one.
//!
//! Decides by what was written where. What always holds: one shard that wrote, and nothing written here, commits in one
//! phase, as atomic as the shard is; shards that only read do not count. Where that is in doubt they are asked whether they
//! wrote. Anything else takes two phases, or is refused, as `shardmap.multi_shard_commit` says. Shards that only read are
//! told to commit last, for they may hold row locks, and not waited for. Under `one_phase` several shards are committed
//! one after the other: if one fails after another has committed, the error says which.
//!
//! Read next: `two_phase`.

use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;
use shardmap_core::two_phase::{protocol, Protocol};

use super::crash;
use super::failure::{Failure, Result};
use super::link::Link;
use super::transaction::{administers, leave};
use super::two_phase;
use super::wait::Patience;
use crate::pg::settings::MULTI_SHARD_COMMIT;

/// How long a COMMIT goes on after a cancel before its outcome is given up as unknown.
const COMMIT_GRACE: Duration = Duration::from_secs(10);
/// How long to wait for a connection to take a COMMIT that matters to nobody.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Says whether the shard's transaction has a number, without which it wrote nothing; and how many can be prepared there.
const WROTE: &[u8] = b"SELECT pg_catalog.pg_current_xact_id_if_assigned(), \
    pg_catalog.current_setting('max_prepared_transactions')";

/// Before the local commit. `false`: the shards still wait for it.
pub fn run(links: &[Rc<Link>]) -> Result<bool> {
    let choice = || {
        let writers = links.iter().filter(|link| writes(link)).count();
        protocol(writers, writes_here(), MULTI_SHARD_COMMIT.get().into())
    };
    let mut chosen = choice();
    if chosen != Protocol::OnePhase {
        ask_who_wrote(links)?;
        chosen = choice();
        if chosen == Protocol::TwoPhase && does_without(links) {
            chosen = Protocol::OnePhase;
        }
    }
    match chosen {
        Protocol::OnePhase => one_phase(links).map(|()| true),
        Protocol::TwoPhase => two_phase::prepare(links).map(|()| false),
        Protocol::Refused => Err(refused(links)),
    }
}

/// Whether to commit in one phase because a shard allows no prepared transactions, as a shard with Postgres' defaults does:
/// one shard and then the coordinator, which has got a number perhaps for no more than a sequence; and what an
/// administrator's function does, which must work on any shard. Several shards' rows do not: that is refused.
fn does_without(links: &[Rc<Link>]) -> bool {
    let writers: Vec<_> = links.iter().filter(|link| writes(link)).collect();
    let unable = writers.iter().any(|link| !link.remote.prepares.get());
    unable && (writers.len() == 1 || administers())
}

/// Lets shards off that were sent statements which might write, and did not: an UPDATE that found nothing there, a
/// function that only reads. All are asked before the first is waited for.
fn ask_who_wrote(links: &[Rc<Link>]) -> Result<()> {
    let asked: Vec<_> = links.iter().filter(|link| writes(link)).collect();
    asked.iter().try_for_each(|link| link.send_alone(WROTE))?;
    for link in asked {
        let answer = link.finish(&mut Patience::Interruptible)?;
        let number = answer.rows.first().and_then(|row| row.first()).and_then(Option::as_ref);
        link.remote.wrote.set(number.is_some());
        let most = answer.rows.first().and_then(|row| row.get(1)).and_then(Option::as_deref);
        link.remote.prepares.set(most != Some(b"0"));
    }
    Ok(())
}

/// Whether something may have been written on the shard.
pub fn writes(link: &Link) -> bool {
    link.remote.wrote.get()
}

/// Whether the local transaction may have written: it has got its number.
fn writes_here() -> bool {
    // SAFETY: reads the transaction's state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// Whether even a transaction that only reads may fail to commit.
pub fn is_serializable() -> bool {
    // SAFETY: reads a variable of the transaction.
    unsafe { pg_sys::XactIsoLevel as u32 == pg_sys::XACT_SERIALIZABLE }
}

/// Names for a message.
pub fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

fn refused(links: &[Rc<Link>]) -> Failure {
    let writers = links.iter().filter(|link| writes(link)).map(|link| link.target.server.as_str());
    let here = if writes_here() { ", and on the coordinator" } else { "" };
    Failure::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot commit a transaction that wrote in more than one place",
    )
    .detail(format!("It wrote on {}{here}, and shardmap.multi_shard_commit is refuse.", quoted(writers)))
    .hint("Write on one shard a transaction, or SET shardmap.multi_shard_commit = 'two_phase'.")
}

/// Commits on every shard that counts, one after the other, and ends the others.
fn one_phase(links: &[Rc<Link>]) -> Result<()> {
    let (count, others): (Vec<_>, Vec<_>) = links.iter().partition(|link| writes(link) || is_serializable());
    let mut committed: Vec<&str> = Vec::new();
    for (at, link) in count.iter().enumerate() {
        if let Err(failure) = commit_one(link) {
            let open = count[at + 1..].iter().map(|link| link.target.server.as_str()).collect::<Vec<_>>();
            return Err(if committed.is_empty() { failure } else { partly(failure, &committed, link, &open) });
        }
        leave(link);
        committed.push(&link.target.server);
        crash::at("shard_committed", at + 1);
    }
    others.into_iter().for_each(|link| end(link));
    Ok(())
}

/// Ends a transaction that only read. Nobody waits for it, and it cannot fail.
pub fn end(link: &Link) {
    leave(link);
    link.send_quietly(b"COMMIT", Instant::now() + END_LIMIT);
}

fn commit_one(link: &Link) -> Result<()> {
    let server = &link.target.server;
    let mut patience = Patience::commit(COMMIT_GRACE);
    match link.run(b"COMMIT", &mut patience).map_err(|failure| patience.explain(failure)) {
        Ok(answer) if answer.tag == "COMMIT" => Ok(()),
        // The shard's transaction had failed: COMMIT is taken as ROLLBACK.
        Ok(_) => Err(Failure::new(
            PgSqlErrorCode::ERRCODE_IN_FAILED_SQL_TRANSACTION,
            format!("shard \"{server}\" has rolled the transaction back after an error in it"),
        )
        .hint("Repeat the transaction.")
        .at_shard(server)),
        Err(failure) if link.is_open() => Err(failure),
        Err(failure) => {
            let message =
                format!("connection to shard \"{server}\" was lost during COMMIT, whose outcome there is unknown");
            Err(Failure::new(PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN, message)
                .detail(failure.detail.unwrap_or_default())
                .hint(
                    "The transaction may be committed on the shard; it is rolled back here. Look before repeating it.",
                )
                .at_shard(server))
        }
    }
}

/// The failure of one shard after others have committed.
fn partly(failure: Failure, committed: &[&str], failed: &Link, open: &[&str]) -> Failure {
    let failed = &failed.target.server;
    let mut detail =
        format!("Committed: {}. Failed: \"{failed}\": {}", quoted(committed.iter().copied()), failure.to_text());
    if !open.is_empty() {
        detail.push_str(&format!("\nRolled back: {}.", quoted(open.iter().copied())));
    }
    Failure::new(
        PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN,
        format!("transaction was committed on some shards, and failed on shard \"{failed}\""),
    )
    .detail(detail)
    .hint("Undo or repeat by hand what differs between these shards. It is rolled back on the coordinator.")
    .at_shard(failed)
}
