//! Statements as shapes: the text of a statement without its values, and a number for it.
//!
//! Decides which statements count as the same one in `shardmap.fanout_queries`. What always holds: [`normalize`] takes
//! any text, valid SQL or not, in time linear in its length; a literal's value never survives it; doing it twice changes
//! nothing more; the number is the low 64 bits of MD5 of the normalised text, so that plain SQL finds the same one.
//! Words and quoted identifiers are kept exactly, so `select` and `SELECT` are two shapes, as are one element and a list
//! of several. Refuses nothing: what is no SQL is cut into single characters.
//! Read [`lexer`] for what a literal is, [`fold`] for lists.

mod fold;
mod lexer;

use crate::hash::md5_u128;
use lexer::{Kind, Token};

/// How the server reads a backslash in `'...'`: its setting `standard_conforming_strings`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backslash {
    /// An ordinary character (`on`, the default).
    Ordinary,
    /// An escape (`off`): `'it\'s'` is one literal.
    Escape,
}

/// Returns the normalised text of `sql`.
///
/// Literals become placeholders, numbered on from the parameters that the text has; comments go; white space and the
/// space around punctuation become uniform; a list of values keeps its first one (`IN ($1, ...)`, `ARRAY[$1, ...]`,
/// `VALUES ($1, $2), ...`), and the parameters that are left are numbered without gaps, so that the length of a list
/// changes nothing.
#[must_use]
pub fn normalize(sql: &str, backslash: Backslash) -> String {
    render(&fold::lists(lexer::tokens(sql, backslash)))
}

/// Returns the fingerprint of a normalised text: the low 64 bits of its MD5.
///
/// In SQL: `('x' || right(md5(text), 16))::bit(64)::bigint`, which shows the same bits as a signed number.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // the low 64 bits are the definition
pub fn fingerprint(normalized: &str) -> u64 {
    md5_u128(normalized.as_bytes()) as u64
}

/// Reads a list of fingerprints as SQL shows them: signed numbers between commas. `None` if an element is none.
#[must_use]
pub fn fingerprints(list: &str) -> Option<Vec<u64>> {
    if list.trim().is_empty() {
        return Some(Vec::new());
    }
    list.split(',').map(|number| number.trim().parse().ok().map(i64::cast_unsigned)).collect()
}

/// Returns the longest start of `text` of at most `max_bytes` bytes that cuts no character.
#[must_use]
pub fn bounded(text: &str, max_bytes: usize) -> &str {
    let mut end = text.len().min(max_bytes);
    loop {
        if let Some(start) = text.get(..end) {
            return start;
        }
        end -= 1;
    }
}

/// Whether a comment of `sql` holds `wanted`; a literal or a name that looks like it does not count.
#[must_use]
pub fn comments_contain(sql: &str, backslash: Backslash, wanted: &str) -> bool {
    // Comments and blanks are what lies between the tokens.
    let base = sql.as_ptr() as usize;
    let mut end = 0;
    let mut gaps = Vec::new();
    for token in lexer::tokens(sql, backslash) {
        let start = (token.text.as_ptr() as usize).saturating_sub(base);
        gaps.push(sql.get(end..start));
        end = start + token.text.len();
    }
    gaps.push(sql.get(end..));
    gaps.into_iter().flatten().any(|gap| gap.contains(wanted))
}

/// Whether `sql` is a COPY of a table by its name, not of a query.
#[must_use]
pub fn copies_table(sql: &str, backslash: Backslash) -> bool {
    match lexer::tokens(sql, backslash).as_slice() {
        [copy, first, ..] => copy.text.eq_ignore_ascii_case("copy") && first.text != "(",
        _ => false,
    }
}

/// Like [`statement`], with the comments before the statement (Postgres 18 leaves them out of its position).
#[must_use]
pub fn statement_with_comments(source: &str, backslash: Backslash, location: i32, length: i32) -> &str {
    let own = statement(source, location, length);
    let base = source.as_ptr() as usize;
    let (start, end) = (own.as_ptr() as usize - base, own.as_ptr() as usize - base + own.len());
    let before = source.get(..start).unwrap_or_default();
    let mut ends = lexer::tokens(before, backslash).into_iter().filter(|token| token.text == ";");
    let lead = ends.next_back().map_or(0, |token| token.text.as_ptr() as usize - base + token.text.len());
    source.get(lead..end).unwrap_or(own)
}

