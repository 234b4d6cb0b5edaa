//! SQL text as tokens, by the rules of Postgres' own lexer as far as they decide where a literal ends.
//!
//! Decides what is a literal, a comment, a word. What always holds: any text gives tokens, in one pass; an unfinished
//! literal or comment reaches to the end; comments and white space leave nothing. Source: Postgres' `scan.l`.

use super::Backslash;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A keyword or plain identifier.
    Word,
    /// `"..."` or `U&"..."`; also the escape character of the latter.
    Quoted,
    /// `$1`.
    Parameter,
    /// A string of any kind, or a number with its sign.
    Literal,
    /// A number whose sign, if any, is a token before it.
    Number,
    /// An operator, `:`, `:=` or `..`.
    Op,
    /// `(` or `[`.
    Open,
    /// `)` or `]`.
    Close,
    /// `,`
    Comma,
    /// `;`
    Semicolon,
    /// `.`
    Dot,
    /// `...`: the rest of a list that was folded before.
    More,
    /// `::`
    Cast,
    /// A character that is nothing in SQL.
    Other,
}

impl Kind {
    /// Returns whether it is shown as a placeholder.
    pub(super) fn is_value(self) -> bool {
        matches!(self, Self::Parameter | Self::Literal | Self::Number)
    }
}

/// A piece of the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
}

impl Token<'_> {
    /// Returns whether it is this keyword, in either case.
    pub(super) fn is_word(&self, word: &str) -> bool {
        self.kind == Kind::Word && self.text.eq_ignore_ascii_case(word)
    }
}

/// Returns all tokens of `sql`, signs of numbers and `UESCAPE` of strings taken into their literals.
pub(super) fn tokens(sql: &str, backslash: Backslash) -> Vec<Token<'_>> {
    let mut lexer = Lexer { sql, bytes: sql.as_bytes(), at: 0, backslash };
    let mut tokens: Vec<Token<'_>> = Vec::new();
    while let Some(token) = lexer.next() {
        match token.kind {
            Kind::Number if signed(&tokens) => {
                tokens.pop();
                tokens.push(Token { kind: Kind::Literal, ..token });
            }
            Kind::Literal => match escapes(&tokens) {
                Some(Kind::Literal) => {
                    tokens.pop();
                }
                // The escape character of an identifier is part of the name. A longer one is an error, and a literal.
                Some(Kind::Quoted) if token.text.len() <= 3 => tokens.push(Token { kind: Kind::Quoted, ..token }),
                _ => tokens.push(token),
            },
            _ => tokens.push(token),
        }
    }
    tokens
}

