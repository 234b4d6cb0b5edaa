//! What is read from where: the tables of sql/schema.sql become one [`Catalog`].
//!
//! Refuses a map that does not hold together: the core validates each keyspace as a whole.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::ids::{ShardName, ShardNumber};
use shardmap_core::map::{KeyspaceMap, KeyspaceSpec, RangeOrder, RangeSpec, ShardSpec, ShardState, Strategy};
use shardmap_core::reads::choice::Floor;
use shardmap_core::reads::position::{Lsn, Position, Timeline};
use shardmap_core::reads::token::System;

use super::reference;
use super::scan::{self, Row};
use super::{Catalog, Keyspace, LogicalTable, Partition};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::keys::KeyType;

/// OIDs of the catalog tables.
pub struct Tables {
    pub keyspace: pg_sys::Oid,
    shard: pg_sys::Oid,
    pin: pg_sys::Oid,
    key_range: pg_sys::Oid,
    logical_table: pg_sys::Oid,
    reference_table: pg_sys::Oid,
    key_class: pg_sys::Oid,
    shippable_mark: pg_sys::Oid,
    hidden_rows: pg_sys::Oid,
    read_floor: pg_sys::Oid,
}

impl Tables {
    pub fn watched(&self) -> Vec<pg_sys::Oid> {
        vec![
            self.keyspace,
            self.shard,
            self.pin,
            self.key_range,
            self.logical_table,
            self.reference_table,
            self.key_class,
            self.shippable_mark,
            self.hidden_rows,
            self.read_floor,
        ]
    }
}

/// Finds the catalog tables; `None` where the extension is not installed (or is just being).
pub fn locate() -> Option<Tables> {
    // SAFETY: system cache look-ups with constant names; both cache "does not exist" too.
    let find = |schema: pg_sys::Oid, name: &CStr| unsafe {
        let oid = pg_sys::get_relname_relid(name.as_ptr(), schema);
        (oid != pg_sys::InvalidOid).then_some(oid)
    };
    // SAFETY: as above.
    let schema = unsafe { pg_sys::get_namespace_oid(c"shardmap".as_ptr(), true) };
    if schema == pg_sys::InvalidOid {
        return None;
    }
    let tables = Tables {
        keyspace: find(schema, c"keyspace")?,
        shard: find(schema, c"shard")?,
        pin: find(schema, c"pin")?,
        key_range: find(schema, c"key_range")?,
        logical_table: find(schema, c"logical_table")?,
        reference_table: find(schema, c"reference_table")?,
        key_class: find(schema, c"key_class")?,
        shippable_mark: find(schema, c"shippable_mark")?,
        hidden_rows: find(schema, c"hidden_rows")?,
        read_floor: find(schema, c"read_floor")?,
    };
    are_ours(&tables).then_some(tables)
}

/// Whether the tables are the extension's own. Names alone prove nothing: anyone may make a schema of that name.
fn are_ours(tables: &Tables) -> bool {
    // SAFETY: catalog look-ups by OIDs that have just been found.
    unsafe {
        let extension = pg_sys::get_extension_oid(c"pg_shardmap".as_ptr(), true);
        extension != pg_sys::InvalidOid
            && tables.watched().into_iter().all(|table| {
                pg_sys::get_rel_relkind(table) as u8 == pg_sys::RELKIND_RELATION
                    && pg_sys::getExtensionOfObject(pg_sys::RelationRelationId, table) == extension
            })
    }
}

/// The OIDs of the logical and reference tables, without loading anything else.
pub fn distributed_tables(tables: &Tables) -> Vec<pg_sys::Oid> {
    let mut relids = Vec::new();
    scan::rows(tables.logical_table, |row| relids.extend(row.oid("relation")));
    scan::rows(tables.reference_table, |row| relids.extend(row.oid("relation")));
    relids
}

