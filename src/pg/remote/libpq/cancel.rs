//! Cancel requests: one connection's, or those of all that run something when the backend is about to exit.

use std::cell::RefCell;
use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{pq, PGcancel, PGconn};
use crate::pg::remote::wait::{poll_socket, Interest};

thread_local! {
    /// Every open connection of this backend, for [`cancel_running`].
    static OPEN: RefCell<Vec<*mut PGconn>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn opened(conn: *mut PGconn) {
    OPEN.with_borrow_mut(|open| open.push(conn));
}

pub(super) fn closing(conn: *mut PGconn) {
    OPEN.with_borrow_mut(|open| open.retain(|other| *other != conn));
}

/// The longest that [`stop`] takes.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// The first pause between two requests; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Stops whatever runs on any connection, because the backend is about to exit.
pub fn cancel_running() {
    // SAFETY: connections leave the list before they are freed.
    let active = |conn: &*mut PGconn| unsafe { (pq().PQtransactionStatus)(*conn) } == 1;
    stop(OPEN.with_borrow(|open| open.iter().copied().filter(active).collect()));
}

/// Cancels what runs on these connections until each has an outcome to be read, or [`STOP_LIMIT`] is over.
///
/// One request is not enough: a shard that has not yet begun with a statement takes no notice of it, and would run the
/// statement to its end even after its connection is closed. Calls no function of Postgres.
pub(super) fn stop(mut conns: Vec<*mut PGconn>) {
    let deadline = Instant::now() + STOP_LIMIT;
    let mut pause = FIRST_PAUSE;
    while !conns.is_empty() && Instant::now() < deadline {
        let requests: Vec<_> = conns.iter().map(|conn| start(*conn)).collect();
        requests.into_iter().for_each(|request| request.wait(deadline.saturating_duration_since(Instant::now())));
        let until = (Instant::now() + pause).min(deadline);
        conns.retain(|conn| is_busy_until(*conn, until));
        pause *= 2;
    }
}

/// Reads until there is an outcome. `true`: there was none in time.
fn is_busy_until(conn: *mut PGconn, until: Instant) -> bool {
    // SAFETY: live connections, or null, for which libpq answers that they are not busy.
    unsafe {
        while (pq().PQisBusy)(conn) == 1 {
            if !poll_socket((pq().PQsocket)(conn), Interest::Read, until) {
                return true;
            }
            if (pq().PQconsumeInput)(conn) == 0 {
                return false;
            }
        }
    }
    false
}

/// A cancel request on its way. It has a thread of its own because `PQcancel` connects, and to a host that is gone
/// that takes minutes; the thread blocks all signals, and calls nothing but `PQcancel`, which is made for any context.
pub struct Cancelling(Option<mpsc::Receiver<()>>);

impl Cancelling {
    /// Returns when the shard has taken the request, or after `limit`.
    pub fn wait(self, limit: Duration) {
        if let Some(done) = self.0 {
            let _ = done.recv_timeout(limit);
        }
    }
}

/// The right to use and free a PGcancel in another thread.
struct CancelHandle(*mut PGcancel);
// SAFETY: a PGcancel is a plain copy of address and key, independent of its connection, and has one user at a time.
unsafe impl Send for CancelHandle {}

impl CancelHandle {
    fn run(self) {
        let mut message = [0 as c_char; 256];
        // SAFETY: not null, freed once, here.
        unsafe {
            (pq().PQcancel)(self.0, message.as_mut_ptr(), message.len() as c_int);
            (pq().PQfreeCancel)(self.0);
        }
    }
}

pub(super) fn start(conn: *mut PGconn) -> Cancelling {
    // SAFETY: a live or null connection; null if there is nothing to cancel.
    let handle = unsafe { (pq().PQgetCancel)(conn) };
    if handle.is_null() {
        return Cancelling(None);
    }
    let handle = CancelHandle(handle);
    let (sender, receiver) = mpsc::channel();
    // SAFETY: plain signal sets on the stack. The thread inherits the full mask, so that Postgres' handlers run in the
    // main thread only.
    let mask = unsafe {
        let (mut all, mut before) = std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let thread = std::thread::Builder::new().stack_size(256 * 1024).spawn(move || {
        handle.run();
        let _ = sender.send(());
    });
    // SAFETY: restores the mask taken above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &mask, ptr::null_mut()) };
    Cancelling(thread.is_ok().then_some(receiver))
}
