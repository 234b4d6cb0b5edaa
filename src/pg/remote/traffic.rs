//! What a statement has cost on the way to its shard and back, for EXPLAIN ANALYZE.

use std::ops::Add;

use pgrx::pg_sys;

/// Messages of a statement's own: what begins and ends transactions of several statements is not in it, but for a BEGIN
/// that travels with it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    pub round_trips: u64,
    /// Bytes.
    pub sent: u64,
    /// Bytes.
    pub received: u64,
}

impl Traffic {
    /// Counts messages that went out together and are answered.
    pub fn ask(&mut self, bytes: usize) {
        self.round_trips += 1;
        self.sent += bytes as u64;
    }

    /// Counts a message by the length of its content.
    pub fn hear(&mut self, content: usize) {
        // The kind and the length stand before it.
        self.received += content as u64 + 5;
    }

    /// Adds it to EXPLAIN's output.
    ///
    /// # Safety
    /// `es` must be the state of an EXPLAIN ANALYZE.
    pub unsafe fn explain(self, es: *mut pg_sys::ExplainState) {
        let property = |label: &std::ffi::CStr, unit: *const std::ffi::c_char, value: u64| {
            pg_sys::ExplainPropertyInteger(label.as_ptr(), unit, value as i64, es);
        };
        property(c"Round Trips", std::ptr::null(), self.round_trips);
        property(c"Sent", c"bytes".as_ptr(), self.sent);
        property(c"Received", c"bytes".as_ptr(), self.received);
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            round_trips: self.round_trips + other.round_trips,
            sent: self.sent + other.sent,
            received: self.received + other.received,
        }
    }
}
