//! Cancel requests: one connection's, or those of all that run something when the backend is about to exit.

use std::cell::RefCell;
use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::mpsc;
use std::time::Duration;

use super::{pq, PGcancel, PGconn};

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

/// Sends a cancel request for every connection that runs a query, and waits up to `limit` for each.
pub fn cancel_running(limit: Duration) {
    let running: Vec<Cancelling> = OPEN.with_borrow(|open| {
        // SAFETY: connections leave the list before they are freed.
        let running = open.iter().filter(|conn| unsafe { (pq().PQtransactionStatus)(**conn) } == 1);
        running.map(|conn| start(*conn)).collect()
    });
    running.into_iter().for_each(|request| request.wait(limit));
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
