//! The INSERT for rows that come to a partition by tuple routing or COPY, for which there is no plan of the partition's own.

use std::ffi::CStr;

use pgrx::pg_sys;

use super::options;
use super::private::WritePlan;
use crate::pg::raw::attribute;
use crate::pg::remote::wire::copy::Format;

/// Plans it: all columns are sent, and all come back if anything looks at the row afterwards.
///
/// # Safety
/// `result` must be the open partition, `state` the statement's.
pub unsafe fn plan(state: *mut pg_sys::ModifyTableState, result: *mut pg_sys::ResultRelInfo) -> WritePlan {
    let relation = (*result).ri_RelationDesc;
    let desc = (*relation).rd_att;
    let kept = (0..(*desc).natts as usize).filter(|at| !attribute(desc, *at).attisdropped);
    let targets: Vec<i16> = kept.map(|at| at as i16 + 1).collect();
    let names: Vec<Vec<u8>> = targets.iter().map(|number| remote_column(relation, *number)).collect();
    let mut sql = [b"INSERT INTO ".as_slice(), &remote_table(relation)].concat();
    let mut number = 0;
    let values: Vec<Vec<u8>> = targets
        .iter()
        .map(|target| match attribute(desc, *target as usize - 1).attgenerated {
            0 => {
                number += 1;
                format!("${number}").into_bytes()
            }
            _ => b"DEFAULT".to_vec(),
        })
        .collect();
    let values_end = match targets.is_empty() {
        true => {
            sql.extend_from_slice(b" DEFAULT VALUES");
            -1
        }
        false => {
            for part in [b"(".as_slice(), &names.join(&b", "[..]), b") VALUES (", &values.join(&b", "[..]), b")"] {
                sql.extend_from_slice(part);
            }
            sql.len() as i32
        }
    };
    if does_nothing_on_conflict(state) {
        sql.extend_from_slice(b" ON CONFLICT DO NOTHING");
    }
    let has_returning = !(*result).ri_returningList.is_null()
        || !(*result).ri_WithCheckOptions.is_null()
        || (!(*result).ri_TrigDesc.is_null() && (*(*result).ri_TrigDesc).trig_insert_after_row);
    let retrieved = match has_returning && !targets.is_empty() {
        true => {
            sql.extend_from_slice(b" RETURNING ");
            sql.extend_from_slice(&names.join(&b", "[..]));
            targets.clone()
        }
        false => Vec::new(),
    };
    WritePlan { sql: sql.into(), targets, values_end, has_returning: !retrieved.is_empty(), retrieved }
}

/// The COPY of these columns.
///
/// # Safety
/// As [`remote_table`].
pub unsafe fn copy(relation: pg_sys::Relation, columns: impl Iterator<Item = i16>, format: Format) -> Vec<u8> {
    let names: Vec<Vec<u8>> = columns.map(|number| remote_column(relation, number)).collect();
    let options: &[u8] = match format {
        Format::Text => b") FROM STDIN",
        Format::Binary => b") FROM STDIN (FORMAT binary)",
    };
    [b"COPY ".as_slice(), &remote_table(relation), b" (", &names.join(&b", "[..]), options].concat()
}

unsafe fn does_nothing_on_conflict(state: *mut pg_sys::ModifyTableState) -> bool {
    let plan = (*state).ps.plan.cast::<pg_sys::ModifyTable>();
    !plan.is_null() && (*plan).onConflictAction == pg_sys::OnConflictAction::ONCONFLICT_NOTHING
}

unsafe fn quoted(name: *const std::ffi::c_char) -> Vec<u8> {
    CStr::from_ptr(pg_sys::quote_identifier(name)).to_bytes().to_vec()
}

/// The qualified name of a foreign table on its shard.
///
/// # Safety
/// `relation` must be an open foreign table.
pub unsafe fn remote_table(relation: pg_sys::Relation) -> Vec<u8> {
    let options = (*pg_sys::GetForeignTable((*relation).rd_id)).options;
    let form = (*relation).rd_rel;
    let schema = options::find(options, c"schema_name")
        .unwrap_or_else(|| pg_sys::get_namespace_name((*form).relnamespace).cast_const());
    let table = options::find(options, c"table_name").unwrap_or((*form).relname.data.as_ptr());
    [quoted(schema), quoted(table)].join(&b'.')
}

/// The name of a column on the shard.
///
/// # Safety
/// As [`remote_table`]; `number` must be a column of it.
pub unsafe fn remote_column(relation: pg_sys::Relation, number: i16) -> Vec<u8> {
    let options = pg_sys::GetForeignColumnOptions((*relation).rd_id, number);
    let own = attribute((*relation).rd_att, number as usize - 1).attname.data.as_ptr();
    quoted(options::find(options, c"column_name").unwrap_or(own))
}
