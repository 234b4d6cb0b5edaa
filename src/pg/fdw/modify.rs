//! Writes through foreign tables: what may be written where.
//!
//! Refuses, whatever path led here: a row inserted into or updated in a shard that does not own its key (Postgres does
//! not check the partition bound of a foreign table written to directly), and any assignment to the key column
//! (postgres_fdw would leave the row on its old shard and report success). Enforces row security on new rows.

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::PgList;

use super::scan::{explain, explain_traffic, partition, server_name};
use super::write::MAX_PARAMS;
use super::{call_original, insert, lazy, note};
use crate::pg::catalog::{LogicalTable, Partition};
use crate::pg::error::Refusal;
use crate::pg::flag;
use crate::pg::query::same_key::is_column;
use crate::pg::query::tree::{cells, items};
use crate::pg::remote::guard;

/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn plan_foreign_modify(
    root: *mut pg_sys::PlannerInfo,
    plan: *mut pg_sys::ModifyTable,
    result: pg_sys::Index,
    subplan: i32,
) -> *mut pg_sys::List {
    refuse_key_change(root, plan, result);
    note::append(call_original!(PlanForeignModify(root, plan, result, subplan)), std::ptr::null())
}

/// # Safety
/// Called by the planner.
#[pg_guard]
pub unsafe extern "C-unwind" fn plan_direct_modify(
    root: *mut pg_sys::PlannerInfo,
    plan: *mut pg_sys::ModifyTable,
    result: pg_sys::Index,
    subplan: i32,
) -> bool {
    refuse_key_change(root, plan, result);
    let scan = direct_scan(plan, subplan);
    let noted = scan.map(|scan| (*scan).fdw_private);
    let direct = call_original!(PlanDirectModify(root, plan, result, subplan));
    if let (true, Some(scan), Some(noted)) = (direct, scan, noted) {
        (*scan).fdw_private = note::carry_over((*scan).fdw_private, noted);
    }
    direct
}

/// The foreign scan that postgres_fdw may turn into a direct modification of `result`.
unsafe fn direct_scan(plan: *mut pg_sys::ModifyTable, subplan: i32) -> Option<*mut pg_sys::ForeignScan> {
    let mut below = (*plan).plan.lefttree;
    if below.is_null() {
        return None;
    }
    if (*below).type_ == pg_sys::NodeTag::T_Result && !(*below).lefttree.is_null() {
        below = (*below).lefttree;
    }
    if (*below).type_ == pg_sys::NodeTag::T_Append {
        let plans = PgList::<pg_sys::Plan>::from_pg((*below.cast::<pg_sys::Append>()).appendplans);
        below = plans.get_ptr(subplan as usize)?;
        let _leak = plans.into_pg();
    }
    let scan = below.cast::<pg_sys::ForeignScan>();
    ((*below).type_ == pg_sys::NodeTag::T_ForeignScan).then_some(scan)
}

/// Refuses an UPDATE that assigns to the key column of the logical table that `result` is a part of.
unsafe fn refuse_key_change(root: *mut pg_sys::PlannerInfo, plan: *mut pg_sys::ModifyTable, result: pg_sys::Index) {
    if (*plan).operation != pg_sys::CmdType::CMD_UPDATE {
        return;
    }
    let rte = *(*root).simple_rte_array.add(result as usize);
    let Some(partition) = partition((*rte).relid) else { return };
    let target = *(*root).simple_rte_array.add((*(*root).parse).resultRelation as usize);
    let key = match (*target).relid == (*rte).relid {
        true => partition.key,
        false => partition.table.key,
    };
    let query = (*root).parse;
    // Planning has numbered the assignments anew; the columns that they had stand apart.
    let assigned = cells((*root).update_colnos).map(|column| column.int_value);
    let changes = assigned.zip(items::<pg_sys::TargetEntry>((*query).targetList)).any(|(column, target)| {
        column == i32::from(key) && !is_column((*target).expr.cast(), (*query).resultRelation as u32, key)
    });
    if changes {
        flag::refuse(key_change(&partition.table))
    }
}

/// The refusal of an UPDATE that may change the key of a row of `table`.
pub fn key_change(table: &LogicalTable) -> Refusal {
    Refusal::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot change the shard key \"{}\" of table {}", table.key_column, table.name),
    )
    .detail("The row would stay on a shard that does not own its new key.")
    .hint("Delete the row and insert it with the new key.")
}

/// # Safety
/// Called by the executor, for rows that tuple routing or COPY brings to this partition.
pub unsafe extern "C-unwind" fn begin_foreign_insert(
    state: *mut pg_sys::ModifyTableState,
    result: *mut pg_sys::ResultRelInfo,
) {
    guard(|| {
        flag::at_insert((*state).ps.state);
        lazy::begin_insert(state, result, insert::plan(state, result))
    });
}

/// How many rows to insert in one statement.
///
/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn get_foreign_modify_batch_size(result: *mut pg_sys::ResultRelInfo) -> i32 {
    if lazy::bulk(result).is_some() {
        // They are gathered as values, for which no row need be copied.
        return 1;
    }
    // postgres_fdw looks for a state of its own there.
    let state = std::mem::replace(&mut (*result).ri_FdwState, std::ptr::null_mut());
    let size = call_original!(GetForeignModifyBatchSize(result));
    (*result).ri_FdwState = state;
    let columns = (*(*(*result).ri_RelationDesc).rd_att).natts.max(1);
    size.min(MAX_PARAMS / columns).max(1)
}

