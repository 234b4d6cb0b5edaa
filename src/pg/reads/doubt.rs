//! Commits of this session that some shard has not confirmed yet, and what that means for its tokens.
//!
//! What always holds: no token is given while a shard may still hold such a transaction prepared: its log ends before the commit
//! there, and a token would stand for less than was committed; nor does a move go on, which would not see what it has done.
//! Read next: `remote::two_phase`, which notes them.

use std::cell::RefCell;

use pgrx::pg_sys::Oid;
use pgrx::PgSqlErrorCode;

use super::{ask, servers};
use crate::pg::remote::{Connection, Failure, Result};

thread_local! {
    /// The shard, and the statement that finds the transaction among those prepared there.
    static UNCONFIRMED: RefCell<Vec<(Oid, String)>> = const { RefCell::new(Vec::new()) };
}

/// Notes that the shard has not confirmed the commit of the transaction that is prepared there under this id.
pub fn note(shard: Oid, id: &str) {
    let sql = format!("SELECT 1 FROM pg_catalog.pg_prepared_xacts p WHERE p.gid OPERATOR(pg_catalog.=) '{id}'");
    UNCONFIRMED.with_borrow_mut(|all| all.push((shard, sql)));
}

/// The session is another user's from now on.
pub fn forget() {
    UNCONFIRMED.with_borrow_mut(Vec::clear);
}

/// Asks the shards that have not confirmed, if there are any. Returns the first that has not committed yet.
///
/// # Errors
/// Those of asking.
pub fn find(user: Oid) -> Result<Option<Oid>> {
    let unconfirmed = UNCONFIRMED.with_borrow(Clone::clone);
    for (shard, sql) in unconfirmed {
        if servers::exists(shard) && is_prepared(&ask::open(shard, user, false)?, &sql)? {
            return Ok(Some(shard));
        }
        UNCONFIRMED.with_borrow_mut(|all| all.retain(|(other, text)| (*other, text) != (shard, &sql)));
    }
    Ok(None)
}

/// Refuses a token as long as there is one.
///
/// # Errors
/// 55000: one has not committed yet. Those of asking.
pub fn check(user: Oid) -> Result<()> {
    find(user)?.map_or(Ok(()), |shard| {
        let message =
            format!("a transaction of this session is not yet committed on shard \"{}\"", servers::name(shard));
        Err(Failure::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, message)
            .detail("A token given now would stand for less than was committed.")
            .hint(
                "Ask again in a moment. The view shardmap.in_doubt shows such transactions until they are committed.",
            ))
    })
}

fn is_prepared(connection: &Connection, sql: &str) -> Result<bool> {
    connection.link().send_alone(sql.as_bytes())?;
    Ok(!ask::answer(connection)?.rows.is_empty())
}
