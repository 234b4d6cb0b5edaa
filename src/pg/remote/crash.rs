//! Named points at which a test lets a commit break: `shardmap.crash_point`, which only superusers may set.
//!
//! `NAME` or `NAME:N` (the N-th time the step is taken in this commit) kills the session as `kill -9` would; `NAME=stop`
//! stops its process until it gets SIGCONT, so that a test can break what it likes meanwhile; `NAME=error` raises an error
//! instead, which only the points before the local commit take. The points, in their order:
//! `before_prepare`, `prepare_sent`, `after_prepare:N`, `before_decide`, `after_decide`; then, the transaction being
//! committed here, `after_local_commit`, `commit_sent`, `after_commit:N`; or, being aborted, `before_rollback`,
//! `after_rollback`. In one phase: `shard_committed:N`, after the N-th shard's commit. Several between commas are possible.

use pgrx::PgSqlErrorCode;

use super::failure::{Failure, Result};
use crate::pg::settings::CRASH_POINT;

/// The step `name`, taken for the `time`-th time, where an error may still be raised.
pub fn before_commit(name: &str, time: usize) -> Result<()> {
    let Some(wanted) = wanted() else { return Ok(()) };
    strike(&wanted, name, time);
    if wanted.split(',').any(|wanted| meets(wanted.strip_suffix("=error"), name, time)) {
        let message = format!("commit broken off at the crash point \"{name}\"");
        return Err(Failure::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, message)
            .hint("RESET shardmap.crash_point: it is for tests."));
    }
    Ok(())
}

/// The step `name`, taken for the `time`-th time, where no error may be raised any more.
pub fn at(name: &str, time: usize) {
    if let Some(wanted) = wanted() {
        strike(&wanted, name, time);
    }
}

fn wanted() -> Option<String> {
    CRASH_POINT.get().map(|point| point.to_string_lossy().into_owned()).filter(|point| !point.is_empty())
}

fn meets(wanted: Option<&str>, name: &str, time: usize) -> bool {
    let Some(wanted) = wanted else { return false };
    match wanted.split_once(':') {
        Some((wanted, number)) => wanted == name && number.parse() == Ok(time),
        None => wanted == name && time == 1,
    }
}

fn strike(wanted: &str, name: &str, time: usize) {
    for wanted in wanted.split(',') {
        if meets(Some(wanted), name, time) {
            send_to_itself(libc::SIGKILL);
        } else if meets(wanted.strip_suffix("=stop"), name, time) {
            send_to_itself(libc::SIGSTOP);
        }
    }
}

fn send_to_itself(signal: libc::c_int) {
    // SAFETY: ends or stops this process, and no other.
    unsafe { libc::kill(libc::getpid(), signal) };
}
