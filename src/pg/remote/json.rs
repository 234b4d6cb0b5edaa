//! A row of a shard as a JSON object, in the database's encoding.
//!
//! What always holds: numbers keep every digit; whatever has no form in JSON (NaN, other types) is a string.

use pgrx::pg_sys;

use super::libpq::Answer;

/// Appends row `row` as an object, its keys the column names.
pub fn push_row(answer: &Answer, row: usize, json: &mut Vec<u8>) {
    json.push(b'{');
    for column in 0..answer.columns() {
        if column > 0 {
            json.push(b',');
        }
        push_string(answer.column_name(column).as_bytes(), json);
        json.push(b':');
        match answer.value(row, column) {
            None => json.extend_from_slice(b"null"),
            Some(value) => push_value(value, answer.column_type(column), json),
        }
    }
    json.push(b'}');
}

fn push_value(value: &[u8], kind: pg_sys::Oid, json: &mut Vec<u8>) {
    match kind {
        pg_sys::BOOLOID => json.extend_from_slice(if value == b"t" { b"true" } else { b"false" }),
        pg_sys::JSONOID | pg_sys::JSONBOID => json.extend_from_slice(value),
        pg_sys::INT2OID
        | pg_sys::INT4OID
        | pg_sys::INT8OID
        | pg_sys::OIDOID
        | pg_sys::FLOAT4OID
        | pg_sys::FLOAT8OID
        | pg_sys::NUMERICOID
            if value.last().is_some_and(u8::is_ascii_digit) =>
        {
            json.extend_from_slice(value);
        }
        _ => push_string(value, json),
    }
}

fn push_string(text: &[u8], json: &mut Vec<u8>) {
    json.push(b'"');
    for byte in text {
        match byte {
            b'"' | b'\\' => json.extend_from_slice(&[b'\\', *byte]),
            0..=0x1f => json.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => json.push(*byte),
        }
    }
    json.push(b'"');
}
