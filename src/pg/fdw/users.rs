//! One user a shard, once a transaction has written there.
//!
//! postgres_fdw keeps a connection for each user mapping: a table's owner and the caller of a view come to one shard by
//! two connections, and what one has written the other does not see before the commit. Refuses that, for the answer
//! would be wrong in silence. (Reads alone may mix users freely.)

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::one_map;
use super::scan::server_name;
use crate::pg::error::Refusal;
use crate::pg::savepoint;

/// Who has written on a server, and the depth of subtransactions at which he did so first.
struct Writer {
    user: pg_sys::Oid,
    depth: i32,
}

thread_local! {
    /// Who has written on a server in this transaction.
    static WRITERS: RefCell<HashMap<pg_sys::Oid, Writer>> = RefCell::new(HashMap::new());
}

/// Admits `user` to `server`, to read or to write.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn admit(server: pg_sys::Oid, user: pg_sys::Oid, writes: bool) {
    one_map::admit(server);
    let writer = WRITERS.with_borrow(|writers| writers.get(&server).map(|writer| writer.user));
    match writer {
        Some(writer) if writer != user => refusal(server, writer, user).raise(),
        None if writes => {
            let writer = Writer { user, depth: savepoint::depth() };
            WRITERS.with_borrow_mut(|writers| writers.insert(server, writer));
        }
        _ => {}
    }
}

/// Who has written on `server` in this transaction.
pub fn writer(server: pg_sys::Oid) -> Option<pg_sys::Oid> {
    WRITERS.with_borrow(|writers| writers.get(&server).map(|writer| writer.user))
}

unsafe fn refusal(server: pg_sys::Oid, writer: pg_sys::Oid, user: pg_sys::Oid) -> Refusal {
    let name = |oid| {
        let name = pg_sys::GetUserNameFromId(oid, true);
        match name.is_null() {
            true => format!("{oid}"),
            false => crate::pg::encoding::utf8_string(name),
        }
    };
    Refusal::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!(
            "cannot use shard \"{}\" as user \"{}\" in a transaction that wrote there as \"{}\"",
            server_name(server).unwrap_or_default(),
            name(user),
            name(writer)
        ),
    )
    .detail("Each has a connection of his own to the shard, and would not see what the other has written.")
    .hint("Commit first, or use the table and its views as one user (security_invoker views run as the caller).")
}

/// The user as whom a scan asks its shard.
///
/// # Safety
/// `plan` must be `node`'s.
#[cfg(not(feature = "pg15"))]
pub unsafe fn of_scan(_node: *mut pg_sys::ForeignScanState, plan: *const pg_sys::ForeignScan) -> pg_sys::Oid {
    or_current((*plan).checkAsUser)
}

/// The user as whom a scan asks its shard.
///
/// # Safety
/// `plan` must be `node`'s.
#[cfg(feature = "pg15")]
pub unsafe fn of_scan(node: *mut pg_sys::ForeignScanState, plan: *const pg_sys::ForeignScan) -> pg_sys::Oid {
    let rti = match (*plan).scan.scanrelid {
        0 => pg_sys::bms_next_member((*plan).fs_relids, -1) as u32,
        rti => rti,
    };
    of_entry((*node).ss.ps.state, rti)
}

/// The user as whom rows of `result` are written.
///
/// # Safety
/// `result` must be a result relation of `estate`'s statement.
#[cfg(not(feature = "pg15"))]
pub unsafe fn of_result(result: *mut pg_sys::ResultRelInfo, estate: *mut pg_sys::EState) -> pg_sys::Oid {
    or_current(pg_sys::ExecGetResultRelCheckAsUser(result, estate))
}

/// The user as whom rows of `result` are written.
///
/// # Safety
/// `result` must be a result relation of `estate`'s statement.
#[cfg(feature = "pg15")]
pub unsafe fn of_result(result: *mut pg_sys::ResultRelInfo, estate: *mut pg_sys::EState) -> pg_sys::Oid {
    match ((*result).ri_RangeTableIndex, (*result).ri_RootResultRelInfo) {
        (0, root) if !root.is_null() => of_entry(estate, (*root).ri_RangeTableIndex),
        (rti, _) => of_entry(estate, rti),
    }
}

#[cfg(feature = "pg15")]
unsafe fn of_entry(estate: *mut pg_sys::EState, rti: u32) -> pg_sys::Oid {
    let entry =
        crate::pg::query::tree::nth::<pg_sys::RangeTblEntry>((*estate).es_range_table, (rti as usize).wrapping_sub(1));
    or_current(entry.map_or(pg_sys::InvalidOid, |entry| (*entry).checkAsUser))
}

unsafe fn or_current(user: pg_sys::Oid) -> pg_sys::Oid {
    match user {
        pg_sys::InvalidOid => pg_sys::GetUserId(),
        user => user,
    }
}

/// Forgets who wrote only in a savepoint that is rolled back.
pub fn at_savepoint_end(end: savepoint::End) {
    WRITERS.with_borrow_mut(|writers| writers.retain(|_, writer| end.keeps(&mut writer.depth)));
}

/// Forgets the writers, at the end of a transaction.
pub fn forget() {
    WRITERS.with_borrow_mut(HashMap::clear);
}
