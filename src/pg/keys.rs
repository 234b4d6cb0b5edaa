//! Key values as Postgres holds them, read into the core's terms.
//!
//! Decides which types can be keys. What always holds: equal keys, by the type's own `=`, become equal
//! [`KeyValue`]s' canonical text. Refuses types and collations for which that cannot be promised.

use std::borrow::Cow;
use std::ffi::CStr;

use pgrx::pg_sys;
use shardmap_core::key::{CanonicalBuf, KeyKind, KeyValue};

use crate::pg::encoding;

/// A type whose values can be keys: its OID (a domain's base type) and how its values read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyType {
    pub oid: pg_sys::Oid,
    pub kind: KeyKind,
}

impl KeyType {
    pub const TEXT: Self = Self { oid: pg_sys::TEXTOID, kind: KeyKind::Text };

    /// The key type behind `oid` (looking through domains), or `None` if its values cannot be keys.
    pub fn of(oid: pg_sys::Oid) -> Option<Self> {
        // SAFETY: a system cache look-up.
        let oid = unsafe { pg_sys::getBaseType(oid) };
        let kind = match oid {
            pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID => KeyKind::Integer,
            pg_sys::TEXTOID | pg_sys::VARCHAROID => KeyKind::Text,
            pg_sys::BPCHAROID => KeyKind::Bpchar,
            pg_sys::UUIDOID => KeyKind::Uuid,
            pg_sys::NUMERICOID => KeyKind::Numeric,
            pg_sys::DATEOID => KeyKind::Date,
            pg_sys::TIMESTAMPOID => KeyKind::Timestamp,
            pg_sys::TIMESTAMPTZOID => KeyKind::Timestamptz,
            pg_sys::BYTEAOID => KeyKind::Bytea,
            _ => return None,
        };
        Some(Self { oid, kind })
    }

    /// Calls `use_text` with the canonical text of `datum`, in UTF-8.
    ///
    /// # Safety
    /// `datum` must be a non-null value of this type.
    pub unsafe fn with_canonical<R>(self, datum: pg_sys::Datum, use_text: impl FnOnce(&[u8]) -> R) -> R {
        thread_local! {
            static BUF: std::cell::Cell<CanonicalBuf> = std::cell::Cell::new(CanonicalBuf::new());
        }
        let mut buf = BUF.take();
        let result = use_text(self.value(datum).as_value().canonical(&mut buf));
        BUF.set(buf);
        result
    }

    /// # Safety
    /// `datum` must be a non-null value of this type.
    unsafe fn value(self, datum: pg_sys::Datum) -> Held {
        match self.kind {
            KeyKind::Integer => Held::Plain(KeyValue::Integer(match self.oid {
                pg_sys::INT2OID => i64::from(datum.value() as i16),
                pg_sys::INT4OID => i64::from(datum.value() as i32),
                _ => datum.value() as i64,
            })),
            KeyKind::Date => Held::Plain(KeyValue::Date(datum.value() as i32)),
            KeyKind::Timestamp => Held::Plain(KeyValue::Timestamp(datum.value() as i64)),
            KeyKind::Timestamptz => Held::Plain(KeyValue::Timestamptz(datum.value() as i64)),
            KeyKind::Uuid => Held::Plain(KeyValue::Uuid(*datum.cast_mut_ptr::<[u8; 16]>())),
            KeyKind::Text | KeyKind::Bpchar | KeyKind::Bytea => {
                let bytes = Varlena::of(datum);
                let padded = self.kind == KeyKind::Bpchar;
                if self.kind != KeyKind::Bytea && !encoding::is_utf8() {
                    if let Cow::Owned(text) = encoding::utf8_bytes(bytes.bytes()) {
                        return Held::Converted(text, padded);
                    }
                }
                match self.kind {
                    KeyKind::Text => Held::Text(bytes),
                    KeyKind::Bpchar => Held::Bpchar(bytes),
                    _ => Held::Bytea(bytes),
                }
            }
            KeyKind::Numeric => {
                let out = pg_sys::OidOutputFunctionCall(pg_sys::Oid::from(NUMERIC_OUT), datum);
                let text = CStr::from_ptr(out).to_string_lossy().into_owned();
                pg_sys::pfree(out.cast());
                Held::Numeric(text)
            }
        }
    }
}

