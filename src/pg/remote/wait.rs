//! Waiting for shards without becoming deaf: every wait watches the latch, the postmaster and the sockets at once.
//!
//! Decides how long. What always holds: cancel, `statement_timeout`, terminate and shutdown are acted on while waiting
//! ([`Patience::Interruptible`]), or end the wait soon ([`Patience::Commit`]); no wait is longer than its limit.
//! [`poll_socket`] is for the clean-up after an error, where Postgres must not be called.

use std::ffi::{c_int, c_long};
use std::ptr;
use std::time::{Duration, Instant};

use pgrx::{pg_sys, PgSqlErrorCode};

use super::failure::{raise, Failure};

/// What a socket is watched for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interest {
    Read,
    ReadOrWrite,
    Write,
}

impl Interest {
    fn events(self) -> u32 {
        match self {
            Self::Read => pg_sys::WL_SOCKET_READABLE,
            Self::Write => pg_sys::WL_SOCKET_WRITEABLE,
            Self::ReadOrWrite => pg_sys::WL_SOCKET_READABLE | pg_sys::WL_SOCKET_WRITEABLE,
        }
    }
}

/// How a wait ended. After `Latch` the caller looks for interrupts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Woken {
    Socket,
    Latch,
    Timeout,
}

/// What pg_stat_activity shows: type `Extension`, from 17 on with a name of its own.
pub fn wait_event() -> u32 {
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    {
        thread_local! {
            // SAFETY: the name is NUL-terminated; called in a backend, which has shared memory.
            static EVENT: u32 = unsafe { pg_sys::WaitEventExtensionNew(c"ShardmapRemote".as_ptr()) };
        }
        EVENT.with(|event| *event)
    }
    #[cfg(not(any(feature = "pg17", feature = "pg18")))]
    {
        pg_sys::PG_WAIT_EXTENSION
    }
}

fn milliseconds(limit: Option<Duration>) -> c_long {
    limit.map_or(-1, |limit| c_long::try_from(limit.as_millis() + 1).unwrap_or(c_long::MAX).min(600_000))
}

/// A set of events kept for the life of a connection, because making one costs six system calls.
pub struct WaitSet {
    raw: *mut pg_sys::WaitEventSet,
    sockets: c_int,
}

impl WaitSet {
    /// Watches the latch, the postmaster and these sockets, which must stay open until the set is dropped.
    pub fn new(sockets: &[(c_int, Interest)]) -> Self {
        let size = sockets.len() as c_int + 2;
        // SAFETY: the set lives in a context of the session's life time, or in that of no resource owner, until drop.
        unsafe {
            #[cfg(any(feature = "pg17", feature = "pg18"))]
            let raw = pg_sys::CreateWaitEventSet(ptr::null_mut(), size);
            #[cfg(not(any(feature = "pg17", feature = "pg18")))]
            let raw = pg_sys::CreateWaitEventSet(pg_sys::TopMemoryContext, size);
            let set = Self { raw, sockets: 2 };
            pg_sys::AddWaitEventToSet(raw, pg_sys::WL_LATCH_SET, -1, pg_sys::MyLatch, ptr::null_mut());
            pg_sys::AddWaitEventToSet(raw, pg_sys::WL_EXIT_ON_PM_DEATH, -1, ptr::null_mut(), ptr::null_mut());
            for (socket, interest) in sockets {
                pg_sys::AddWaitEventToSet(raw, interest.events(), *socket, ptr::null_mut(), ptr::null_mut());
            }
            set
        }
    }

    /// Changes what the first socket is watched for.
    pub fn watch(&self, interest: Interest) {
        // SAFETY: the position of the first socket in a live set; Postgres skips the system call if nothing changes.
        unsafe { pg_sys::ModifyWaitEvent(self.raw, self.sockets, interest.events(), ptr::null_mut()) }
    }

    /// Waits for one event. `None`: as long as it takes. A latch that was set is reset.
    pub fn wait(&self, limit: Option<Duration>) -> Woken {
        // SAFETY: an all-zero event is valid; the set is live; MyLatch is this backend's own.
        unsafe {
            let mut event = std::mem::zeroed::<pg_sys::WaitEvent>();
            if pg_sys::WaitEventSetWait(self.raw, milliseconds(limit), &mut event, 1, wait_event()) == 0 {
                return Woken::Timeout;
            }
            if event.events & pg_sys::WL_LATCH_SET == 0 {
                return Woken::Socket;
            }
            pg_sys::ResetLatch(pg_sys::MyLatch);
            Woken::Latch
        }
    }
}

