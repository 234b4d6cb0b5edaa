//! Which servers are watched, and what is expected of them: the catalog, as the sampler needs it.
//!
//! What always holds: it is read anew after any change of replicas, shards, objectives, foreign servers or user mappings; the callbacks
//! only set a flag.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::lag::objective::Objective;

use super::registry;
use crate::pg::catalog::scan;
use crate::pg::remote::line;
use crate::pg::remote::target::Target;

const OBJECTIVES: &str = "SELECT o.replica, pg_catalog.extract('epoch', o.threshold)::pg_catalog.float8, o.target, \
    pg_catalog.extract('epoch', o.calm)::pg_catalog.float8 FROM shardmap.lag_objective o";

thread_local! {
    static STALE: Cell<bool> = const { Cell::new(true) };
    static REPLICAS: Cell<pg_sys::Oid> = const { Cell::new(pg_sys::InvalidOid) };
}

/// A server that is watched.
pub struct Server {
    pub name: String,
    pub oid: pg_sys::Oid,
    /// How it is reached, by one user or another.
    pub targets: Vec<Rc<Target>>,
}

/// A replica that is watched.
pub struct Replica {
    pub server: Server,
    pub drained: bool,
    pub objective: Option<Objective>,
}

/// A shard and its replicas.
pub struct Shard {
    pub primary: Server,
    pub replicas: Vec<Replica>,
}

/// Whether something has changed since [`read`]. Takes in what other sessions have committed; in a transaction.
pub fn is_stale() -> bool {
    // SAFETY: in a transaction.
    unsafe { pg_sys::AcceptInvalidationMessages() };
    STALE.get()
}

/// Lets the roster be read again.
pub fn forget() {
    STALE.set(true);
}

/// Every shard, if any has replicas. In a transaction with a snapshot.
pub fn read() -> Vec<Shard> {
    STALE.set(false);
    let Some((replica_table, shard_table)) = registry::table(c"replica").zip(registry::table(c"shard")) else {
        return Vec::new();
    };
    REPLICAS.set(replica_table);
    let replicas = registry::all();
    if replicas.is_empty() {
        return Vec::new();
    }
    let users = mappings();
    let objectives = objectives();
    let mut names = Vec::new();
    scan::rows(shard_table, |row| names.extend(row.text("name")));
    names.sort();
    let shard = |name: String| {
        let own = |replica: &&registry::Replica| replica.shard == name;
        let replicas = replicas.iter().filter(own).filter_map(|replica| {
            Some(Replica {
                server: server(&replica.name, Some(&name), &users)?,
                drained: replica.drained,
                objective: objectives.iter().find(|(of, _)| *of == replica.name).map(|(_, objective)| *objective),
            })
        });
        Some(Shard { replicas: replicas.collect(), primary: server(&name, None, &users)? })
    };
    names.into_iter().filter_map(shard).collect()
}

fn oid(name: &str) -> Option<pg_sys::Oid> {
    let name = crate::pg::encoding::server_string(name);
    // SAFETY: a system cache look-up.
    let oid = unsafe { pg_sys::get_foreign_server_oid(name.as_ptr(), true) };
    (oid != pg_sys::InvalidOid).then_some(oid)
}

/// `shard`: whose mappings serve too.
fn server(name: &str, shard: Option<&str>, users: &[(pg_sys::Oid, pg_sys::Oid)]) -> Option<Server> {
    let oid = oid(name)?;
    let shard = shard.and_then(self::oid);
    let users: Vec<_> =
        users.iter().filter(|(of, _)| *of == oid || Some(*of) == shard).map(|(_, user)| *user).collect();
    Some(Server { name: name.to_owned(), oid, targets: line::targets(name, &users) })
}

/// Servers and their mapped users; `InvalidOid` is PUBLIC.
fn mappings() -> Vec<(pg_sys::Oid, pg_sys::Oid)> {
    let mut mappings = Vec::new();
    scan::rows(pg_sys::UserMappingRelationId, |row| mappings.extend(row.oid("umserver").zip(row.oid("umuser"))));
    mappings
}

fn objectives() -> Vec<(String, Objective)> {
    if registry::table(c"lag_objective").is_none() {
        return Vec::new();
    }
    let seconds = |value: Option<f64>| Duration::try_from_secs_f64(value.unwrap_or(0.0)).unwrap_or(Duration::MAX);
    let read = Spi::connect(|client| -> spi::Result<Vec<_>> {
        let mut objectives = Vec::new();
        for row in client.select(OBJECTIVES, None, &[])? {
            let (threshold, target, calm) = (row.get(2)?, row.get::<f64>(3)?, row.get(4)?);
            let objective =
                Objective { threshold: seconds(threshold), target: target.unwrap_or(0.99), calm: seconds(calm) };
            objectives.extend(row.get::<String>(1)?.map(|replica| (replica, objective)));
        }
        Ok(objectives)
    });
    read.unwrap_or_else(|error| error!("could not read shardmap.lag_objective: {error}"))
}

/// Registers the callbacks. Once, in the sampler.
pub fn watch() {
    let caches = [pg_sys::SysCacheIdentifier::FOREIGNSERVEROID, pg_sys::SysCacheIdentifier::USERMAPPINGOID];
    // SAFETY: static functions of the declared types.
    unsafe {
        for cache in caches {
            pg_sys::CacheRegisterSyscacheCallback(cache as i32, Some(on_cache), pg_sys::Datum::from(0));
        }
        pg_sys::CacheRegisterRelcacheCallback(Some(on_relation), pg_sys::Datum::from(0));
    }
}

unsafe extern "C-unwind" fn on_cache(_: pg_sys::Datum, _: i32, _: u32) {
    STALE.set(true);
}

unsafe extern "C-unwind" fn on_relation(_: pg_sys::Datum, relation: pg_sys::Oid) {
    if relation == pg_sys::InvalidOid || relation == REPLICAS.get() {
        STALE.set(true);
    }
}
