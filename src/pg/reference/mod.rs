//! Reference tables: what a statement writes here is written to every shard's copy, in the same transaction.
//!
//! A reference table is an ordinary table here, so that Postgres does all that a write means; a row trigger of ours then
//! tells each change, in the order in which it happened. What always holds: an inserted or updated row goes whole, and
//! takes the place of the copy's row of that key; a row that something has changed again before its trigger fired is
//! left to the trigger of that later change; so copies end as the table here does, whatever triggers of the user's do
//! in between. Refuses tables that the catalog does not name.
//!
//! Read next: [`pending`] for when changes are sent, [`layout`] for the statements, `sql/reference.sql` for who makes the
//! triggers.

mod layout;
mod pending;

use pgrx::pg_sys::{self, Datum};
use pgrx::PgSqlErrorCode;

use self::pending::{Change, Kind};
use crate::pg::catalog::{self, ReferenceTable};
use crate::pg::encoding;
use crate::pg::query::tree::cast;
use crate::pg::remote::failure::{Failure, Result};
use crate::pg::remote::guard;

pub use self::pending::{flush, init};

/// `_replicate_reference()`: the triggers of reference tables.
///
/// # Safety
/// Called by Postgres' function manager.
#[no_mangle]
pub unsafe extern "C-unwind" fn replicate_reference_wrapper(fcinfo: pg_sys::FunctionCallInfo) -> Datum {
    // SAFETY: the body of a function of Postgres'.
    guard(|| {
        let data = cast::<pg_sys::TriggerData>((*fcinfo).context, pg_sys::NodeTag::T_TriggerData);
        fire(&*data.ok_or_else(not_a_trigger)?)?;
        Ok(Datum::from(0))
    })
}

#[no_mangle]
#[doc(hidden)]
pub extern "C" fn pg_finfo_replicate_reference_wrapper() -> &'static pg_sys::Pg_finfo_record {
    const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &RECORD
}

fn not_a_trigger() -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
        "shardmap._replicate_reference() is the trigger of reference tables",
    )
    .hint("shardmap.distribute_reference() makes these triggers.")
}

unsafe fn fire(data: &pg_sys::TriggerData) -> Result<()> {
    if data.tg_event & pg_sys::TRIGGER_EVENT_TIMINGMASK != pg_sys::TRIGGER_EVENT_AFTER {
        return Err(not_a_trigger());
    }
    let catalog = catalog::current();
    let table = catalog.as_ref().and_then(|catalog| catalog.reference((*data.tg_relation).rd_id).cloned());
    let table = table.ok_or_else(|| unknown(data.tg_relation))?;
    let event = data.tg_event & pg_sys::TRIGGER_EVENT_OPMASK;
    match (data.tg_event & pg_sys::TRIGGER_EVENT_ROW != 0, event) {
        (false, pg_sys::TRIGGER_EVENT_TRUNCATE) => pending::truncate(&table, data.tg_relation),
        (false, _) => flush(),
        _ if table.servers.is_empty() => Ok(()),
        (true, pg_sys::TRIGGER_EVENT_INSERT) => inserted(&table, data),
        (true, pg_sys::TRIGGER_EVENT_UPDATE) => updated(&table, data),
        (true, _) => deleted(&table, data),
    }
}

fn unknown(relation: pg_sys::Relation) -> Failure {
    // SAFETY: an open relation.
    let name = unsafe { encoding::utf8_string((*(*relation).rd_rel).relname.data.as_ptr()) };
    Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("table \"{name}\" has the trigger of a reference table and is none"),
    )
    .hint(format!(
        "Drop its triggers shardmap_reference_row and shardmap_reference_statement, then \
         SELECT shardmap.distribute_reference('{name}')."
    ))
}

unsafe fn inserted(table: &ReferenceTable, data: &pg_sys::TriggerData) -> Result<()> {
    match is_latest(data, data.tg_trigslot) {
        true => put(table, data, data.tg_trigslot),
        false => Ok(()),
    }
}

unsafe fn updated(table: &ReferenceTable, data: &pg_sys::TriggerData) -> Result<()> {
    let (old, new) = (data.tg_trigslot, data.tg_newslot);
    let is_latest = is_latest(data, new);
    let layout = pending::layout(data.tg_relation)?;
    if layout.key(old) == layout.key(new) {
        return if is_latest { put(table, data, new) } else { Ok(()) };
    }
    // Another row that has the old key by now, too, may have got it before or after this one lost it.
    let others_may_write = has_other_triggers(data);
    if !is_latest || (others_may_write && layout.find(data.tg_relation, old).is_some()) {
        return Err(changed_again(table));
    }
    pending::add(
        table,
        &layout,
        Kind::Move,
        Change { key: layout.key(old), row: Some(layout.row(new)), old: Some(layout.row(old)) },
    )
}

unsafe fn deleted(table: &ReferenceTable, data: &pg_sys::TriggerData) -> Result<()> {
    let old = data.tg_trigslot;
    let layout = pending::layout(data.tg_relation)?;
    pending::add(table, &layout, Kind::Delete, Change { key: layout.key(old), row: None, old: Some(layout.row(old)) })?;
    // A row that has the key again may have been told already.
    match layout.find(data.tg_relation, old) {
        Some(again) => put(table, data, again.0),
        None => Ok(()),
    }
}

unsafe fn put(table: &ReferenceTable, data: &pg_sys::TriggerData, slot: *mut pg_sys::TupleTableSlot) -> Result<()> {
    let layout = pending::layout(data.tg_relation)?;
    pending::add(table, &layout, Kind::Put, Change { key: layout.key(slot), row: Some(layout.row(slot)), old: None })
}

/// Whether nothing has changed or deleted the row since.
unsafe fn is_latest(data: &pg_sys::TriggerData, slot: *mut pg_sys::TupleTableSlot) -> bool {
    let own = std::ptr::addr_of_mut!(pg_sys::SnapshotSelfData);
    pg_sys::table_tuple_satisfies_snapshot(data.tg_relation, slot, own)
}

/// Whether triggers of the user's may write the table while its rows' changes are told.
unsafe fn has_other_triggers(data: &pg_sys::TriggerData) -> bool {
    let triggers = (*data.tg_relation).trigdesc;
    !triggers.is_null()
        && (0..(*triggers).numtriggers as usize).any(|at| {
            let trigger = *(*triggers).triggers.add(at);
            !trigger.tgisinternal && trigger.tgfoid != (*data.tg_trigger).tgfoid
        })
}

fn changed_again(table: &ReferenceTable) -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("cannot copy a changed primary key of reference table {} to the shards", table.name),
    )
    .detail("A trigger may have changed the same rows in the same statement, in an order that is not known here.")
    .hint("Delete the row and insert it with the new key, or disable the table's other triggers for this statement.")
}