/// Reads and validates everything.
pub fn load(tables: &Tables) -> Catalog {
    let mut catalog = Catalog { keyspaces: keyspaces(tables), ..Catalog::default() };
    scan::rows(tables.key_class, |row| {
        let (Some(function), Some(key_type), Some(keyspace)) =
            (row.text("hash_function").and_then(procedure), row.oid("key_type"), row.text("keyspace"))
        else {
            return;
        };
        if let (Some(key_type), Some(keyspace)) = (KeyType::of(key_type), catalog.keyspaces.get(&keyspace)) {
            catalog.hashes.insert(function, (Rc::clone(keyspace), key_type));
        }
    });
    let mut servers: HashMap<String, HashMap<ShardNumber, pg_sys::Oid>> = HashMap::new();
    for keyspace in catalog.keyspaces.values() {
        for shard in keyspace.map.shards() {
            let name = encoding::server_string(shard.name.as_str());
            // SAFETY: a system cache look-up.
            let server = unsafe { pg_sys::get_foreign_server_oid(name.as_ptr(), true) };
            catalog.servers.insert(server, (Rc::clone(keyspace), shard.number));
            servers.entry(keyspace.name.clone()).or_default().insert(shard.number, server);
        }
    }
    scan::rows(tables.read_floor, |row| catalog.floors.extend(floor(row)));
    for (keyspace, servers) in &servers {
        catalog.shippable.list(keyspace, servers.values().copied());
    }
    scan::rows(tables.shippable_mark, |row| {
        if let (Some(kind), Some(name), Some(types)) = (row.text("kind"), row.text("name"), row.text("argument_types"))
        {
            catalog.shippable.mark(&kind, &name, &types);
        }
    });
    let servers: HashMap<String, Rc<_>> = servers.into_iter().map(|(name, own)| (name, Rc::new(own))).collect();
    let hidden = hidden_rows(tables.hidden_rows);
    let mut found = Vec::new();
    scan::rows(tables.logical_table, |row| found.extend(logical_table(row, &catalog.keyspaces)));
    for table in found {
        let partitions = partitions(table.relid, &table.keyspace);
        let servers = servers.get(&table.keyspace.name).cloned().unwrap_or_default();
        let is_moving = hidden.keys().any(|(relid, _)| *relid == table.relid);
        let table = Rc::new(LogicalTable { partitions, servers, is_moving, ..table });
        for (shard, relid) in &table.partitions {
            let key = attribute_number(*relid, &table.key_column);
            let hidden = hidden.get(&(table.relid, table.keyspace.shard_name(*shard)));
            let hidden = hidden.map_or_else(Rc::default, |conditions| conditions.clone().into());
            catalog.partitions.insert(*relid, Partition { table: Rc::clone(&table), shard: *shard, key, hidden });
        }
        catalog.tables.insert(table.relid, table);
    }
    catalog.references = reference::tables(tables.reference_table, &catalog.keyspaces, &servers);
    catalog
}

/// The function of a signature, as `regprocedure` spells it. (A column of that type would keep pg_upgrade away.)
fn procedure(signature: String) -> Option<pg_sys::Oid> {
    // SAFETY: a built-in function that takes a text, and gives NULL if there is no such function.
    unsafe {
        pgrx::direct_function_call(pg_sys::to_regprocedure, &[encoding::server(&signature).into_owned().into_datum()])
    }
}

/// Builds one keyspace's map from the tables alone, as [`load`] does for all.
fn keyspaces(tables: &Tables) -> HashMap<String, Rc<Keyspace>> {
    let mut specs: HashMap<String, KeyspaceSpec> = HashMap::new();
    scan::rows(tables.keyspace, |row| {
        let name: String = row.text("name").unwrap_or_default();
        let strategy = match row.text("strategy").as_deref() {
            Some("modulo") => Strategy::Modulo,
            Some("range") if row.text("range_order").as_deref() == Some("integer") => {
                Strategy::Range(RangeOrder::Integer)
            }
            Some("range") => Strategy::Range(RangeOrder::Bytes),
            _ => Strategy::Ring,
        };
        let version = row.get::<i64>("version").unwrap_or(0).max(0) as u64;
        let spec = KeyspaceSpec {
            name: name.as_str().into(),
            strategy,
            version,
            shards: Vec::new(),
            pins: Vec::new(),
            ranges: Vec::new(),
            slots: row.get::<Vec<Option<i32>>>("slots").map(|slots| slots.into_iter().map(number).collect()),
        };
        specs.insert(name, spec);
    });
    scan::rows(tables.shard, |row| {
        if let Some(spec) = row.text("keyspace").and_then(|k| specs.get_mut(&k)) {
            spec.shards.push(shard(row));
        }
    });
    scan::rows(tables.pin, |row| {
        if let (Some(spec), Some(key), Some(shard)) =
            (row.text("keyspace").and_then(|k| specs.get_mut(&k)), row.text("key"), row.text("shard"))
        {
            spec.pins.push((key, ShardName::from(shard)));
        }
    });
    scan::rows(tables.key_range, |row| {
        if let Some(spec) = row.text("keyspace").and_then(|k| specs.get_mut(&k)) {
            spec.ranges.push(RangeSpec {
                lower: row.text("lower"),
                upper: row.text("upper"),
                shard: ShardName::from(row.text("shard").unwrap_or_default()),
                version: row.get::<i64>("version").unwrap_or(0).max(0) as u64,
            });
        }
    });
    specs
        .into_iter()
        .map(|(name, spec)| (name.clone(), Rc::new(Keyspace { name, map: build(spec), last: RefCell::default() })))
        .collect()
}

fn build(spec: KeyspaceSpec) -> KeyspaceMap {
    let name = spec.name.to_string();
    KeyspaceMap::build(spec).unwrap_or_else(|error| {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("shard map of keyspace \"{name}\" is not valid"),
        )
        .detail(error.to_string())
        .hint("Undo the change that led here; nothing is routed by a map that does not hold together.")
        .raise()
    })
}

/// A shard's number; the core refuses what is none.
fn number(number: Option<i32>) -> ShardNumber {
    ShardNumber(number.and_then(|number| u16::try_from(number).ok()).unwrap_or(u16::MAX))
}

