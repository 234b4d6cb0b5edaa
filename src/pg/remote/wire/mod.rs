//! Bytes to and from a shard, on the socket that libpq has connected and authenticated.
//!
//! libpq's own way of running statements allocates a result for each, has no portals that are read in parts, and cannot
//! be told what not to ask for; a named statement of ours costs one message out and one in. Decides nothing.
//! What always holds: no call waits; nothing stays borrowed when a call returns; after [`Wire::close`] every call finds
//! the end of the connection. Over TLS the bytes go through the OpenSSL session that libpq has made.
//!
//! Read next: [`encode`] and [`decode`] for the messages, `link` for the conversation.

pub mod copy;
pub mod decode;
pub mod encode;
mod tls;

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::io::{Error, ErrorKind};

use super::failure::Failure;
use super::libpq::Conn;
use super::wait::{Interest, WaitSet, Woken};
use tls::Tls;

/// Read from the socket at once, at least.
const CHUNK: usize = 16 * 1024;
/// A buffer that a long message has made larger is given back when it is empty.
const KEEP: usize = 256 * 1024;
/// The header of a message: its kind, and its length without the kind.
const HEADER: usize = 5;

/// Bytes that have arrived: those from `start` to `end` are to be read.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// What trying to read has brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    Some,
    Nothing,
    End,
}

pub struct Wire {
    conn: Conn,
    tls: Option<Tls>,
    waits: WaitSet,
    input: RefCell<Input>,
    output: RefCell<Vec<u8>>,
    /// How much of `output` has left.
    sent: Cell<usize>,
    /// All has left, and nothing was looked for since.
    has_asked: Cell<bool>,
}

impl Wire {
    /// # Errors
    /// 0A000 if the connection is encrypted by something else than OpenSSL.
    pub fn new(conn: Conn) -> Result<Self, Failure> {
        let tls = Tls::of(&conn)?;
        let waits = WaitSet::new(&[(conn.socket(), Interest::Read)]);
        let (input, output) = (RefCell::default(), RefCell::default());
        Ok(Self { conn, tls, waits, input, output, sent: Cell::new(0), has_asked: Cell::new(false) })
    }

    pub fn conn(&self) -> &Conn {
        &self.conn
    }

    pub fn is_open(&self) -> bool {
        self.conn.is_ok()
    }

    pub fn close(&self) {
        self.conn.close();
    }

    pub fn socket(&self) -> c_int {
        self.conn.socket()
    }

    /// Takes bytes to be sent by [`Wire::flush`].
    pub fn push(&self, bytes: &[u8]) {
        self.output.borrow_mut().extend_from_slice(bytes);
    }

    /// Bytes that have not left.
    pub fn unsent(&self) -> usize {
        self.output.borrow().len() - self.sent.get()
    }

    /// Sends what the socket takes. `Ok(true)`: all has left.
    pub fn flush(&self) -> Result<bool, Error> {
        let mut output = self.output.borrow_mut();
        while self.sent.get() < output.len() {
            match self.write(&output[self.sent.get()..]) {
                Ok(length) => self.sent.set(self.sent.get() + length),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if !output.is_empty() {
            self.has_asked.set(true);
        }
        self.sent.set(0);
        output.clear();
        if output.capacity() > KEEP {
            output.shrink_to(CHUNK);
        }
        Ok(true)
    }

    fn write(&self, bytes: &[u8]) -> Result<usize, Error> {
        let Some(socket) = self.open_socket() else { return Err(ErrorKind::NotConnected.into()) };
        match &self.tls {
            Some(tls) => tls.write(bytes),
            None => {
                // SAFETY: a live socket and a valid buffer.
                let length = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
                usize::try_from(length).map_err(|_| Error::last_os_error())
            }
        }
    }

    fn read(&self, bytes: &mut [u8]) -> Result<usize, Error> {
        let Some(socket) = self.open_socket() else { return Ok(0) };
        match &self.tls {
            Some(tls) => tls.read(bytes),
            None => {
                // SAFETY: a live socket and a valid buffer.
                let length = unsafe { libc::recv(socket, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
                usize::try_from(length).map_err(|_| Error::last_os_error())
            }
        }
    }

    fn open_socket(&self) -> Option<c_int> {
        Some(self.conn.socket()).filter(|socket| *socket >= 0)
    }

    /// Whether it is better to wait for the socket than to look into it: nothing is here, and the answer to what has just
    /// left takes a while. True once after that.
    pub fn is_too_early(&self) -> bool {
        let input = self.input.borrow();
        // What OpenSSL has read already would not wake who waits for the socket.
        self.has_asked.take() && input.start == input.end && self.tls.is_none()
    }

    /// Reads once what has arrived.
    pub fn fill(&self) -> Fill {
        let mut input = self.input.borrow_mut();
        let Input { bytes, start, end } = &mut *input;
        if start == end {
            (*start, *end) = (0, 0);
            if bytes.len() > KEEP {
                bytes.truncate(CHUNK);
                bytes.shrink_to(CHUNK);
            }
        }
        if bytes.len() - *end < CHUNK {
            bytes.copy_within(*start..*end, 0);
            (*start, *end) = (0, *end - *start);
            if bytes.len() - *end < CHUNK {
                let larger = (*end + CHUNK).max(bytes.len() * 2);
                bytes.resize(larger, 0);
            }
        }
        loop {
            return match self.read(&mut bytes[*end..]) {
                Ok(0) => Fill::End,
                Ok(length) => {
                    *end += length;
                    Fill::Some
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => Fill::Nothing,
                Err(_) => Fill::End,
            };
        }
    }

    /// Moves the next whole message into `body` and returns its kind. `Ok(None)`: it has not arrived.
    ///
    /// # Errors
    /// The bytes are no messages.
    pub fn take(&self, body: &mut Vec<u8>) -> Result<Option<u8>, Error> {
        let mut input = self.input.borrow_mut();
        let Input { bytes, start, end } = &mut *input;
        let arrived = &bytes[*start..*end];
        let Some((header, rest)) = arrived.split_at_checked(HEADER) else { return Ok(None) };
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        // Source: PG_MAX_ALLOC: no message of Postgres is longer than 1 GB.
        if !(4..=1 << 30).contains(&length) {
            return Err(ErrorKind::InvalidData.into());
        }
        let Some(message) = rest.get(..length - 4) else { return Ok(None) };
        body.clear();
        body.extend_from_slice(message);
        let kind = header[0];
        *start += length + 1;
        Ok(Some(kind))
    }

    /// Whether nothing is there to be read or has to be: neither here nor in the socket.
    pub fn is_quiet(&self) -> bool {
        let input = self.input.borrow();
        input.start == input.end
            && !super::wait::poll_socket(self.conn.socket(), Interest::Read, std::time::Instant::now())
    }

    /// Waits for the socket, or for the latch. The end of a closed connection has come.
    pub fn wait(&self, interest: Interest, limit: Option<std::time::Duration>) -> Woken {
        if self.open_socket().is_none() {
            return Woken::Socket;
        }
        self.waits.watch(interest);
        self.waits.wait(limit)
    }
}
