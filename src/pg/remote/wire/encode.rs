//! Messages to a shard. Source: "Message Formats" in Postgres' manual, protocol 3.0.
//!
//! Text is bytes in the connection's encoding, which is the database's and need not be UTF-8.

use pgrx::pg_sys;

use super::copy::counted;
use super::decode;

/// Messages that are sent together.
#[derive(Default)]
pub struct Batch {
    pub bytes: Vec<u8>,
    /// The ReadyForQuery that answer it.
    pub readies: u32,
}

/// A statement's parameters, as Bind wants them.
#[derive(Clone, Default)]
pub struct Params {
    formats: Vec<u8>,
    values: Vec<u8>,
    count: u16,
}

/// What values are written into. `None` is NULL.
pub trait Values {
    fn push_text(&mut self, value: Option<&[u8]>);
    fn push_binary(&mut self, value: Option<&[u8]>);
}

impl Values for Params {
    fn push_text(&mut self, value: Option<&[u8]>) {
        self.push(0, value);
    }

    fn push_binary(&mut self, value: Option<&[u8]>) {
        self.push(1, value);
    }
}

impl Params {
    fn push(&mut self, format: u8, value: Option<&[u8]>) {
        self.count += 1;
        self.formats.extend_from_slice(&[0, format]);
        counted(value, &mut self.values);
    }

    pub fn values(&self) -> impl Iterator<Item = Option<&[u8]>> {
        decode::counted_values(&self.values, self.count.into())
    }
}

impl Batch {
    fn message(&mut self, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
        self.bytes.push(kind);
        let at = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        body(&mut self.bytes);
        let length = (self.bytes.len() - at) as i32;
        self.bytes[at..at + 4].copy_from_slice(&length.to_be_bytes());
    }

    /// One or more statements by the simple protocol.
    pub fn query(&mut self, sql: &[u8]) {
        self.message(b'Q', |out| text(sql, out));
        self.readies += 1;
    }

    pub fn parse(&mut self, name: &[u8], sql: &[u8], types: &[pg_sys::Oid]) {
        self.message(b'P', |out| {
            text(name, out);
            text(sql, out);
            out.extend_from_slice(&(types.len() as u16).to_be_bytes());
            types.iter().for_each(|oid| out.extend_from_slice(&oid.to_u32().to_be_bytes()));
        });
    }

    pub fn bind(&mut self, portal: &[u8], statement: &[u8], params: &Params, result_formats: &[i16]) {
        self.message(b'B', |out| {
            text(portal, out);
            text(statement, out);
            out.extend_from_slice(&params.count.to_be_bytes());
            out.extend_from_slice(&params.formats);
            out.extend_from_slice(&params.count.to_be_bytes());
            out.extend_from_slice(&params.values);
            out.extend_from_slice(&(result_formats.len() as u16).to_be_bytes());
            result_formats.iter().for_each(|format| out.extend_from_slice(&format.to_be_bytes()));
        });
    }

    pub fn describe_statement(&mut self, name: &[u8]) {
        self.message(b'D', |out| {
            out.push(b'S');
            text(name, out);
        });
    }

    /// `limit`: rows; 0: all.
    pub fn execute(&mut self, portal: &[u8], limit: i32) {
        self.message(b'E', |out| {
            text(portal, out);
            out.extend_from_slice(&limit.to_be_bytes());
        });
    }

    pub fn close_statement(&mut self, name: &[u8]) {
        self.message(b'C', |out| {
            out.push(b'S');
            text(name, out);
        });
    }

    pub fn close_portal(&mut self, name: &[u8]) {
        self.message(b'C', |out| {
            out.push(b'P');
            text(name, out);
        });
    }

    pub fn sync(&mut self) {
        self.message(b'S', |_| {});
        self.readies += 1;
    }

    /// A command without parameters or rows, by the extended protocol, without Sync.
    pub fn command(&mut self, sql: &[u8]) {
        self.parse(b"", sql, &[]);
        self.bind(b"", b"", &Params::default(), &[]);
        self.execute(b"", 0);
    }

    pub fn copy_data(&mut self, data: &[u8]) {
        self.message(b'd', |out| out.extend_from_slice(data));
    }

    pub fn copy_done(&mut self) {
        self.message(b'c', |_| {});
    }

    pub fn copy_fail(&mut self, reason: &[u8]) {
        self.message(b'f', |out| text(reason, out));
    }
}

/// A string ends at its first zero byte, which no SQL text of Postgres has.
fn text(text: &[u8], out: &mut Vec<u8>) {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    out.extend_from_slice(&text[..end]);
    out.push(0);
}
