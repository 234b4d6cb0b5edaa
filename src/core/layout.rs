//! The layout of SQL text: Postgres deparses a query over many lines, of which a shard and EXPLAIN need one.

/// Returns `sql` with each stretch of white space outside quotes as one blank, and none at its ends.
///
/// `sql`: text as Postgres deparses it, in any encoding of its servers: without comments and dollar quotes; a backslash
/// escapes in constants that begin with `E'` only.
#[must_use]
pub fn one_line(sql: &[u8]) -> Vec<u8> {
    let mut line = Vec::with_capacity(sql.len());
    let mut bytes = sql.trim_ascii().iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if byte == b'\'' || byte == b'"' {
            let escapes = byte == b'\'' && line.last() == Some(&b'E');
            line.push(byte);
            while let Some(inner) = bytes.next() {
                line.push(inner);
                let pairs = (inner == b'\\' && escapes) || (inner == byte && bytes.peek() == Some(&byte));
                if pairs {
                    line.extend(bytes.next());
                } else if inner == byte {
                    break;
                }
            }
        } else if !byte.is_ascii_whitespace() {
            line.push(byte);
        } else if line.last() != Some(&b' ') {
            line.push(b' ');
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn quotes_keep_their_blanks() {
        for (sql, want) in [
            (" SELECT a,\n    b\n   FROM t\n  WHERE (k = 1)", "SELECT a, b FROM t WHERE (k = 1)"),
            ("SELECT 'a\n  b',\n  \"c  d\"", "SELECT 'a\n  b', \"c  d\""),
            ("SELECT 'it''s  two',\n  1", "SELECT 'it''s  two', 1"),
            ("SELECT E'a\\'  b''  c\\\\',\n  1", "SELECT E'a\\'  b''  c\\\\', 1"),
            ("SELECT 'a\\',\n  'b'", "SELECT 'a\\', 'b'"),
            ("SELECT 'open  end", "SELECT 'open  end"),
            ("", ""),
        ] {
            assert_eq!(String::from_utf8(one_line(sql.as_bytes())).unwrap(), want, "{sql:?}");
        }
    }
}
