//! Reference tables, as `shardmap.reference_table` names them.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::ids::ShardNumber;

use super::load::qualified_name;
use super::{scan, Keyspace, ReferenceTable};

/// The foreign servers of each keyspace's shards.
type Servers = HashMap<String, Rc<HashMap<ShardNumber, pg_sys::Oid>>>;

/// Reads the table of them. One whose relation is gone is left out: a DROP is about to remove the row.
pub fn tables(
    relid: pg_sys::Oid,
    keyspaces: &HashMap<String, Rc<Keyspace>>,
    servers: &Servers,
) -> HashMap<pg_sys::Oid, Rc<ReferenceTable>> {
    let mut all: HashMap<pg_sys::Oid, (Vec<String>, BTreeMap<String, pg_sys::Oid>)> = HashMap::new();
    scan::rows(relid, |row| {
        let (Some(relation), Some(keyspace)) =
            (row.oid("relation"), row.text("keyspace").and_then(|name| keyspaces.get(&name)))
        else {
            return;
        };
        let (kept, copies) = all.entry(relation).or_default();
        if row.get::<bool>("complete") == Some(true) {
            kept.push(keyspace.name.clone());
        }
        for (number, server) in servers.get(&keyspace.name).into_iter().flat_map(|own| own.iter()) {
            copies.insert(keyspace.shard_name(*number), *server);
        }
    });
    let table = |(relid, (keyspaces, copies)): (pg_sys::Oid, (_, BTreeMap<_, _>))| {
        let name = qualified_name(relid)?;
        Some((relid, Rc::new(ReferenceTable { relid, name, keyspaces, servers: copies.into_iter().collect() })))
    };
    all.into_iter().filter_map(table).collect()
}
