//! A connection of libpq.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void, CStr, CString};
use std::ptr;

use pgrx::{pg_sys, PgSqlErrorCode};

use super::{cancel, owned, pq, Answer, Cancelling, PGconn, PGresult};
use crate::pg::error::Refusal;
use crate::pg::remote::slots::Slot;

/// What `PQconnectPoll` wants next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Poll {
    Failed,
    Read,
    Write,
    Ready,
}

/// Source: libpq-fe.h, `PGTransactionStatusType`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TransactionStatus {
    Idle,
    Active,
    InTransaction,
    InError,
    Unknown,
}

/// A notice of the shard: its level ("WARNING", "NOTICE", ...) and message.
pub struct Notice {
    pub severity: String,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

impl Notice {
    /// By the fields' letters in the protocol.
    pub fn of(field: impl Fn(u8) -> Option<String>) -> Self {
        Self {
            severity: field(b'V').unwrap_or_default(),
            message: field(b'M').unwrap_or_default(),
            detail: field(b'D'),
            hint: field(b'H'),
        }
    }
}

/// At most this many notices are kept between two looks at them.
const MAX_NOTICES: usize = 1000;

/// A connection. Closed by [`Conn::close`] or when dropped.
pub struct Conn {
    raw: Cell<*mut PGconn>,
    notices: Box<RefCell<Vec<Notice>>>,
    /// Its place among the connections to the shard.
    slot: RefCell<Option<Slot>>,
}

/// Source: libpq-fe.h, `PGVerbosity`.
const VERBOSITY_DEFAULT: c_int = 1;
const VERBOSITY_VERBOSE: c_int = 2;

impl Conn {
    /// Begins to connect. Call [`super::load`] first. Errors until the connection is made name their SQLSTATE.
    ///
    /// # Errors
    /// 53000: this process has no file descriptor left. 53200: out of memory.
    pub fn start(params: &[(CString, CString)], slot: Option<Slot>) -> Result<Self, Refusal> {
        let mut names: Vec<_> = params.iter().map(|(name, _)| name.as_ptr()).collect();
        let mut values: Vec<_> = params.iter().map(|(_, value)| value.as_ptr()).collect();
        names.push(ptr::null());
        values.push(ptr::null());
        let notices = Box::new(RefCell::new(Vec::new()));
        // SAFETY: only counts. Given back in `close`.
        if !unsafe { pg_sys::AcquireExternalFD() } {
            return Err(Refusal::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
                "too many connections to shards in one session",
            )
            .hint("Raise max_files_per_process, and the operating system's limit on open files."));
        }
        // SAFETY: both arrays end with null; libpq copies the strings. The receiver's argument lives in a Box that
        // outlives the connection.
        let raw = unsafe {
            let raw = (pq().PQconnectStartParams)(names.as_ptr(), values.as_ptr(), 0);
            if raw.is_null() {
                pg_sys::ReleaseExternalFD();
                return Err(Refusal::new(PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY, "out of memory"));
            }
            (pq().PQsetErrorVerbosity)(raw, VERBOSITY_VERBOSE);
            (pq().PQsetNoticeReceiver)(raw, keep_notice, ptr::from_ref(&*notices).cast_mut().cast());
            raw
        };
        cancel::opened(raw);
        Ok(Self { raw: Cell::new(raw), notices, slot: RefCell::new(slot) })
    }

    pub fn poll_connect(&self) -> Poll {
        // SAFETY: a live or null connection, as in every method below.
        match unsafe { (pq().PQconnectPoll)(self.raw.get()) } {
            1 => Poll::Read,
            2 => Poll::Write,
            3 => {
                // SAFETY: as above.
                unsafe {
                    (pq().PQsetErrorVerbosity)(self.raw.get(), VERBOSITY_DEFAULT);
                    (pq().PQsetnonblocking)(self.raw.get(), 1);
                }
                Poll::Ready
            }
            _ => Poll::Failed,
        }
    }

    /// Ends the connection. The calls after it find a broken connection.
    pub fn close(&self) {
        let raw = self.raw.replace(ptr::null_mut());
        if !raw.is_null() {
            cancel::closing(raw);
            // SAFETY: taken out of the cell, so freed once. The count was taken in `start`; it raises no error.
            unsafe {
                (pq().PQfinish)(raw);
                pg_sys::ReleaseExternalFD();
            }
            drop(self.slot.take());
        }
    }

    /// Somebody waits for a connection to the shard.
    pub fn is_wanted(&self) -> bool {
        self.slot.borrow().as_ref().is_some_and(Slot::is_wanted)
    }

    /// Takes leave of the shard for good, by the means that the handler of a signal has: the connection is found ended when
    /// it is next looked at, and closed then. Only while nothing is under way on it.
    pub fn hang_up(&self) {
        /// Source: the protocol: Terminate.
        const FAREWELL: [u8; 5] = [b'X', 0, 0, 0, 4];
        let socket = self.socket();
        if socket < 0 {
            return;
        }
        // SAFETY: an open socket of ours, and a valid buffer; neither call waits.
        unsafe {
            if !self.is_encrypted() {
                libc::send(socket, FAREWELL.as_ptr().cast(), FAREWELL.len(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
            }
            libc::shutdown(socket, libc::SHUT_RDWR);
        }
        if let Some(slot) = self.slot.borrow().as_ref() {
            slot.give_back();
        }
    }

    pub fn is_ok(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQstatus)(self.raw.get()) == 0 }
    }