/// Returns whether the last token is the sign of a number to come, not an operator between two values.
fn signed(tokens: &[Token<'_>]) -> bool {
    const WORDS: [&str; 20] = [
        "and",
        "between",
        "by",
        "case",
        "else",
        "in",
        "is",
        "like",
        "limit",
        "not",
        "offset",
        "or",
        "return",
        "returning",
        "select",
        "set",
        "then",
        "to",
        "when",
        "where",
    ];
    let Some((last, rest)) = tokens.split_last() else {
        return false;
    };
    last.kind == Kind::Op
        && matches!(last.text, "+" | "-")
        && rest.last().is_none_or(|before| match before.kind {
            Kind::Op | Kind::Open | Kind::Comma | Kind::Semicolon => true,
            Kind::Word => WORDS.iter().any(|word| before.is_word(word)),
            _ => false,
        })
}

/// Returns the kind of what the next literal is the escape character of.
fn escapes(tokens: &[Token<'_>]) -> Option<Kind> {
    match tokens {
        [.., of, word] if word.is_word("uescape") && of.text.get(..2).is_some_and(|s| s.eq_ignore_ascii_case("u&")) => {
            Some(of.kind)
        }
        _ => None,
    }
}

struct Lexer<'a> {
    sql: &'a str,
    bytes: &'a [u8],
    at: usize,
    backslash: Backslash,
}

impl<'a> Lexer<'a> {
    fn next(&mut self) -> Option<Token<'a>> {
        self.skip_blank();
        let start = self.at;
        let first = self.peek(0)?;
        let kind = self.scan(first);
        // Every token ends after an ASCII byte, before one, or at the end: the slice cuts no character.
        Some(Token { kind, text: self.sql.get(start..self.at).unwrap_or_default() })
    }

    /// Moves past one token that starts with `first`, and says what it was.
    fn scan(&mut self, first: u8) -> Kind {
        match (first, self.peek(1), self.peek(2)) {
            (b'\'', ..) => self.string(0, self.backslash),
            (b'e' | b'E', Some(b'\''), _) => self.string(1, Backslash::Escape),
            (b'n' | b'N', Some(b'\''), _) => self.string(1, self.backslash),
            (b'b' | b'B' | b'x' | b'X', Some(b'\''), _) => self.string(1, Backslash::Ordinary),
            (b'u' | b'U', Some(b'&'), Some(b'\'')) => self.string(2, Backslash::Ordinary),
            (b'u' | b'U', Some(b'&'), Some(b'"')) => self.quoted(2),
            (b'"', ..) => self.quoted(0),
            (b'$', Some(b'0'..=b'9'), _) => {
                self.at += 1;
                self.skip_while(|b| b.is_ascii_digit());
                Kind::Parameter
            }
            (b'$', ..) => self.dollar(),
            (b'0'..=b'9', ..) | (b'.', Some(b'0'..=b'9'), _) => self.number(first),
            (b'.', Some(b'.'), Some(b'.')) => self.take(3, Kind::More),
            (b'.', Some(b'.'), _) | (b':', Some(b'='), _) => self.take(2, Kind::Op),
            (b':', Some(b':'), _) => self.take(2, Kind::Cast),
            (b'.', ..) => self.take(1, Kind::Dot),
            (b':', ..) => self.take(1, Kind::Op),
            (b'(' | b'[', ..) => self.take(1, Kind::Open),
            (b')' | b']', ..) => self.take(1, Kind::Close),
            (b',', ..) => self.take(1, Kind::Comma),
            (b';', ..) => self.take(1, Kind::Semicolon),
            (b, ..) if is_operator(b) => self.operator(),
            (b, ..) if is_word_start(b) => {
                self.skip_while(|b| is_word_start(b) || b.is_ascii_digit() || b == b'$');
                Kind::Word
            }
            _ => self.take(1, Kind::Other),
        }
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.bytes.get(self.at + ahead).copied()
    }

    fn take(&mut self, bytes: usize, kind: Kind) -> Kind {
        self.at += bytes;
        kind
    }

    fn skip_while(&mut self, wanted: impl Fn(u8) -> bool) {
        while self.peek(0).is_some_and(&wanted) {
            self.at += 1;
        }
    }

    /// Moves past white space and comments.
    fn skip_blank(&mut self) {
        while let Some(first) = self.peek(0) {
            match (first, self.peek(1)) {
                (b, _) if is_blank(b) => self.at += 1,
                (b'-', Some(b'-')) => self.skip_while(|b| b != b'\n' && b != b'\r'),
                (b'/', Some(b'*')) => self.skip_comment(),
                _ => return,
            }
        }
    }

    /// Moves past a comment in which others may nest.
    fn skip_comment(&mut self) {
        let mut depth = 0_usize;
        while let Some(first) = self.peek(0) {
            match (first, self.peek(1)) {
                (b'/', Some(b'*')) => {
                    depth += 1;
                    self.at += 2;
                }
                (b'*', Some(b'/')) => {
                    depth -= 1;
                    self.at += 2;
                    if depth == 0 {
                        return;
                    }
                }
                _ => self.at += 1,
            }
        }
    }

    /// Moves past a string whose quote stands `prefix` bytes ahead, and past its continuations on further lines.
    fn string(&mut self, prefix: usize, backslash: Backslash) -> Kind {
        self.at += prefix + 1;
        while let Some(byte) = self.peek(0) {
            self.at += 1;
            match byte {
                b'\\' if backslash == Backslash::Escape => self.at = (self.at + 1).min(self.bytes.len()),
                b'\'' if self.peek(0) == Some(b'\'') => self.at += 1,
                b'\'' if !self.continues() => break,
                _ => {}
            }
        }
        Kind::Literal
    }

    /// Moves past the gap to the string's next part and its quote, if the gap holds a line break.
    fn continues(&mut self) -> bool {
        let end = self.at;
        let mut broken = false;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some(b), _) if is_blank(b) => {
                    broken |= b == b'\n' || b == b'\r';
                    self.at += 1;
                }
                (Some(b'-'), Some(b'-')) => self.skip_while(|b| b != b'\n' && b != b'\r'),
                (Some(b'\''), _) if broken => {
                    self.at += 1;
                    return true;
                }
                _ => {
                    self.at = end;
                    return false;
                }
            }
        }
    }

    fn quoted(&mut self, prefix: usize) -> Kind {
        self.at += prefix + 1;
        while let Some(byte) = self.peek(0) {
            self.at += 1;
            if byte == b'"' {
                if self.peek(0) != Some(b'"') {
                    break;
                }
                self.at += 1;
            }
        }
        Kind::Quoted
    }

    /// Moves past `$tag$...$tag$`, or past a lone dollar.
    fn dollar(&mut self) -> Kind {
        let start = self.at;
        self.at += 1;
        self.skip_while(|b| is_word_start(b) || b.is_ascii_digit());
        if self.peek(0) != Some(b'$') {
            self.at = start + 1;
            return Kind::Other;
        }
        self.at += 1;
        let tag = self.bytes.get(start..self.at).unwrap_or_default();
        loop {
            self.skip_while(|b| b != b'$');
            match self.bytes.get(self.at..) {
                None | Some([]) => break,
                Some(rest) if rest.starts_with(tag) => {
                    self.at += tag.len();
                    break;
                }
                Some(_) => self.at += 1,
            }
        }
        Kind::Literal
    }

    fn number(&mut self, first: u8) -> Kind {
        let digit = |b: u8| b.is_ascii_digit() || b == b'_';
        match (first, self.peek(1)) {
            (b'0', Some(b'x' | b'X' | b'o' | b'O' | b'b' | b'B')) => {
                self.at += 2;
                self.skip_while(|b| b.is_ascii_hexdigit() || b == b'_');
                return Kind::Number;
            }
            _ => self.skip_while(digit),
        }
        if self.peek(0) == Some(b'.') && self.peek(1) != Some(b'.') {
            self.at += 1;
            self.skip_while(digit);
        }
        if matches!(self.peek(0), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(self.peek(1), Some(b'+' | b'-')));
            if self.peek(1 + sign).is_some_and(|b| b.is_ascii_digit()) {
                self.at += 1 + sign;
                self.skip_while(digit);
            }
        }
        Kind::Number
    }

    /// Moves past an operator: it ends before a comment, and in a sign only if it holds one of the characters that
    /// the SQL standard's own operators do not.
    fn operator(&mut self) -> Kind {
        let start = self.at;
        let mut special = false;
        while let Some(byte) = self.peek(0).filter(|b| is_operator(*b)) {
            if matches!((byte, self.peek(1)), (b'-', Some(b'-')) | (b'/', Some(b'*'))) {
                break;
            }
            special |= matches!(byte, b'~' | b'!' | b'@' | b'#' | b'%' | b'^' | b'&' | b'|' | b'`' | b'?');
            self.at += 1;
        }
        while !special && self.at > start + 1 && matches!(self.bytes.get(self.at - 1), Some(b'+' | b'-')) {
            self.at -= 1;
        }
        Kind::Op
    }
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
}

/// Bytes above ASCII are letters to Postgres, whatever the encoding.
fn is_word_start(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80
}

fn is_operator(byte: u8) -> bool {
    matches!(
        byte,
        b'+' | b'-'
            | b'*'
            | b'/'
            | b'<'
            | b'>'
            | b'='
            | b'~'
            | b'!'
            | b'@'
            | b'#'
            | b'%'
            | b'^'
            | b'&'
            | b'|'
            | b'`'
            | b'?'
    )
}