impl Drop for WaitSet {
    fn drop(&mut self) {
        // SAFETY: freed once. It raises no error.
        unsafe { pg_sys::FreeWaitEventSet(self.raw) }
    }
}

/// Waits for any of several sockets, acting on interrupts.
pub fn wait_any(sockets: &[(c_int, Interest)], limit: Option<Duration>) {
    pgrx::check_for_interrupts!();
    if WaitSet::new(sockets).wait(limit) == Woken::Latch {
        pgrx::check_for_interrupts!();
    }
}

/// Waits for a while, acting on interrupts.
pub fn pause(limit: Duration) {
    wait_any(&[], Some(limit));
}

/// Whether the client or the administrator wants this statement to end.
pub fn interrupted() -> bool {
    // SAFETY: flags that signal handlers set.
    unsafe { pg_sys::QueryCancelPending != 0 || pg_sys::ProcDiePending != 0 }
}

/// Drops a cancel of the statement that has not been acted on.
pub fn forget_cancel() {
    // SAFETY: a flag that signal handlers set and the main thread clears.
    unsafe { pg_sys::QueryCancelPending = 0 }
}

/// A cancel is passed on to a committing shard again after this long: it may have come before the COMMIT.
const AGAIN: Duration = Duration::from_millis(300);

/// How a wait takes a cancel.
pub enum Patience {
    /// At once, by an error.
    Interruptible,
    /// A commit is under way, and its outcome is worth waiting for: the wait goes on for this long after the cancel.
    /// `stop`: why to give up, if not for a cancel.
    Commit { grace: Duration, since: Option<Instant>, told: Option<Instant>, stop: Option<Failure> },
    /// At once, and the wait ends then at the latest.
    Until(Instant),
}

impl Patience {
    pub fn commit(grace: Duration) -> Self {
        Self::Commit { grace, since: None, told: None, stop: None }
    }

    /// The wait is to end for a reason of our own, as it would for a cancel.
    pub fn give_up(&mut self, failure: Failure) {
        match self {
            Self::Commit { stop, .. } => *stop = Some(failure),
            _ => raise(failure),
        }
    }

    /// The failure of what was waited for: if it is that of our cancel, the reason for that.
    pub fn explain(&self, failure: Failure) -> Failure {
        match self {
            Self::Commit { stop: Some(stop), .. } if failure.code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED.into() => {
                stop.clone()
            }
            _ => failure,
        }
    }

    /// Acts on what may have happened while waiting. `Ok(true)`: pass the cancel on to the shard. `Err`: no more patience.
    pub fn check(&mut self) -> Result<bool, ()> {
        match self {
            Self::Interruptible => {
                pgrx::check_for_interrupts!();
                Ok(false)
            }
            Self::Until(deadline) => {
                pgrx::check_for_interrupts!();
                (Instant::now() < *deadline).then_some(false).ok_or(())
            }
            Self::Commit { grace, since: Some(since), .. } if since.elapsed() >= *grace => Err(()),
            Self::Commit { since, told, stop, .. }
                if (interrupted() || stop.is_some()) && told.is_none_or(|told| told.elapsed() >= AGAIN) =>
            {
                *told = Some(Instant::now());
                since.get_or_insert_with(Instant::now);
                Ok(true)
            }
            Self::Commit { .. } => Ok(false),
        }
    }

    /// Whether the wait ends soon anyway: nothing that takes time is to be begun.
    pub fn is_ending(&self) -> bool {
        matches!(self, Self::Until(_) | Self::Commit { since: Some(_), .. })
    }

    /// How long to wait before the next check.
    pub fn limit(&self) -> Option<Duration> {
        match self {
            Self::Commit { grace, since: Some(since), .. } => Some(grace.saturating_sub(since.elapsed()).min(AGAIN)),
            Self::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            _ => None,
        }
    }
}

/// Waits for a socket by itself, deaf to interrupts, at most until `deadline`. `false`: nothing came.
pub fn poll_socket(socket: c_int, interest: Interest, deadline: Instant) -> bool {
    let events = match interest {
        Interest::Read => libc::POLLIN,
        Interest::Write => libc::POLLOUT,
        Interest::ReadOrWrite => libc::POLLIN | libc::POLLOUT,
    };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut watched = libc::pollfd { fd: socket, events, revents: 0 };
        // SAFETY: one valid pollfd.
        let ready = unsafe { libc::poll(&mut watched, 1, left.as_millis().min(60_000) as c_int) };
        if ready > 0 {
            return true;
        }
        if ready == 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return false;
        }
    }
}
