//! Errors of shards, with every field that Postgres has, and the edge at which they are raised.
//!
//! pgrx's own error report has no context, no constraint name, and only the SQLSTATEs of a closed list; a shard may send
//! any. So a failure is a value until it reaches [`guard`], which stands in the place of `#[pg_guard]` and raises it
//! when no Rust value is left to drop. What always holds: the SQLSTATE that a shard sent is the one that the client sees,
//! and the context names the shard.

use std::ffi::{c_char, c_int};
use std::ptr;

use pgrx::pg_sys;
use pgrx::pg_sys::panic::pgrx_extern_c_guard;
use pgrx::{PgLogLevel, PgSqlErrorCode};

use super::libpq::Notice;
use crate::pg::encoding;
use crate::pg::error::Refusal;

/// A SQLSTATE as Postgres packs it: six bits a character.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SqlState(pub i32);

impl SqlState {
    /// Of five characters; anything else is an internal error.
    pub fn parse(code: &str) -> Self {
        if code.len() != 5 {
            return Self::from(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR);
        }
        let pack = |packed, (at, c): (usize, u8)| packed | (i32::from(c.wrapping_sub(b'0') & 0x3f) << (6 * at));
        Self(code.bytes().enumerate().fold(0, pack))
    }

    pub fn text(self) -> String {
        (0..5).map(|at| char::from(((self.0 >> (6 * at)) & 0x3f) as u8 + b'0')).collect()
    }
}

impl From<PgSqlErrorCode> for SqlState {
    fn from(code: PgSqlErrorCode) -> Self {
        Self(code as i32)
    }
}

/// The fields of an error report that name an object of the database.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects {
    pub schema: Option<String>,
    pub table: Option<String>,
    pub column: Option<String>,
    pub data_type: Option<String>,
    pub constraint: Option<String>,
}

/// Why something on a shard did not work.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub code: SqlState,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
    /// Where in the shard's own code, if it said so, and which shard.
    pub context: Option<String>,
    pub objects: Box<Objects>,
}

pub type Result<T> = std::result::Result<T, Failure>;

/// A shard, or a replica of one, as messages name it.
pub fn place(server: &str, replica_of: Option<&str>) -> String {
    match replica_of {
        Some(shard) => format!("replica \"{server}\" of shard \"{shard}\""),
        None => format!("shard \"{server}\""),
    }
}

impl Failure {
    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Refusal::new(code, message).into()
    }

    /// The connection to `place`, as [`place`] names it, was lost while a statement was under way that commits by itself.
    pub fn outcome_unknown(place: &str) -> Self {
        let message = format!("connection to {place} was lost before the statement's outcome was known");
        Self::new(PgSqlErrorCode::ERRCODE_TRANSACTION_RESOLUTION_UNKNOWN, message)
            .hint("The statement may have taken effect. Look at the shard before repeating it.")
    }

    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the line that names the shard.
    #[must_use]
    pub fn at_shard(self, shard: &str) -> Self {
        self.at(&place(shard, None))
    }

    /// As [`Failure::at_shard`], for what [`place`] has named.
    #[must_use]
    pub fn at(mut self, place: &str) -> Self {
        self.context = Some(match self.context {
            Some(context) => format!("{context}\n{place}"),
            None => place.to_owned(),
        });
        self
    }

    /// The error that a server has sent, by its fields' letters in the protocol.
    pub fn from_fields(place: &str, field: impl Fn(u8) -> Option<String>) -> Self {
        Self {
            code: SqlState::parse(&field(b'C').unwrap_or_default()),
            message: field(b'M').unwrap_or_else(|| "the shard reported an error without a message".to_owned()),
            detail: field(b'D'),
            hint: field(b'H'),
            context: field(b'W'),
            objects: Box::new(Objects {
                schema: field(b's'),
                table: field(b't'),
                column: field(b'c'),
                data_type: field(b'd'),
                constraint: field(b'n'),
            }),
        }
        .at(place)
    }

    /// In one text, for a result that lists errors: message, SQLSTATE, and detail and hint on lines of their own.
    pub fn to_text(&self) -> String {
        let mut text = format!("{} (SQLSTATE {})", self.message, self.code.text());
        for (label, part) in [("DETAIL", &self.detail), ("HINT", &self.hint)] {
            if let Some(part) = part {
                text.push_str(&format!("\n{label}:  {part}"));
            }
        }
        text
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let Refusal { code, message, detail, hint } = refusal;
        Self { code: code.into(), message, detail, hint, context: None, objects: Box::default() }
    }
}

/// Loses what a refusal cannot hold. Where the client is to see the error as the shard sent it, use [`guard`].
impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let Failure { code, message, detail, hint, context, .. } = failure;
        let detail = match (detail, context) {
            (Some(detail), Some(context)) => Some(format!("{detail}\n{context}")),
            (detail, context) => detail.or(context),
        };
        Self { code: PgSqlErrorCode::from(code.0), message, detail, hint }
    }
}

/// A failure as C strings in Postgres' memory: nothing in it needs dropping.
#[derive(Clone, Copy)]
struct Report {
    code: c_int,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
    context: *const c_char,
    objects: [(c_int, *const c_char); 5],
}

