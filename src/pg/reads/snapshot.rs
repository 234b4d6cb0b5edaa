//! What the snapshot of a REPEATABLE READ transaction is known to hold of each shard that it reads by way of replicas.
//!
//! What always holds: a token that comes after the snapshot, and asks for more than that is known to have, is an error, as no server
//! can answer then; what the session itself saw before is no token. Read next: `route`.

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::pg_sys::Oid;
use pgrx::PgSqlErrorCode;
use shardmap_core::reads::position::{holds, Holds};
use shardmap_core::reads::token::Mark;

use super::route::{print, Demand};
use super::{servers, session};
use crate::pg::remote::{Failure, Result};

thread_local! {
    /// By shard: what was asked for, and where the server was known to be, when the snapshot was about to be taken.
    static HAS: RefCell<HashMap<Oid, Vec<Mark>>> = RefCell::default();
}

/// Notes what the snapshot has that is about to be taken on `server`.
pub fn note(shard: Oid, server: Oid, demand: &Demand) {
    let heard = servers::heard(server).map(|heard| Mark { system: heard.system, position: heard.position });
    let has = asked(shard, demand).into_iter().chain(heard).collect();
    HAS.with_borrow_mut(|all| all.insert(shard, has));
}

/// Makes sure that the transaction's snapshot has what the tokens stand for.
///
/// # Errors
/// 25001: it is not known to.
pub fn check(shard: Oid, demand: &Demand) -> Result<()> {
    let Some(wanted) = asked(shard, demand) else { return Ok(()) };
    let Some(has) = HAS.with_borrow(|all| all.get(&shard).cloned()) else { return Ok(()) };
    let forks = servers::forks(shard, wanted.system);
    let is_enough =
        |has: &Mark| has.system == wanted.system && holds(has.position, wanted.position, &forks) == Holds::All;
    if has.iter().any(is_enough) {
        return Ok(());
    }
    let message = format!(
        "the transaction's snapshot of shard \"{}\" is older than what the read must not miss",
        servers::name(shard)
    );
    Err(Failure::new(PgSqlErrorCode::ERRCODE_ACTIVE_SQL_TRANSACTION, message)
        .detail("The token came after the first read of a REPEATABLE READ transaction.")
        .hint("Set shardmap.read_token, or call shardmap.observe(), before the transaction's first read."))
}

/// The transaction is over.
pub fn forget() {
    HAS.with_borrow_mut(HashMap::clear);
}

/// What tokens stand for on the shard.
fn asked(shard: Oid, demand: &Demand) -> Option<Mark> {
    let token = demand.token.as_ref().and_then(|token| token.mark(print(shard)));
    let observed = if demand.session { session::observed_mark(|| print(shard)) } else { None };
    token.into_iter().chain(observed).reduce(Mark::merge)
}
