//! One auditor: the audits that are due in its database.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::remote::resolve;
use crate::pg::resolver;
use crate::pg::worker::{self, Failure};

/// Source: miscadmin.h.
const SECURITY_RESTRICTED_OPERATION: i32 = 2;

/// Held until the session ends. False: another auditor is at work.
const LOCK: &str =
    "SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('shardmap.scheduled_audits', 0))";
const DUE: &str = "SELECT d.keyspace, d.mode, pg_catalog.clock_timestamp() FROM shardmap._due_audits() d";
const ROLE: &str = "SELECT shardmap._audit_role()";
const AUDIT: &str = "SELECT pg_catalog.count(*) FROM shardmap.audit($1, $2)";
const NOTE: &str = "SELECT shardmap._note_failed_audit($1, $2, $3, $4)";
const FORGET: &str = "SELECT shardmap._forget_old_audits($1)";

struct Due {
    keyspace: String,
    mode: String,
    seen: TimestampWithTimeZone,
}

/// The auditor of a database.
///
/// # Safety
/// Called by Postgres as a background worker, with the database's OID.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_auditor_main(database: pg_sys::Datum) {
    // SAFETY: in the order that background workers need.
    resolver::handle_signals();
    let database = pg_sys::Oid::from(database.value() as u32);
    pg_sys::BackgroundWorkerInitializeConnectionByOid(database, pg_sys::InvalidOid, 0);
    pg_sys::SetConfigOption(
        c"default_transaction_isolation".as_ptr(),
        c"read committed".as_ptr(),
        pg_sys::GucContext::PGC_SUSET,
        pg_sys::GucSource::PGC_S_OVERRIDE,
    );
    let due = in_transaction(|| match resolve::is_installed() && Spi::get_one(LOCK)?.unwrap_or(false) {
        true => find_due(),
        false => Ok(Vec::new()),
    });
    let due = due.unwrap_or_else(|error| {
        log!("pg_shardmap auditor failed: {error}");
        Vec::new()
    });
    for audit in due {
        let Err(error) = in_transaction(|| audit.make()) else { continue };
        log!("audit of keyspace \"{}\" failed: {error}", audit.keyspace);
        if let Err(error) = in_transaction(|| audit.note(&error)) {
            log!("pg_shardmap auditor failed: {error}");
        }
    }
}

fn find_due() -> spi::Result<Vec<Due>> {
    Spi::connect(|client| {
        let mut due = Vec::new();
        for row in client.select(DUE, None, &[])? {
            if let (Some(keyspace), Some(mode), Some(seen)) = (row.get(1)?, row.get(2)?, row.get(3)?) {
                due.push(Due { keyspace, mode, seen });
            }
        }
        Ok(due)
    })
}

impl Due {
    fn make(&self) -> spi::Result<()> {
        let role = Spi::get_one::<pg_sys::Oid>(ROLE)?.unwrap_or(pg_sys::InvalidOid);
        let (mut user, mut context) = (pg_sys::InvalidOid, 0);
        // SAFETY: variables of the session; an error resets them with the transaction, as nothing else does here.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
            pg_sys::SetUserIdAndSecContext(role, context | SECURITY_RESTRICTED_OPERATION);
        }
        let found = Spi::get_one_with_args::<i64>(AUDIT, &[self.keyspace.as_str().into(), self.mode.as_str().into()]);
        // SAFETY: as above.
        unsafe { pg_sys::SetUserIdAndSecContext(user, context) };
        found?;
        Spi::run_with_args(FORGET, &[self.keyspace.as_str().into()])
    }

    fn note(&self, error: &str) -> spi::Result<()> {
        let arguments = [self.keyspace.as_str().into(), self.mode.as_str().into(), self.seen.into(), error.into()];
        Spi::run_with_args(NOTE, &arguments)?;
        Spi::run_with_args(FORGET, &[self.keyspace.as_str().into()])
    }
}

/// Runs a step in a transaction of its own. `Err`: what went wrong, and it was rolled back.
fn in_transaction<T>(step: impl FnOnce() -> spi::Result<T>) -> Result<T, String> {
    // SAFETY: an activity with a static text.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, c"auditing the map".as_ptr()) };
    let outcome = worker::transaction(false, || Ok::<_, Failure>(step()?));
    worker::is_idle();
    outcome.map_err(|failure| failure.message)
}