/// A copy in the current memory context; null for `None`.
fn c_text(text: Option<String>) -> *const c_char {
    text.map_or(ptr::null(), |mut text| {
        text.retain(|c| c != '\0');
        let text = encoding::server_string(&encoding::message(text));
        // SAFETY: pstrdup copies a NUL-terminated string.
        unsafe { pg_sys::pstrdup(text.as_ptr()) }
    })
}

impl From<Failure> for Report {
    fn from(failure: Failure) -> Self {
        let Failure { code, message, detail, hint, context, objects } = failure;
        let Objects { schema, table, column, data_type, constraint } = *objects;
        Self {
            code: code.0,
            message: c_text(Some(message)),
            detail: c_text(detail),
            hint: c_text(hint),
            context: c_text(context),
            // Source: postgres_ext.h, PG_DIAG_SCHEMA_NAME and the following.
            objects: [
                (c_int::from(b's'), c_text(schema)),
                (c_int::from(b't'), c_text(table)),
                (c_int::from(b'c'), c_text(column)),
                (c_int::from(b'd'), c_text(data_type)),
                (c_int::from(b'n'), c_text(constraint)),
            ],
        }
    }
}

// Source: utils/elog.h. pgrx leaves these out of its bindings on purpose; they are called only in `ereport`.
unsafe extern "C-unwind" {
    fn errstart(elevel: c_int, domain: *const c_char) -> bool;
    fn errcode(sqlerrcode: c_int) -> c_int;
    fn errmsg_internal(fmt: *const c_char, ...) -> c_int;
    fn errdetail_internal(fmt: *const c_char, ...) -> c_int;
    fn errhint(fmt: *const c_char, ...) -> c_int;
    fn errcontext_msg(fmt: *const c_char, ...) -> c_int;
    fn err_generic_string(field: c_int, text: *const c_char) -> c_int;
    fn errfinish(file: *const c_char, line: c_int, function: *const c_char);
}

/// # Safety
/// The strings of `report` are null or NUL-terminated. At ERROR this does not return but jumps: no value with a
/// destructor may live in the frames up to Postgres' handler.
unsafe fn ereport(level: PgLogLevel, report: &Report) {
    let format = c"%s".as_ptr();
    if !errstart(level as c_int, ptr::null()) {
        return;
    }
    errcode(report.code);
    errmsg_internal(format, report.message);
    if !report.detail.is_null() {
        errdetail_internal(format, report.detail);
    }
    if !report.hint.is_null() {
        errhint(format, report.hint);
    }
    if !report.context.is_null() {
        errcontext_msg(format, report.context);
    }
    for (field, text) in report.objects {
        if !text.is_null() {
            err_generic_string(field, text);
        }
    }
    errfinish(c"pg_shardmap".as_ptr(), 0, c"ereport".as_ptr());
}

/// Runs the body of a function that Postgres calls, in place of `#[pg_guard]`: raises its failure with all fields, and
/// turns panics and errors of Postgres inside it into errors as pgrx does.
///
/// # Safety
/// Called as the only statement of an `extern "C-unwind"` function whose parameters need no dropping.
pub unsafe fn guard<T: Copy>(body: impl FnOnce() -> Result<T>) -> T {
    let outcome = pgrx_extern_c_guard(|| body().map_err(Report::from));
    match outcome {
        Ok(value) => value,
        Err(report) => {
            ereport(PgLogLevel::ERROR, &report);
            unreachable!("a report at ERROR does not return")
        }
    }
}

/// Raises the failure at a point where Postgres might raise an error of its own, such as a cancel.
pub fn raise(failure: Failure) -> ! {
    let report = Report::from(failure);
    // SAFETY: the boundary turns the jump into a panic; the closure owns nothing.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| ereport(PgLogLevel::ERROR, &report)) };
    unreachable!("a report at ERROR does not return")
}

/// Warns the client. Raises no error.
pub fn warn(failure: Failure) {
    let told = std::panic::catch_unwind(|| {
        let report = Report::from(failure);
        // SAFETY: below ERROR; should Postgres raise one nevertheless, the boundary turns it into a panic, caught here.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| ereport(PgLogLevel::WARNING, &report)) }
    });
    drop(told);
}

/// Passes a server's notices on to the client.
pub fn pass_on(place: &str, notices: Vec<Notice>) {
    for notice in notices {
        let level = match notice.severity.as_str() {
            "WARNING" => PgLogLevel::WARNING,
            "INFO" => PgLogLevel::INFO,
            _ => PgLogLevel::NOTICE,
        };
        let code = match level {
            PgLogLevel::WARNING => PgSqlErrorCode::ERRCODE_WARNING,
            _ => PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        };
        let mut failure = Failure::new(code, notice.message).at(place);
        (failure.detail, failure.hint) = (notice.detail, notice.hint);
        let report = Report::from(failure);
        // SAFETY: below ERROR; should Postgres raise one nevertheless, the boundary turns it into a panic, and the
        // closure owns nothing.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| ereport(level, &report)) }
    }
}
