//! Messages of a shard, taken apart. Source: "Message Formats" in Postgres' manual, protocol 3.0.
//!
//! What always holds: nothing is read past the end of a message; a message that does not fit its format yields fewer
//! values, never wrong ones.

use pgrx::pg_sys;

use crate::pg::encoding;

/// The state of the shard's transaction, as ReadyForQuery tells it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Status {
    Idle,
    InTransaction,
    InError,
}

impl Status {
    pub fn of(body: &[u8]) -> Self {
        match body.first() {
            Some(b'I') => Self::Idle,
            Some(b'T') => Self::InTransaction,
            _ => Self::InError,
        }
    }
}

/// Reads a message from its front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    fn i16(&mut self) -> Option<i16> {
        self.take(2).map(|b| i16::from_be_bytes([b[0], b[1]]))
    }

    fn i32(&mut self) -> Option<i32> {
        self.take(4).map(|b| i32::from_be_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let text = self.take(end);
        self.take(1)?;
        text
    }
}

/// The values of a DataRow, `None` for NULL.
pub fn values(body: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    let mut reader = Reader(body);
    let count = reader.i16().unwrap_or(0);
    counted_values(reader.0, count.try_into().unwrap_or(0))
}

/// So many values, each with its length before it.
pub fn counted_values(bytes: &[u8], count: usize) -> impl Iterator<Item = Option<&[u8]>> {
    let mut reader = Reader(bytes);
    (0..count).map_while(move |_| match reader.i32()? {
        -1 => Some(None),
        length => Some(Some(reader.take(usize::try_from(length).ok()?)?)),
    })
}

/// The types of a ParameterDescription.
pub fn parameter_types(body: &[u8]) -> Vec<pg_sys::Oid> {
    let mut reader = Reader(body);
    let count = reader.i16().unwrap_or(0) as u16;
    (0..count).map_while(|_| reader.i32().map(|oid| pg_sys::Oid::from(oid as u32))).collect()
}

/// Name and type of each column of a RowDescription.
pub fn columns(body: &[u8]) -> Vec<(String, pg_sys::Oid)> {
    let mut reader = Reader(body);
    let count = reader.i16().unwrap_or(0);
    let mut column = || {
        let name = encoding::utf8(reader.text()?).into_owned();
        reader.take(6)?;
        let kind = reader.i32()? as u32;
        reader.take(8)?;
        Some((name, pg_sys::Oid::from(kind)))
    };
    (0..count).map_while(|_| column()).collect()
}

/// The fields of an ErrorResponse or a NoticeResponse by their letters.
pub fn fields(body: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut reader = Reader(body);
    std::iter::from_fn(move || match reader.take(1)?[0] {
        0 => None,
        letter => Some((letter, reader.text()?)),
    })
}

/// A field of an ErrorResponse or a NoticeResponse.
pub fn field(body: &[u8], letter: u8) -> Option<String> {
    fields(body).find(|(own, _)| *own == letter).map(|(_, text)| encoding::utf8(text).into_owned())
}

/// The command tag of a CommandComplete, such as `INSERT 0 3`.
pub fn tag(body: &[u8]) -> String {
    String::from_utf8_lossy(body.strip_suffix(&[0]).unwrap_or(body)).into_owned()
}

/// The number of rows at the end of a command tag.
pub fn tag_rows(body: &[u8]) -> u64 {
    let digits = body.iter().rev().skip(1).take_while(|byte| byte.is_ascii_digit()).count();
    let end = body.len().saturating_sub(1);
    body[end - digits..end].iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'))
}
