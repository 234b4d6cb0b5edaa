//! What EXPLAIN says about the server of a read.

use pgrx::pg_sys::{self, Oid};

use super::reader::Reader;
use super::{route, servers};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::raw::explain_text;
use crate::pg::remote::Result;

/// Adds the server from which a shard is read, or would be now, and why; nothing unless replicas may be used at all.
///
/// # Safety
/// Inside EXPLAIN.
pub unsafe fn server(shard: Oid, used: Option<&Reader>, reads_only: bool, es: *mut pg_sys::ExplainState) -> Result<()> {
    if !route::is_on() {
        return Ok(());
    }
    let (name, reason) = match used {
        Some(reader) => (reader.connection.shard().to_owned(), reader.reason.to_owned()),
        None => {
            let (server, reason) = route::expected(shard, reads_only)?;
            (servers::name(server), reason)
        }
    };
    explain_text(es, c"Read From", &encoding::server(&name));
    explain_text(es, c"Read From Because", &encoding::server(&reason));
    Ok(())
}

/// As [`server`], for a caller that raises errors as Postgres does.
///
/// # Safety
/// Inside EXPLAIN.
pub unsafe fn server_or_raise(shard: Oid, used: Option<&Reader>, reads_only: bool, es: *mut pg_sys::ExplainState) {
    if let Err(failure) = server(shard, used, reads_only, es) {
        Refusal::from(failure).raise()
    }
}