/// Returns one statement of a text of several, from the byte position and length that Postgres' parser notes: a
/// position below 0 is unknown and means the start, a length of 0 means to the end. What does not fit gives the text.
#[must_use]
pub fn statement(source: &str, location: i32, length: i32) -> &str {
    let start = usize::try_from(location).unwrap_or(0);
    let end = match usize::try_from(length) {
        Ok(length) if length > 0 => start.saturating_add(length),
        _ => source.len(),
    };
    source.get(start..end).unwrap_or(source).trim_matches([' ', '\t', '\n', '\r', '\u{b}', '\u{c}'])
}

/// Writes the tokens with uniform spacing. Parameters are numbered by rank, then literals on from there.
fn render(tokens: &[Token<'_>]) -> String {
    let mut known: Vec<u64> = tokens.iter().filter_map(parameter).collect();
    known.sort_unstable();
    known.dedup();
    let mut next = known.len();
    let mut text = String::new();
    let mut previous: Option<&Token<'_>> = None;
    for token in tokens {
        if previous.is_some_and(|previous| spaced(previous, token)) {
            text.push(' ');
        }
        previous = Some(token);
        let number = match token.kind {
            Kind::Literal | Kind::Number => {
                next += 1;
                next
            }
            Kind::Parameter => parameter(token).map_or(0, |n| known.partition_point(|k| *k < n)) + 1,
            _ => {
                text.push_str(token.text);
                continue;
            }
        };
        text.push('$');
        text.push_str(&number.to_string());
    }
    text
}

/// Returns the number of a parameter; numbers that Postgres would not take are all the greatest.
fn parameter(token: &Token<'_>) -> Option<u64> {
    match token.kind {
        Kind::Parameter => Some(token.text.get(1..).and_then(|digits| digits.parse().ok()).unwrap_or(u64::MAX)),
        _ => None,
    }
}

/// Returns whether a space stands between two tokens. Where none stands, the two must read as the same two again.
fn spaced(left: &Token<'_>, right: &Token<'_>) -> bool {
    use Kind::{Cast, Close, Comma, Dot, Op, Open, Quoted, Semicolon, Word};
    match (left.kind, right.kind) {
        (Open, _) | (_, Close | Comma | Semicolon) => false,
        (Word, Open) => right.text == "(" && before_group(left.text),
        (Quoted | Close, Open) => false,
        (Word | Quoted | Close, Dot) | (Dot, Word | Quoted | Open) => false,
        (Dot, Op) => right.text != "*",
        (l, Dot) if l.is_value() => false,
        (Dot, r) if r.is_value() => false,
        (Word | Quoted | Close, Cast) | (Cast, Word | Quoted | Open) => false,
        (l, Cast) if l.is_value() => false,
        (Cast, r) if r.is_value() => false,
        (l, Open) if l.is_value() => right.text != "[",
        _ => true,
    }
}

/// Returns whether a word is one of those after which a parenthesis is no list of arguments.
fn before_group(word: &str) -> bool {
    const WORDS: [&str; 42] = [
        "all",
        "and",
        "any",
        "as",
        "between",
        "by",
        "case",
        "conflict",
        "cross",
        "distinct",
        "do",
        "else",
        "except",
        "exists",
        "filter",
        "from",
        "having",
        "ilike",
        "in",
        "intersect",
        "is",
        "join",
        "lateral",
        "like",
        "limit",
        "materialized",
        "not",
        "offset",
        "on",
        "or",
        "over",
        "returning",
        "select",
        "set",
        "similar",
        "some",
        "then",
        "union",
        "using",
        "values",
        "when",
        "where",
    ];
    WORDS.iter().any(|known| word.eq_ignore_ascii_case(known))
}
