//! How a refusal reaches the user: built as a value anywhere, raised at the edge only.
//!
//! Every refusal has an SQLSTATE from Postgres' list, a message in Postgres' style, and a hint that says what to do.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode};

use crate::pg::encoding::message;

/// A reason why something is not done, ready to be shown to the user.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    pub code: PgSqlErrorCode,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

impl Refusal {
    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), detail: None, hint: None }
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

    /// Reports the refusal at `level`; returns only for levels below ERROR.
    pub fn report(self, level: PgLogLevel) {
        let mut report = ErrorReport::new(self.code, message(self.message), "pg_shardmap");
        if let Some(detail) = self.detail {
            report = report.set_detail(message(detail));
        }
        if let Some(hint) = self.hint {
            report = report.set_hint(message(hint));
        }
        report.report(level);
    }

    /// Raises the refusal as an ERROR.
    pub fn raise(self) -> ! {
        self.report(PgLogLevel::ERROR);
        unreachable!("a report at ERROR does not return")
    }
}

/// Postgres' error code for a five-character SQLSTATE.
pub fn sqlstate(code: &str) -> PgSqlErrorCode {
    let packed = code
        .bytes()
        .enumerate()
        .fold(0, |packed, (at, c)| packed | (i32::from(c.wrapping_sub(b'0') & 0x3f) << (6 * at)));
    PgSqlErrorCode::from(packed)
}