/// # Safety
/// Called by EXPLAIN.
#[pg_guard]
pub unsafe extern "C-unwind" fn explain_foreign_modify(
    state: *mut pg_sys::ModifyTableState,
    result: *mut pg_sys::ResultRelInfo,
    private: *mut pg_sys::List,
    subplan: i32,
    es: *mut pg_sys::ExplainState,
) {
    call_original!(ExplainForeignModify(state, result, private, subplan, es));
    explain(private, server_name(table_server(result)), (*state).ps.state, es);
}

/// # Safety
/// Called by EXPLAIN.
#[pg_guard]
pub unsafe extern "C-unwind" fn explain_direct_modify(
    node: *mut pg_sys::ForeignScanState,
    es: *mut pg_sys::ExplainState,
) {
    call_original!(ExplainDirectModify(node, es));
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    explain((*plan).fdw_private, server_name((*plan).fs_server), (*node).ss.ps.state, es);
    explain_traffic(node, es);
}

/// The server of the foreign table that is written.
///
/// # Safety
/// `result` must be open.
pub unsafe fn table_server(result: *mut pg_sys::ResultRelInfo) -> pg_sys::Oid {
    (*pg_sys::GetForeignTable((*(*result).ri_RelationDesc).rd_id)).serverid
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn exec_foreign_insert(
    estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    _plan_slot: *mut pg_sys::TupleTableSlot,
) -> *mut pg_sys::TupleTableSlot {
    guard(|| {
        check_owner(result, slot);
        if let Some(bulk) = lazy::bulk(result) {
            bulk.push(slot)?;
            return Ok(slot);
        }
        check_policies(pg_sys::WCOKind::WCO_RLS_INSERT_CHECK, result, slot, estate);
        Ok(if_any(lazy::begin_modify(result)?.insert(&[slot])?, slot))
    })
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn exec_foreign_batch_insert(
    estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    slots: *mut *mut pg_sys::TupleTableSlot,
    _plan_slots: *mut *mut pg_sys::TupleTableSlot,
    count: *mut i32,
) -> *mut *mut pg_sys::TupleTableSlot {
    guard(|| {
        let rows = std::slice::from_raw_parts(slots, *count as usize);
        for row in rows {
            check_owner(result, *row);
            check_policies(pg_sys::WCOKind::WCO_RLS_INSERT_CHECK, result, *row, estate);
        }
        *count = lazy::begin_modify(result)?.insert(rows)? as i32;
        Ok(if *count > 0 { slots } else { std::ptr::null_mut() })
    })
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn exec_foreign_update(
    estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    plan_slot: *mut pg_sys::TupleTableSlot,
) -> *mut pg_sys::TupleTableSlot {
    guard(|| {
        check_owner(result, slot);
        check_policies(pg_sys::WCOKind::WCO_RLS_UPDATE_CHECK, result, slot, estate);
        Ok(if_any(lazy::begin_modify(result)?.change(slot, plan_slot, true)?, slot))
    })
}

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn exec_foreign_delete(
    _estate: *mut pg_sys::EState,
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    plan_slot: *mut pg_sys::TupleTableSlot,
) -> *mut pg_sys::TupleTableSlot {
    guard(|| Ok(if_any(lazy::begin_modify(result)?.change(slot, plan_slot, false)?, slot)))
}

/// `slot`, or nothing if no row was written.
fn if_any(rows: u64, slot: *mut pg_sys::TupleTableSlot) -> *mut pg_sys::TupleTableSlot {
    match rows {
        0 => std::ptr::null_mut(),
        _ => slot,
    }
}

/// Raises the error of row security for a new row that a policy does not let in; Postgres itself asks only for rows that
/// it stores.
unsafe fn check_policies(
    kind: pg_sys::WCOKind::Type,
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
) {
    if !(*result).ri_WithCheckOptions.is_null() {
        pg_sys::ExecWithCheckOptions(kind, result, slot, estate);
    }
}

/// Refuses a row whose key another shard owns. A NULL key is left to the shard, where the column is NOT NULL.
unsafe fn check_owner(result: *mut pg_sys::ResultRelInfo, slot: *mut pg_sys::TupleTableSlot) {
    let Some(partition) = partition((*(*result).ri_RelationDesc).rd_id) else { return };
    let key = partition.key;
    if (*slot).tts_nvalid < key {
        pg_sys::slot_getsomeattrs_int(slot, i32::from(key));
    }
    let at = key as usize - 1;
    if *(*slot).tts_isnull.add(at) {
        return;
    }
    let table = &partition.table;
    let canonical = table.key_type.with_canonical(*(*slot).tts_values.add(at), <[u8]>::to_vec);
    let owner = table.keyspace.owner(&canonical);
    if owner != partition.shard {
        wrong_shard(&partition, &canonical, owner).raise()
    }
}

fn wrong_shard(partition: &Partition, canonical: &[u8], owner: shardmap_core::ids::ShardNumber) -> Refusal {
    let table = &partition.table;
    let keyspace = &table.keyspace;
    Refusal::new(
        PgSqlErrorCode::ERRCODE_CHECK_VIOLATION,
        format!(
            "key \"{}\" of table {} does not belong on shard \"{}\"",
            String::from_utf8_lossy(canonical),
            table.name,
            keyspace.shard_name(partition.shard)
        ),
    )
    .detail(format!("Its owner is shard \"{}\".", keyspace.shard_name(owner)))
    .hint(format!("Write to {} itself; the row goes to its shard.", table.name))
}
