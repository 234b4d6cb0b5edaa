//! The shard map in this backend's memory: loaded when first needed, immutable, replaced as a whole.
//!
//! What always holds: a [`Catalog`] in hand never changes (hold the `Rc` while a statement is planned); one obtained
//! from [`current`] reflects every change whose transaction had committed when the statement took its locks. Each
//! change to the map sends a relcache message for the keyspace table and for every logical table concerned
//! (`invalidate`); the callback only sets a flag, and the next [`current`] loads anew.
//!
//! Read next: [`load`] for what is read from where, [`owner`] for whose a key is, `functions::publish` for who publishes changes.

mod load;
mod mirror;
mod owner;
mod reference;
pub mod scan;
mod shippable;

pub use owner::{keyspace, no_extension};
pub use shippable::{domain_base, Known};

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::ids::ShardNumber;
use shardmap_core::map::KeyspaceMap;
use shardmap_core::reads::choice::Floor;

use crate::pg::keys::KeyType;

/// Everything the extension knows about this database.
#[derive(Default)]
pub struct Catalog {
    /// By name. A keyspace without shards is in it too.
    pub keyspaces: HashMap<String, Rc<Keyspace>>,
    /// Logical tables by their OID.
    pub tables: HashMap<pg_sys::Oid, Rc<LogicalTable>>,
    /// Reference tables by their OID.
    pub references: HashMap<pg_sys::Oid, Rc<ReferenceTable>>,
    /// Partitions (foreign tables) by their OID.
    pub partitions: HashMap<pg_sys::Oid, Partition>,
    /// The shard behind a foreign server, by the server's OID.
    pub servers: HashMap<pg_sys::Oid, (Rc<Keyspace>, ShardNumber)>,
    /// What a partition hash function hashes, by the function's OID.
    pub hashes: HashMap<pg_sys::Oid, (Rc<Keyspace>, KeyType)>,
    /// What the replicas of a shard must have replayed before they answer, by the shard's foreign server.
    pub floors: HashMap<pg_sys::Oid, Floor>,
    shippable: shippable::Shippable,
}

/// A keyspace: its map, and its name for messages.
pub struct Keyspace {
    pub name: String,
    pub map: KeyspaceMap,
    /// The key whose owner was looked up last: a row's is asked for where it is routed and where it is written.
    pub last: RefCell<(Vec<u8>, Option<ShardNumber>)>,
}

/// A table that the user sees whole and the shards hold in parts.
pub struct LogicalTable {
    pub relid: pg_sys::Oid,
    /// Schema and name, quoted, for messages.
    pub name: String,
    pub key_column: String,
    pub key: pg_sys::AttrNumber,
    pub key_type: KeyType,
    pub keyspace: Rc<Keyspace>,
    /// The table's own policy for statements that name no key, if it has one.
    pub fanout_policy: Option<String>,
    /// The foreign table that stands for each shard.
    pub partitions: HashMap<ShardNumber, pg_sys::Oid>,
    /// The foreign server of each shard.
    pub servers: Rc<HashMap<ShardNumber, pg_sys::Oid>>,
    /// Some of its rows are on two shards.
    pub is_moving: bool,
    /// What [`LogicalTable::mirror`] has found.
    pub mirror: OnceCell<Mirror>,
}

/// An ordinary table of which every shard of its keyspaces has a copy.
pub struct ReferenceTable {
    pub relid: pg_sys::Oid,
    /// Schema and name, quoted, for messages.
    pub name: String,
    /// Keyspaces all of whose copies are known to be kept.
    pub keyspaces: Vec<String>,
    /// All shards with a copy, with their foreign servers, in the order in which they are written.
    pub servers: Vec<(String, pg_sys::Oid)>,
}

/// How the shards' tables compare with the logical one.
#[derive(Clone, Copy, Debug)]
pub struct Mirror {
    /// They bear its name and its columns' names, so that a statement's text means the same there.
    pub same_names: bool,
    /// Triggers on it or on a partition fire here when it is written.
    pub has_triggers: bool,
}

/// A foreign table that stands for one shard's part of a logical table.
#[derive(Clone)]
pub struct Partition {
    pub table: Rc<LogicalTable>,
    pub shard: ShardNumber,
    /// The key column in the foreign table itself.
    pub key: pg_sys::AttrNumber,
    /// Conditions on rows that are not the shard's, though it has some.
    pub hidden: Rc<[String]>,
}

impl Catalog {
    /// The logical table with OID `relid`.
    pub fn table(&self, relid: pg_sys::Oid) -> Option<&Rc<LogicalTable>> {
        self.tables.get(&relid)
    }

    /// The reference table with OID `relid`.
    pub fn reference(&self, relid: pg_sys::Oid) -> Option<&Rc<ReferenceTable>> {
        self.references.get(&relid)
    }
}

impl Keyspace {
    /// A shard's name, or its number if the map has lost it, for messages.
    pub fn shard_name(&self, number: ShardNumber) -> String {
        self.map.shards().find(|s| s.number == number).map_or_else(|| number.to_string(), |s| s.name.to_string())
    }
}

