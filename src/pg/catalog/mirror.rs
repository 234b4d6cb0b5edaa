//! How the shards' tables compare with their logical table: looked at once for each state of the catalog.

use std::ffi::{c_char, CStr};

use pgrx::pg_sys;

use super::{LogicalTable, Mirror};
use crate::pg::fdw::options;
use crate::pg::raw::attribute;

impl LogicalTable {
    /// What holds of the table and all its partitions.
    ///
    /// # Safety
    /// Inside a transaction that has locked the table.
    pub unsafe fn mirror(&self) -> Mirror {
        *self.mirror.get_or_init(|| Mirror {
            same_names: self.partitions.values().all(|partition| bears_names(*partition, self.relid)),
            has_triggers: self.partitions.values().chain([&self.relid]).any(|relation| has_triggers(*relation)),
        })
    }
}

/// Whether `partition` is called on its shard what `relid` is called here, and so are its columns.
unsafe fn bears_names(partition: pg_sys::Oid, relid: pg_sys::Oid) -> bool {
    let options = (*pg_sys::GetForeignTable(partition)).options;
    let schema = |relid| pg_sys::get_namespace_name(pg_sys::get_rel_namespace(relid)).cast_const();
    let same = |option: &CStr, default: *const c_char, wanted: *const c_char| {
        let name = options::find(options, option).unwrap_or(default);
        !name.is_null() && !wanted.is_null() && CStr::from_ptr(name) == CStr::from_ptr(wanted)
    };
    same(c"schema_name", schema(partition), schema(relid))
        && same(c"table_name", pg_sys::get_rel_name(partition).cast_const(), pg_sys::get_rel_name(relid).cast_const())
        && columns_keep_names(partition)
}

/// Whether no column of the foreign table is said to have another name on the shard.
unsafe fn columns_keep_names(partition: pg_sys::Oid) -> bool {
    let relation = pg_sys::RelationIdGetRelation(partition);
    if relation.is_null() {
        return false;
    }
    let desc = (*relation).rd_att;
    let keep = (0..(*desc).natts as usize)
        .filter(|at| !attribute(desc, *at).attisdropped)
        .all(|at| options::find(pg_sys::GetForeignColumnOptions(partition, at as i16 + 1), c"column_name").is_none());
    pg_sys::RelationClose(relation);
    keep
}

unsafe fn has_triggers(relid: pg_sys::Oid) -> bool {
    let relation = pg_sys::RelationIdGetRelation(relid);
    if relation.is_null() {
        return false;
    }
    let has = !(*relation).trigdesc.is_null();
    pg_sys::RelationClose(relation);
    has
}