/// The canonical texts of an array's elements, `None` for a NULL; `None` as a whole if its elements cannot be keys.
///
/// # Safety
/// `array` must be a non-null value of type `array_type`.
pub unsafe fn array_elements(array_type: pg_sys::Oid, array: pg_sys::Datum) -> Option<Vec<Option<Vec<u8>>>> {
    let key_type = KeyType::of(pg_sys::get_base_element_type(array_type))?;
    let (mut length, mut by_value, mut align) = (0i16, false, 0);
    pg_sys::get_typlenbyvalalign(key_type.oid, &mut length, &mut by_value, &mut align);
    let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
    let (mut values, mut nulls, mut count) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    let length = i32::from(length);
    pg_sys::deconstruct_array(array, key_type.oid, length, by_value, align, &mut values, &mut nulls, &mut count);
    let element = |at: usize| {
        let is_null = *nulls.add(at);
        (!is_null).then(|| key_type.with_canonical(*values.add(at), <[u8]>::to_vec))
    };
    Some((0..count as usize).map(element).collect())
}

/// `value` in plain form; most values are, and cost no call into the server.
///
/// # Safety
/// `value` must be a valid variable-length value.
unsafe fn detoasted(value: *mut pg_sys::varlena) -> *mut pg_sys::varlena {
    use pgrx::varlena::{varatt_is_1b, varatt_is_1b_e, varatt_is_4b_u};
    if varatt_is_4b_u(value) || (varatt_is_1b(value) && !varatt_is_1b_e(value)) {
        return value;
    }
    pg_sys::pg_detoast_datum_packed(value)
}

/// pg_proc's OID of numeric_out, the same in every version.
const NUMERIC_OUT: u32 = 1702;

/// A value with what it borrows from.
enum Held {
    Plain(KeyValue<'static>),
    Text(Varlena),
    Bpchar(Varlena),
    Bytea(Varlena),
    /// A text that is not UTF-8 in the database, and whether it is blank-padded.
    Converted(Vec<u8>, bool),
    Numeric(String),
}

impl Held {
    fn as_value(&self) -> KeyValue<'_> {
        match self {
            Self::Plain(value) => *value,
            Self::Text(bytes) => KeyValue::Text(bytes.bytes()),
            Self::Bpchar(bytes) => KeyValue::Bpchar(bytes.bytes()),
            Self::Converted(text, false) => KeyValue::Text(text),
            Self::Converted(text, true) => KeyValue::Bpchar(text),
            Self::Bytea(bytes) => KeyValue::Bytea(bytes.bytes()),
            Self::Numeric(text) => KeyValue::Numeric(text),
        }
    }
}

/// A detoasted variable-length value, freed if the detoasting made a copy.
pub struct Varlena {
    plain: *mut pg_sys::varlena,
    owned: bool,
}

impl Varlena {
    /// # Safety
    /// `datum` must be a variable-length value that is not NULL, and outlive the result.
    pub unsafe fn of(datum: pg_sys::Datum) -> Self {
        let original = datum.cast_mut_ptr::<pg_sys::varlena>();
        let plain = detoasted(original);
        Self { plain, owned: plain != original }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `plain` is a detoasted varlena that lives as long as `self`.
        unsafe { pgrx::varlena::varlena_to_byte_slice(self.plain) }
    }
}

impl Drop for Varlena {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: the copy was palloc'd by pg_detoast_datum_packed and is not used after this.
            unsafe { pg_sys::pfree(self.plain.cast()) }
        }
    }
}
