//! Rows as COPY wants them. Source: "File Formats" of COPY in Postgres' manual.

use super::encode::Values;

/// The form in which a COPY's rows go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    Text,
    Binary,
}

impl Format {
    /// What stands before the first row.
    pub fn head(self) -> &'static [u8] {
        match self {
            Self::Text => b"",
            Self::Binary => b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0",
        }
    }

    /// What stands after the last.
    pub fn tail(self) -> &'static [u8] {
        match self {
            Self::Text => b"",
            Self::Binary => b"\xff\xff",
        }
    }
}

/// A row under way.
pub struct Row<'a> {
    out: &'a mut Vec<u8>,
    format: Format,
    begun: bool,
}

impl<'a> Row<'a> {
    pub fn begin(out: &'a mut Vec<u8>, format: Format, columns: usize) -> Self {
        if format == Format::Binary {
            out.extend_from_slice(&(columns as u16).to_be_bytes());
        }
        Self { out, format, begun: false }
    }

    /// A value in the row's format.
    pub fn push(&mut self, value: Option<&[u8]>) {
        match self.format {
            Format::Binary => counted(value, self.out),
            Format::Text => {
                if std::mem::replace(&mut self.begun, true) {
                    self.out.push(b'\t');
                }
                match value {
                    None => self.out.extend_from_slice(b"\\N"),
                    Some(value) => escape(value, self.out),
                }
            }
        }
    }

    pub fn end(self) {
        if self.format == Format::Text {
            self.out.push(b'\n');
        }
    }
}

/// In binary, text is its bytes. A text row takes text only.
impl Values for Row<'_> {
    fn push_text(&mut self, value: Option<&[u8]>) {
        self.push(value);
    }

    fn push_binary(&mut self, value: Option<&[u8]>) {
        debug_assert_eq!(self.format, Format::Binary);
        self.push(value);
    }
}

/// A value with its length before it; as a Bind message has it too.
pub fn counted(value: Option<&[u8]>, out: &mut Vec<u8>) {
    match value {
        None => out.extend_from_slice(&(-1_i32).to_be_bytes()),
        Some(value) => {
            out.extend_from_slice(&(value.len() as i32).to_be_bytes());
            out.extend_from_slice(value);
        }
    }
}

fn escape(value: &[u8], out: &mut Vec<u8>) {
    let mut rest = value;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'\\' | b'\t' | b'\n' | b'\r')) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(match rest[at] {
            b'\t' => b"\\t",
            b'\n' => b"\\n",
            b'\r' => b"\\r",
            _ => b"\\\\",
        });
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
}

/// The values of a row in text, `None` for NULL.
pub fn values(line: &[u8]) -> impl Iterator<Item = Option<Vec<u8>>> + '_ {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.split(|byte| *byte == b'\t').map(|value| (value != b"\\N").then(|| unescape(value)))
}

/// What [`escape`] was given, by us or by a server.
fn unescape(value: &[u8]) -> Vec<u8> {
    let (mut out, mut bytes) = (Vec::with_capacity(value.len()), value.iter());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'\\' => match bytes.next() {
                Some(b'b') => 0x08,
                Some(b'f') => 0x0c,
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                Some(b't') => b'\t',
                Some(b'v') => 0x0b,
                Some(other) => *other,
                None => b'\\',
            },
            byte => *byte,
        });
    }
    out
}