fn shard(row: &Row<'_>) -> ShardSpec {
    let tokens: Vec<Option<i64>> = row.get("tokens").unwrap_or_default();
    ShardSpec {
        name: ShardName::from(row.text("name").unwrap_or_default()),
        number: number(row.get("number")),
        weight: row.get("weight").unwrap_or(1.0),
        state: match row.text("state").as_deref() {
            Some("joining") => ShardState::Joining,
            Some("draining") => ShardState::Draining,
            _ => ShardState::Active,
        },
        tokens: tokens.into_iter().flatten().filter_map(|t| u32::try_from(t).ok()).collect(),
    }
}

/// Reads one logical table; `None` if its relation or key column is gone (a DROP is about to remove the row).
fn logical_table(row: &Row<'_>, keyspaces: &HashMap<String, Rc<Keyspace>>) -> Option<LogicalTable> {
    let relid: pg_sys::Oid = row.oid("relation")?;
    let key_column: String = row.text("key_column")?;
    let keyspace = keyspaces.get(&row.text("keyspace")?)?;
    let name = qualified_name(relid)?;
    let key = attribute_number(relid, &key_column);
    if key <= 0 {
        return None;
    }
    // SAFETY: a system cache look-up.
    let type_oid = unsafe { pg_sys::get_atttype(relid, key) };
    Some(LogicalTable {
        relid,
        name,
        key_column,
        key,
        key_type: KeyType::of(type_oid)?,
        keyspace: Rc::clone(keyspace),
        fanout_policy: row.text("fanout_policy"),
        partitions: HashMap::new(),
        servers: Rc::default(),
        is_moving: false,
        mirror: OnceCell::new(),
    })
}

/// The conditions on the rows that a logical table's shard hides, by both.
fn hidden_rows(relid: pg_sys::Oid) -> HashMap<(pg_sys::Oid, String), Vec<String>> {
    let mut hidden: HashMap<_, Vec<String>> = HashMap::new();
    scan::rows(relid, |row| {
        let (relation, shard, condition) = (row.oid("relation"), row.text("shard"), row.text("condition"));
        if let (Some(relation), Some(shard), Some(condition)) = (relation, shard, condition) {
            hidden.entry((relation, shard)).or_default().push(condition);
        }
    });
    hidden
}

/// From where on in its log a shard's replicas may answer, by its server.
fn floor(row: &Row<'_>) -> Option<(pg_sys::Oid, Floor)> {
    let name = encoding::server_string(&row.text("shard")?);
    // SAFETY: a system cache look-up.
    let server = unsafe { pg_sys::get_foreign_server_oid(name.as_ptr(), true) };
    let system = row.text("system").and_then(|system| system.parse().ok()).map(System::of);
    let timeline = Timeline(u32::try_from(row.get::<i32>("timeline")?).ok()?);
    Some((server, Floor { system, position: Position { timeline, lsn: Lsn::parse(&row.text("lsn")?)? } }))
}

/// Schema and name, quoted; `None` if the relation is gone.
pub fn qualified_name(relid: pg_sys::Oid) -> Option<String> {
    // SAFETY: system cache look-ups; a missing relation has kind 0.
    unsafe {
        (pg_sys::get_rel_relkind(relid) != 0).then(|| {
            let schema = pg_sys::get_namespace_name(pg_sys::get_rel_namespace(relid));
            encoding::utf8_string(pg_sys::quote_qualified_identifier(schema, pg_sys::get_rel_name(relid)))
        })
    }
}

/// The number of column `name` of `relid`, or 0.
fn attribute_number(relid: pg_sys::Oid, name: &str) -> pg_sys::AttrNumber {
    let name = encoding::server_string(name);
    // SAFETY: a system cache look-up.
    unsafe { pg_sys::get_attnum(relid, name.as_ptr()) }
}

/// The foreign table of each shard below `parent`: a shard's server has the shard's name.
fn partitions(parent: pg_sys::Oid, keyspace: &Keyspace) -> HashMap<ShardNumber, pg_sys::Oid> {
    let numbers: HashMap<&str, ShardNumber> = keyspace.map.shards().map(|s| (s.name.as_str(), s.number)).collect();
    let foreign = |relid: &pg_sys::Oid| unsafe {
        // SAFETY: a system cache look-up.
        pg_sys::get_rel_relkind(*relid) as u8 == pg_sys::RELKIND_FOREIGN_TABLE
    };
    scan::children(parent)
        .into_iter()
        .filter(foreign)
        .filter_map(|relid| {
            // SAFETY: the relation is a foreign table, so it has a server; both structs are palloc'd copies.
            let server = unsafe {
                let table = pg_sys::GetForeignTable(relid);
                encoding::utf8_string((*pg_sys::GetForeignServer((*table).serverid)).servername)
            };
            numbers.get(server.as_str()).map(|number| (*number, relid))
        })
        .collect()
}
