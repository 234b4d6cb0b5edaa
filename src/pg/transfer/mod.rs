//! Values on their way between here and a shard: which form a type's values take, and how they are read and written.
//!
//! Decides text or binary. What always holds: binary only for types that every Postgres has, under the same OID and in
//! the same layout; a value means the same on both sides whatever the session's DateStyle. Text stays in the database's
//! encoding, which is that of the connection: Postgres' own receive functions would take it for the client's.

pub mod decode;
pub mod encode;
pub mod settings;

use pgrx::pg_sys;

/// How the values of a type travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Binary, taken apart here.
    Bool,
    Int2,
    /// Also date and oid.
    Int4,
    /// Also timestamps.
    Int8,
    Float4,
    Float8,
    Uuid,
    Bytea,
    /// Bytes that are the text.
    Text,
    /// Binary, by the type's own functions.
    Binary,
    /// Text, by the type's own functions.
    Other,
}

/// OIDs below this are the same in every database of every version. Source: access/transam.h, `FirstGenbkiObjectId`.
pub const FIRST_VARIABLE: u32 = 10_000;

impl Form {
    /// `typmod`: a value that a length or precision must be applied to goes through the type's functions.
    pub fn of(kind: pg_sys::Oid, typmod: i32) -> Self {
        let plain = typmod == -1;
        match kind {
            pg_sys::BOOLOID => Self::Bool,
            pg_sys::INT2OID => Self::Int2,
            pg_sys::INT4OID | pg_sys::DATEOID | pg_sys::OIDOID => Self::Int4,
            pg_sys::INT8OID => Self::Int8,
            pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID if plain => Self::Int8,
            pg_sys::FLOAT4OID => Self::Float4,
            pg_sys::FLOAT8OID => Self::Float8,
            pg_sys::UUIDOID => Self::Uuid,
            pg_sys::BYTEAOID => Self::Bytea,
            pg_sys::TEXTOID | pg_sys::JSONOID => Self::Text,
            pg_sys::VARCHAROID if plain => Self::Text,
            pg_sys::NUMERICOID
            | pg_sys::TIMESTAMPOID
            | pg_sys::TIMESTAMPTZOID
            | pg_sys::TIMEOID
            | pg_sys::TIMETZOID
            | pg_sys::INTERVALOID => Self::Binary,
            _ => Self::Other,
        }
    }

    /// The format code of the protocol: 0 text, 1 binary.
    pub fn format(self) -> i16 {
        match self {
            Self::Text | Self::Other => 0,
            _ => 1,
        }
    }
}

/// The type to declare for a parameter: that of a type of one's own may have another OID on the shard.
pub fn declared(kind: pg_sys::Oid) -> pg_sys::Oid {
    match kind.to_u32() < FIRST_VARIABLE {
        true => kind,
        false => pg_sys::InvalidOid,
    }
}
