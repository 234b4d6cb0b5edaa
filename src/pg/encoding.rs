//! Text between the database's encoding, which is Postgres', and UTF-8, which is ours.
//!
//! The one place that converts, for whatever is compared, looked up or hashed. What always holds: nothing is replaced
//! in silence, so that two names never become one; a key's bytes are those of UTF-8 in every database, hence its owner
//! is the same in all. A database of encoding SQL_ASCII says nothing about its letters: its bytes stay as they are, and
//! must be UTF-8 where they become our text. Refuses, in Postgres' own words, what has no counterpart. In a database of
//! another encoding than UTF-8 our messages are ASCII ([`message`]). Read next: `keys`, `catalog::scan`.

use std::borrow::Cow;
use std::ffi::{c_char, CStr, CString};
use std::sync::atomic::{AtomicI32, Ordering};

use pgrx::pg_sys;

const UTF8: i32 = pg_sys::pg_enc::PG_UTF8 as i32;
const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII as i32;

/// The encoding of this session's database, once and for all. Not for the postmaster, which has none.
fn database() -> i32 {
    static KNOWN: AtomicI32 = AtomicI32::new(-1);
    match KNOWN.load(Ordering::Relaxed) {
        -1 => {
            // SAFETY: reads a variable that is set when the session has chosen its database.
            let encoding = unsafe { pg_sys::GetDatabaseEncoding() };
            KNOWN.store(encoding, Ordering::Relaxed);
            encoding
        }
        known => known,
    }
}

/// Whether the database's text is UTF-8 for certain.
pub fn is_utf8() -> bool {
    database() == UTF8
}

/// The bytes in UTF-8 of a text of the database; those of SQL_ASCII as they are.
pub fn utf8_bytes(text: &[u8]) -> Cow<'_, [u8]> {
    if is_utf8() || text.is_ascii() || database() == SQL_ASCII {
        return text.into();
    }
    Cow::Owned(convert(text, |text, length| {
        // SAFETY: `text` holds `length` bytes; the result is palloc'd, or `text` itself.
        unsafe { pg_sys::pg_server_to_any(text, length, UTF8) }
    }))
}

/// A text of the database as ours; raises Postgres' error if it has none in UTF-8.
pub fn utf8(text: &[u8]) -> Cow<'_, str> {
    let text = match utf8_bytes(text) {
        Cow::Borrowed(text) => return borrowed(text),
        Cow::Owned(text) => text,
    };
    Cow::Owned(String::from_utf8(text).unwrap_or_else(|error| borrowed(error.as_bytes()).into_owned()))
}

/// Text that should be UTF-8 already.
fn borrowed(text: &[u8]) -> Cow<'_, str> {
    std::str::from_utf8(text).map(Cow::Borrowed).unwrap_or_else(|_| {
        // SAFETY: `text` is a slice; by the rules of UTF-8 it is not valid, which raises an error that shows the bytes.
        unsafe { pg_sys::pg_verify_mbstr(UTF8, text.as_ptr().cast(), text.len() as i32, false) };
        String::from_utf8_lossy(text)
    })
}

/// A C string of the database as ours.
///
/// # Safety
/// `text` must be zero-terminated.
pub unsafe fn utf8_string(text: *const c_char) -> String {
    utf8(CStr::from_ptr(text).to_bytes()).into_owned()
}

/// A text of ours in the database's encoding; raises Postgres' error if that lacks a letter.
pub fn server(text: &str) -> Cow<'_, [u8]> {
    server_bytes(text.as_bytes())
}

/// As [`server`], for a call that takes a name. What holds a zero byte is no name, and becomes the empty one.
pub fn server_string(text: &str) -> CString {
    CString::new(server(text)).unwrap_or_default()
}

/// What [`utf8_bytes`] gave, in the database's encoding again.
pub fn server_bytes(text: &[u8]) -> Cow<'_, [u8]> {
    if is_utf8() || text.is_ascii() || database() == SQL_ASCII {
        return text.into();
    }
    Cow::Owned(convert(text, |text, length| {
        // SAFETY: `text` holds `length` bytes; the result is palloc'd, or `text` itself.
        unsafe { pg_sys::pg_any_to_server(text, length, UTF8) }
    }))
}

/// The result, zero-terminated, of a conversion that Postgres makes; `text` is not empty.
fn convert(text: &[u8], by: impl FnOnce(*const c_char, i32) -> *mut c_char) -> Vec<u8> {
    let length = i32::try_from(text.len()).unwrap_or(i32::MAX);
    let converted = by(text.as_ptr().cast(), length);
    if converted.cast_const().cast() == text.as_ptr() {
        return text.to_vec();
    }
    // SAFETY: a converted text is zero-terminated, palloc'd, and not used after this.
    unsafe {
        let copy = CStr::from_ptr(converted).to_bytes().to_vec();
        pg_sys::pfree(converted.cast());
        copy
    }
}

/// A text of ours for an error's message: letters beyond ASCII as `\u{e9}` where the database is not of UTF-8. (The
/// error may be about just that letter: it must not fail for its sake.)
pub fn message(text: String) -> String {
    if text.is_ascii() || is_utf8() {
        return text;
    }
    text.chars().fold(String::with_capacity(text.len() + 8), |mut shown, letter| {
        match letter.is_ascii() {
            true => shown.push(letter),
            false => shown.extend(letter.escape_unicode()),
        }
        shown
    })
}

/// The text of a statement for looking at its shape: what is not UTF-8 becomes question marks, one for each byte, so that
/// positions stay.
///
/// # Safety
/// `text` must be zero-terminated and live as long as the result is used.
pub unsafe fn shape<'a>(text: *const c_char) -> Cow<'a, str> {
    let bytes = CStr::from_ptr(text).to_bytes();
    match std::str::from_utf8(bytes) {
        Ok(text) if is_utf8() || text.is_ascii() || database() == SQL_ASCII => text.into(),
        _ => bytes.iter().map(|&byte| if byte.is_ascii() { char::from(byte) } else { '?' }).collect(),
    }
}
