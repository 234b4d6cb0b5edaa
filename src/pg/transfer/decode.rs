//! A shard's values, made into Datums.

use pgrx::pg_sys::{self, Datum};
use pgrx::{IntoDatum, PgSqlErrorCode};

use super::Form;
use crate::pg::remote::failure::{Failure, Result};
use crate::pg::remote::wire::decode::values;

/// How the values of a column are read.
pub struct Column {
    kind: pg_sys::Oid,
    typmod: i32,
    form: Form,
    /// The type's input or receive function, for the forms that need it.
    function: pg_sys::FmgrInfo,
    ioparam: pg_sys::Oid,
}

impl Column {
    /// # Safety
    /// The column must not outlive the current memory context.
    pub unsafe fn new(kind: pg_sys::Oid, typmod: i32) -> Self {
        let form = Form::of(kind, typmod);
        let (mut function, mut ioparam) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
        let mut info = std::mem::zeroed::<pg_sys::FmgrInfo>();
        match form {
            Form::Binary => pg_sys::getTypeBinaryInputInfo(kind, &mut function, &mut ioparam),
            Form::Other => pg_sys::getTypeInputInfo(kind, &mut function, &mut ioparam),
            _ => {}
        }
        if function != pg_sys::InvalidOid {
            pg_sys::fmgr_info(function, &mut info);
        }
        Self { kind, typmod, form, function: info, ioparam }
    }

    pub fn format(&self) -> i16 {
        self.form.format()
    }

    /// Whether the text of its values depends on the session's settings.
    pub fn depends_on_settings(&self) -> bool {
        self.form == Form::Other
    }

    /// The type that the shard must have for this column; 0: any.
    pub fn wanted(&self) -> pg_sys::Oid {
        match self.format() {
            1 => self.kind,
            _ => pg_sys::InvalidOid,
        }
    }

    /// The value in the current memory context; `None` is NULL. Raises the type's own error if it is malformed.
    ///
    /// # Safety
    /// The context in which the column was made must be alive.
    pub unsafe fn datum(&mut self, value: Option<&[u8]>) -> Result<Option<Datum>> {
        let Some(bytes) = value else {
            // A domain may forbid NULL, which its input function checks.
            if self.form == Form::Other {
                let function = std::ptr::addr_of_mut!(self.function);
                pg_sys::InputFunctionCall(function, std::ptr::null_mut(), self.ioparam, self.typmod);
            }
            return Ok(None);
        };
        let wrong = || malformed(self.kind);
        let datum = match self.form {
            Form::Bool => (*bytes.first().ok_or_else(wrong)? != 0).into_datum(),
            Form::Int2 => i16::from_be_bytes(bytes.try_into().map_err(|_| wrong())?).into_datum(),
            Form::Int4 => i32::from_be_bytes(bytes.try_into().map_err(|_| wrong())?).into_datum(),
            Form::Int8 => i64::from_be_bytes(bytes.try_into().map_err(|_| wrong())?).into_datum(),
            Form::Float4 => f32::from_be_bytes(bytes.try_into().map_err(|_| wrong())?).into_datum(),
            Form::Float8 => f64::from_be_bytes(bytes.try_into().map_err(|_| wrong())?).into_datum(),
            Form::Uuid => {
                let bytes: [u8; 16] = bytes.try_into().map_err(|_| wrong())?;
                let place = pg_sys::palloc(16).cast::<[u8; 16]>();
                place.write(bytes);
                Some(Datum::from(place))
            }
            Form::Bytea | Form::Text => {
                Some(Datum::from(pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), bytes.len() as i32)))
            }
            Form::Binary => {
                let mut copy = zero_terminated(bytes);
                let mut message = pg_sys::StringInfoData {
                    data: copy.as_mut_ptr().cast(),
                    len: bytes.len() as i32,
                    maxlen: copy.len() as i32,
                    cursor: 0,
                };
                Some(pg_sys::ReceiveFunctionCall(&mut self.function, &mut message, self.ioparam, self.typmod))
            }
            Form::Other => {
                let mut copy = zero_terminated(bytes);
                let text = copy.as_mut_ptr().cast();
                Some(pg_sys::InputFunctionCall(&mut self.function, text, self.ioparam, self.typmod))
            }
        };
        Ok(datum)
    }
}

fn zero_terminated(bytes: &[u8]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes.len() + 1);
    copy.extend_from_slice(bytes);
    copy.push(0);
    copy
}

fn malformed(kind: pg_sys::Oid) -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_INVALID_BINARY_REPRESENTATION,
        format!("shard sent a value of another length than type {} has", kind.to_u32()),
    )
    .hint("Compare the column's type on the shard with the one here.")
}

/// Reads a row into `values` and `nulls`: the value at each position of `places`, counted from 0.
///
/// # Errors
/// 42P10 if the shard sends another number of values.
///
/// # Safety
/// `data` and `nulls` must have room for every place; see [`Column::datum`].
pub unsafe fn fill(
    row: &[u8],
    columns: &mut [Column],
    places: &[usize],
    data: *mut Datum,
    nulls: *mut bool,
) -> Result<()> {
    let mut row = values(row);
    for (column, place) in columns.iter_mut().zip(places) {
        let value = row.next().ok_or_else(mismatch)?;
        let datum = column.datum(value)?;
        *nulls.add(*place) = datum.is_none();
        *data.add(*place) = datum.unwrap_or(Datum::from(0));
    }
    // A statement that wants no columns asks for one NULL.
    match row.next().is_some() && !places.is_empty() {
        true => Err(mismatch()),
        false => Ok(()),
    }
}

fn mismatch() -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_INVALID_COLUMN_REFERENCE,
        "shard's result has another number of columns than was asked for",
    )
    .hint("Compare the table on the shard with the one here.")
}
