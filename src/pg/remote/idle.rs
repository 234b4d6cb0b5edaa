//! Connections that a session does not need are closed while its client is idle.
//!
//! Decides when to look: a session that rests between two transactions has a timer of Postgres', for the end of
//! `shardmap.idle_timeout`, and to look for sessions that wait for a connection: every [`PATROL`] where they are limited, and
//! else, for shards that are full by themselves, every [`SLOW_PATROL`]. A backend
//! that waits for its client runs nothing of ours but the timer's handler, in the middle of a signal; so that takes leave
//! of the shard by two system calls ([`super::libpq::Conn::hang_up`]), and the rest is done at the next use. What always
//! holds: the handler touches nothing unless no transaction of this session has used a shard since it ended the last.

use std::cell::Cell;
use std::ffi::c_int;
use std::time::Duration;

use super::{pool, slots};
use crate::pg::settings::{IDLE_TIMEOUT, MAX_CONNECTIONS_PER_SHARD};

/// How often an idle session looks whether others wait for its connections.
const PATROL: Duration = Duration::from_millis(500);
const SLOW_PATROL: Duration = Duration::from_secs(5);
/// Source: utils/timeout.h: a reason from USER_TIMEOUT on asks for a free one. It is 12 until Postgres 16, then 13.
const ANY_FREE: c_int = 13;

unsafe extern "C-unwind" {
    // Source: utils/timeout.h.
    fn RegisterTimeout(id: c_int, handler: unsafe extern "C-unwind" fn()) -> c_int;
    fn enable_timeout_after(id: c_int, delay_ms: c_int);
    fn get_timeout_active(id: c_int) -> bool;
}

thread_local! {
    static TIMER: Cell<Option<c_int>> = const { Cell::new(None) };
    /// The settings by which it was set.
    static SET_FOR: Cell<(i32, i32)> = const { Cell::new((0, 0)) };
}

/// The session has come to rest: sees to it that it is looked at in time.
pub fn arm() {
    let settings = (IDLE_TIMEOUT.get(), MAX_CONNECTIONS_PER_SHARD.get());
    // SAFETY: registered before; an error that stopped all timers is noticed.
    let is_set = TIMER.get().is_some_and(|timer| unsafe { get_timeout_active(timer) });
    if is_set && SET_FOR.get() == settings {
        return;
    }
    SET_FOR.set(settings);
    let Some(delay) = delay() else { return };
    // SAFETY: registered once, in a process that has its timers set up; setting it anew replaces the earlier time.
    unsafe {
        let timer = TIMER.get().unwrap_or_else(|| RegisterTimeout(ANY_FREE, on_timer));
        TIMER.set(Some(timer));
        enable_timeout_after(timer, delay);
    }
}

/// As [`arm`], if a timer was set in this session.
pub fn arm_again() {
    if TIMER.get().is_some() {
        arm();
    }
}

/// How long an idle connection is kept; `None`: for ever.
fn timeout() -> Option<Duration> {
    match IDLE_TIMEOUT.get() {
        ..=0 => None,
        milliseconds => Some(Duration::from_millis(milliseconds.unsigned_abs().into())),
    }
}

/// The time until something may have to be done, in milliseconds.
fn delay() -> Option<c_int> {
    let patrol = slots::are_counted().then_some(match MAX_CONNECTIONS_PER_SHARD.get() {
        0 => SLOW_PATROL,
        _ => PATROL,
    });
    let oldest = pool::longest_idle()?;
    let expiry = timeout().map(|timeout| timeout.saturating_sub(oldest));
    let delay = patrol.into_iter().chain(expiry).min()?;
    Some(c_int::try_from(delay.as_millis()).unwrap_or(c_int::MAX).max(10))
}

/// # Safety
/// Called by Postgres in the handler of SIGALRM.
unsafe extern "C-unwind" fn on_timer() {
    if pool::is_resting() {
        pool::hang_up(timeout());
        arm();
    }
}
