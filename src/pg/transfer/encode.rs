//! Values of ours, written as a statement's parameters.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Datum};
use pgrx::FromDatum;

use super::settings::Settings;
use super::Form;
use crate::pg::remote::wire::encode::Values;

/// How the values of a parameter are written.
pub struct Parameter {
    form: Form,
    /// The type's output or send function, for the forms that need it.
    function: pg_sys::FmgrInfo,
    settings: Settings,
}

impl Parameter {
    /// # Safety
    /// The parameter must not outlive the current memory context.
    pub unsafe fn new(kind: pg_sys::Oid) -> Self {
        Self::with_form(kind, Form::of(kind, -1))
    }

    /// One whose values are written as text, whatever their type.
    ///
    /// # Safety
    /// As [`Parameter::new`].
    pub unsafe fn text(kind: pg_sys::Oid) -> Self {
        let form = Form::of(kind, -1);
        Self::with_form(kind, if form == Form::Text { form } else { Form::Other })
    }

    unsafe fn with_form(kind: pg_sys::Oid, form: Form) -> Self {
        let (mut function, mut is_varlena) = (pg_sys::InvalidOid, false);
        let mut info = std::mem::zeroed::<pg_sys::FmgrInfo>();
        match form {
            Form::Binary => pg_sys::getTypeBinaryOutputInfo(kind, &mut function, &mut is_varlena),
            Form::Other => pg_sys::getTypeOutputInfo(kind, &mut function, &mut is_varlena),
            _ => {}
        }
        if function != pg_sys::InvalidOid {
            pg_sys::fmgr_info(function, &mut info);
        }
        let settings = if form == Form::Other { Settings::of(kind) } else { Settings::default() };
        Self { form, function: info, settings }
    }

    /// The settings of the session that the text of its values depends on.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Whether its values may be part of a COPY in binary format.
    pub fn is_binary(&self) -> bool {
        self.form != Form::Other
    }

    /// Whether a value leaves memory behind.
    pub fn allocates(&self) -> bool {
        matches!(self.form, Form::Binary | Form::Other)
    }

    /// Adds a value; `None` is NULL.
    ///
    /// # Safety
    /// The datum must be of the parameter's type; the context in which the parameter was made must be alive.
    pub unsafe fn push(&mut self, value: Option<Datum>, params: &mut impl Values) {
        let Some(datum) = value else {
            return match self.form.format() {
                1 => params.push_binary(None),
                _ => params.push_text(None),
            };
        };
        match self.form {
            Form::Bool => params.push_binary(Some(&[u8::from(datum.value() as u8 != 0)])),
            Form::Int2 => params.push_binary(Some(&(datum.value() as i16).to_be_bytes())),
            Form::Int4 => params.push_binary(Some(&(datum.value() as i32).to_be_bytes())),
            Form::Int8 => params.push_binary(Some(&(datum.value() as i64).to_be_bytes())),
            Form::Float4 => {
                params.push_binary(f32::from_datum(datum, false).map(f32::to_be_bytes).as_ref().map(|b| &b[..]))
            }
            Form::Float8 => {
                params.push_binary(f64::from_datum(datum, false).map(f64::to_be_bytes).as_ref().map(|b| &b[..]))
            }
            Form::Uuid => params.push_binary(Some(std::slice::from_raw_parts(datum.cast_mut_ptr::<u8>(), 16))),
            Form::Bytea => with_bytes(datum, |bytes| params.push_binary(Some(bytes))),
            Form::Text => with_bytes(datum, |bytes| params.push_text(Some(bytes))),
            Form::Binary => {
                let bytes = pg_sys::SendFunctionCall(&mut self.function, datum);
                params.push_binary(Some(contents(bytes)));
            }
            Form::Other => {
                let text = pg_sys::OutputFunctionCall(&mut self.function, datum);
                params.push_text(Some(CStr::from_ptr(text).to_bytes()));
            }
        }
    }
}

/// # Safety
/// `datum` must be a varlena.
unsafe fn with_bytes(datum: Datum, use_them: impl FnOnce(&[u8])) {
    let plain = pg_sys::pg_detoast_datum_packed(datum.cast_mut_ptr());
    use_them(contents(plain));
    if plain.cast::<u8>() != datum.cast_mut_ptr::<u8>() {
        pg_sys::pfree(plain.cast());
    }
}

unsafe fn contents<'a>(plain: *const pg_sys::varlena) -> &'a [u8] {
    std::slice::from_raw_parts(pgrx::vardata_any(plain).cast(), pgrx::varsize_any_exhdr(plain))
}