    /// Known to have failed, also while it is being made.
    pub fn is_broken(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQstatus)(self.raw.get()) == 1 }
    }

    /// The socket, or -1. While connecting it may change between two calls of [`Conn::poll_connect`].
    pub fn socket(&self) -> c_int {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQsocket)(self.raw.get()) }
    }

    /// The shard's process, or what a pooler says it is; 0 if the connection is closed.
    pub fn backend_pid(&self) -> c_int {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQbackendPID)(self.raw.get()) }
    }

    /// Whether the server was in recovery when it was connected to; `false` if it does not say so, as behind a pooler.
    pub fn is_in_recovery(&self) -> bool {
        // SAFETY: see poll_connect; the name is NUL-terminated, the value is read before the next call.
        let value = unsafe { (pq().PQparameterStatus)(self.raw.get(), c"in_hot_standby".as_ptr()) };
        // SAFETY: null or NUL-terminated.
        !value.is_null() && unsafe { CStr::from_ptr(value) } == c"on"
    }

    pub fn error_message(&self) -> String {
        // SAFETY: see poll_connect; the text is copied before the next call.
        unsafe { owned((pq().PQerrorMessage)(self.raw.get())) }.unwrap_or_default().trim_end().to_owned()
    }

    pub fn used_password(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQconnectionUsedPassword)(self.raw.get()) != 0 }
    }

    pub fn transaction_status(&self) -> TransactionStatus {
        // SAFETY: see poll_connect.
        match unsafe { (pq().PQtransactionStatus)(self.raw.get()) } {
            0 => TransactionStatus::Idle,
            1 => TransactionStatus::Active,
            2 => TransactionStatus::InTransaction,
            3 => TransactionStatus::InError,
            _ => TransactionStatus::Unknown,
        }
    }

    /// Whether what goes over the connection is encrypted, by TLS or GSSAPI.
    pub fn is_encrypted(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQsslInUse)(self.raw.get()) != 0 || (pq().PQgssEncInUse)(self.raw.get()) != 0 }
    }

    /// The connection's SSL of OpenSSL; null if there is none.
    pub fn openssl_session(&self) -> *mut c_void {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQsslStruct)(self.raw.get(), c"OpenSSL".as_ptr()) }
    }

    pub fn send_query(&self, sql: &CStr) -> bool {
        // SAFETY: see poll_connect; libpq copies the text.
        unsafe { (pq().PQsendQuery)(self.raw.get(), sql.as_ptr()) == 1 }
    }

    /// Makes the query just sent give its rows one by one.
    pub fn single_row_mode(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQsetSingleRowMode)(self.raw.get()) == 1 }
    }

    /// `Some(true)`: all is sent. `Some(false)`: wait until the socket can be written. `None`: the connection is lost.
    pub fn flush(&self) -> Option<bool> {
        // SAFETY: see poll_connect.
        match unsafe { (pq().PQflush)(self.raw.get()) } {
            0 => Some(true),
            1 => Some(false),
            _ => None,
        }
    }

    /// Reads what has arrived. `false`: the connection is lost.
    pub fn consume(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQconsumeInput)(self.raw.get()) == 1 }
    }

    pub fn is_busy(&self) -> bool {
        // SAFETY: see poll_connect.
        unsafe { (pq().PQisBusy)(self.raw.get()) == 1 }
    }

    /// The next result; `None`: the query is over. Would wait while [`Conn::is_busy`].
    pub fn next_answer(&self) -> Option<Answer> {
        // SAFETY: see poll_connect.
        let raw = unsafe { (pq().PQgetResult)(self.raw.get()) };
        Answer::new(raw)
    }

    pub fn take_notices(&self) -> Vec<Notice> {
        self.notices.take()
    }

    /// Cancels what these connections run, all at once, and gives it a moment to end.
    pub fn stop(conns: &[&Self]) {
        cancel::stop(conns.iter().map(|conn| conn.raw.get()).collect());
    }

    /// Asks the shard to cancel what this connection runs.
    pub fn start_cancel(&self) -> Cancelling {
        cancel::start(self.raw.get())
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.close();
    }
}

/// Called by libpq with each notice. Must not raise an error: libpq's state would be left broken.
unsafe extern "C" fn keep_notice(kept: *mut c_void, notice: *const PGresult) {
    let field = |code: u8| owned((pq().PQresultErrorField)(notice, c_int::from(code)));
    let kept = &*kept.cast::<RefCell<Vec<Notice>>>();
    if let Ok(mut kept) = kept.try_borrow_mut() {
        if kept.len() < MAX_NOTICES {
            kept.push(Notice::of(field));
        }
    }
}
