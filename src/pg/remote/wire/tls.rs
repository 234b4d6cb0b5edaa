//! Reading and writing through the OpenSSL session of a libpq connection.
//!
//! OpenSSL is not linked: libpq has it in the process, and the few functions needed are looked up there.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io::{Error, ErrorKind};
use std::sync::OnceLock;

use pgrx::PgSqlErrorCode;

use crate::pg::remote::failure::Failure;
use crate::pg::remote::libpq::Conn;

type Transfer = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int) -> c_int;
type GetError = unsafe extern "C" fn(*const c_void, c_int) -> c_int;

struct Functions {
    read: Transfer,
    write: Transfer,
    error: GetError,
    clear: unsafe extern "C" fn(),
}

static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();

fn find() -> Option<Functions> {
    // SAFETY: dlsym reads NUL-terminated names; OpenSSL's ABI gives these functions the types declared above.
    unsafe {
        let address = |name: &std::ffi::CStr| {
            let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            (!address.is_null()).then_some(address)
        };
        Some(Functions {
            read: std::mem::transmute::<*mut c_void, Transfer>(address(c"SSL_read")?),
            write: std::mem::transmute::<*mut c_void, Transfer>(address(c"SSL_write")?),
            error: std::mem::transmute::<*mut c_void, GetError>(address(c"SSL_get_error")?),
            clear: std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(address(c"ERR_clear_error")?),
        })
    }
}

/// The session of one connection, which it does not outlive.
pub struct Tls {
    ssl: *mut c_void,
    functions: &'static Functions,
    /// The length of a write that has to be repeated as it was.
    again: Cell<usize>,
}

impl Tls {
    /// `Ok(None)`: the connection is not encrypted.
    pub fn of(conn: &Conn) -> Result<Option<Self>, Failure> {
        if !conn.is_encrypted() {
            return Ok(None);
        }
        let ssl = conn.openssl_session();
        let functions = FUNCTIONS.get_or_init(find).as_ref();
        match functions {
            Some(functions) if !ssl.is_null() => Ok(Some(Self { ssl, functions, again: Cell::new(0) })),
            _ => Err(Failure::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                "connection to the shard is encrypted in a way that pg_shardmap does not know",
            )
            .hint("Use TLS by OpenSSL (sslmode=require, gssencmode=disable).")),
        }
    }

    pub fn read(&self, bytes: &mut [u8]) -> Result<usize, Error> {
        let length = bytes.len().min(1 << 30) as c_int;
        // SAFETY: the session lives as long as its connection, whose socket the caller has just seen open.
        let outcome = unsafe {
            (self.functions.clear)();
            (self.functions.read)(self.ssl, bytes.as_mut_ptr().cast(), length)
        };
        match self.outcome(outcome) {
            // The shard has ended the session in good order.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(0),
            outcome => outcome,
        }
    }

    pub fn write(&self, bytes: &[u8]) -> Result<usize, Error> {
        // A write that would have blocked must be repeated with the same bytes: never more than then.
        let length = match self.again.get() {
            0 => bytes.len().min(1 << 20),
            again => again,
        };
        // SAFETY: as in `read`; OpenSSL only reads the bytes. libpq has set SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER.
        let outcome = unsafe {
            (self.functions.clear)();
            (self.functions.write)(self.ssl, bytes.as_ptr().cast_mut().cast(), length as c_int)
        };
        let outcome = self.outcome(outcome);
        let blocked = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        self.again.set(if blocked { length } else { 0 });
        outcome
    }

    fn outcome(&self, outcome: c_int) -> Result<usize, Error> {
        if let (true, Ok(length)) = (outcome > 0, usize::try_from(outcome)) {
            return Ok(length);
        }
        // SAFETY: as in `read`.
        match unsafe { (self.functions.error)(self.ssl, outcome) } {
            // Source: openssl/ssl.h: SSL_ERROR_WANT_READ and _WRITE; _ZERO_RETURN.
            2 | 3 => Err(ErrorKind::WouldBlock.into()),
            6 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Err(ErrorKind::ConnectionReset.into()),
        }
    }
}