thread_local! {
    static CACHED: RefCell<Option<Rc<Catalog>>> = const { RefCell::new(None) };
    static STALE: Cell<bool> = const { Cell::new(true) };
    /// The tables whose invalidation makes the cache stale; empty while the extension is absent.
    static WATCHED: RefCell<HashSet<pg_sys::Oid>> = RefCell::default();
}

/// The map as of now, or `None` in a database without the extension.
///
/// Costs a flag's test when nothing changed. Must be called inside a transaction. Errors: whatever reading the tables
/// raises, and [`shardmap_core::error::MapError`] if the map does not hold together.
pub fn current() -> Option<Rc<Catalog>> {
    if !STALE.get() {
        if let Some(catalog) = CACHED.with_borrow(Clone::clone) {
            return Some(catalog);
        }
    }
    reload()
}

/// The partition or logical table check for hooks: like [`current`], but never loads in an aborted transaction.
#[cold]
fn reload() -> Option<Rc<Catalog>> {
    // SAFETY: reads a backend-wide state.
    if !unsafe { pg_sys::IsTransactionState() } {
        return None;
    }
    let Some(tables) = load::locate() else {
        CACHED.set(None);
        WATCHED.with_borrow_mut(HashSet::clear);
        return None;
    };
    // Watch first: a message that arrives while we read must make what we read stale again.
    WATCHED.with_borrow_mut(|watched| *watched = tables.watched().into_iter().collect());
    STALE.set(false);
    let guard = StaleUnlessDone { done: false };
    let catalog = Rc::new(load::load(&tables));
    let mut guard = guard;
    guard.done = true;
    WATCHED.with_borrow_mut(|watched| {
        watched
            .extend(catalog.tables.keys().chain(catalog.partitions.keys()).chain(catalog.references.keys()).copied());
    });
    CACHED.set(Some(Rc::clone(&catalog)));
    // SAFETY: states of this process. In a parallel query only the statement's own snapshot could be read, which may be
    // older than a change whose message has been taken in: good for this statement, not to be kept. (A worker ends with it.)
    if unsafe { pg_sys::IsInParallelMode() && pg_sys::ParallelWorkerNumber < 0 } {
        STALE.set(true);
    }
    Some(catalog)
}

/// Marks the cache stale again if loading raised an error.
struct StaleUnlessDone {
    done: bool,
}

impl Drop for StaleUnlessDone {
    fn drop(&mut self) {
        if !self.done {
            STALE.set(true);
        }
    }
}

/// Makes every session load the map anew, and plan its statements on logical tables anew, when this transaction
/// commits; this session at its next command.
pub fn invalidate() {
    let Some(tables) = load::locate() else { return };
    let logical = CACHED
        .with_borrow(|c| c.as_ref().map(|c| c.tables.keys().chain(c.references.keys()).copied().collect::<Vec<_>>()));
    let mut relids = load::distributed_tables(&tables);
    // What is planned on a shard's foreign table itself depends on the rows that are hidden there.
    // SAFETY: a system cache look-up.
    let exists = |relid: &pg_sys::Oid| unsafe { pg_sys::get_rel_relkind(*relid) != 0 };
    relids.extend(relids.clone().into_iter().filter(exists).flat_map(scan::children));
    relids.extend(logical.unwrap_or_default());
    relids.push(tables.keyspace);
    relids.sort_unstable_by_key(|oid| oid.to_u32());
    relids.dedup();
    for relid in relids {
        // SAFETY: a relation dropped in this transaction must not be looked up; the others exist.
        unsafe {
            if pg_sys::get_rel_relkind(relid) != 0 {
                pg_sys::CacheInvalidateRelcacheByRelid(relid);
            }
        }
    }
    STALE.set(true);
}

/// Called by Postgres for every relcache message; sets a flag and nothing else.
#[pg_guard]
unsafe extern "C-unwind" fn on_relcache(_arg: pg_sys::Datum, relid: pg_sys::Oid) {
    if STALE.get() {
        return;
    }
    if relid == pg_sys::InvalidOid || WATCHED.with_borrow(|watched| watched.contains(&relid)) {
        STALE.set(true);
    }
}

/// Called by Postgres when a foreign server changes, whose options are part of the catalog; plans are made anew by itself.
#[pg_guard]
unsafe extern "C-unwind" fn on_server(_arg: pg_sys::Datum, _cache: i32, _hash: u32) {
    STALE.set(true);
}

/// Registers the callbacks. Once per process.
pub fn init() {
    // SAFETY: the callbacks are static functions; Postgres keeps the pointers for the life of the process.
    unsafe {
        pg_sys::CacheRegisterRelcacheCallback(Some(on_relcache), pg_sys::Datum::from(0));
        let servers = pg_sys::SysCacheIdentifier::FOREIGNSERVEROID as i32;
        pg_sys::CacheRegisterSyscacheCallback(servers, Some(on_server), pg_sys::Datum::from(0));
    }
}
