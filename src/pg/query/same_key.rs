//! Assignments to the shard key that do not change it, as programs write them that save whole rows: `SET k = k`,
//! `SET k = $1 .. WHERE k = $1`, and `ON CONFLICT (k, ..) DO UPDATE SET k = EXCLUDED.k`.
//!
//! Makes each a plain `k = k`, for which [`keeps_key`] tells it from an assignment that may move the row. What always
//! holds: the stored value is the one that the statement would have stored; of types whose equal values can look
//! different (`1.0` and `1.00`), nothing is made so.

use pgrx::pg_sys;
use shardmap_core::key::KeyKind;
use shardmap_core::route::{Operand, Reach};

use super::columns::strip;
use super::read::{Reading, Reference, Usage};
use super::tree::{cast, items};
use crate::pg::catalog::LogicalTable;
use crate::pg::keys::KeyType;

/// Looks at every assignment to a key.
///
/// # Safety
/// `reading` must have been read from queries that are still there, `reaches` be the decisions about its references.
pub unsafe fn keep(reading: &Reading, reaches: &[Option<Reach>]) {
    for (reference, reach) in reading.tables.iter().zip(reaches) {
        match reference.usage {
            Usage::Insert(_) => keep_excluded(reference),
            Usage::Read => keep_named(reading, reference, reach.as_ref()),
            Usage::Merge => {}
        }
    }
}

/// The first table of which an UPDATE may change a row's key.
///
/// # Safety
/// As [`keep`], which must have been called.
pub unsafe fn changed(reading: &Reading) -> Option<&LogicalTable> {
    let is_changed = |reference: &&Reference| {
        let query = reference.query;
        let updates = (*query).commandType == pg_sys::CmdType::CMD_UPDATE
            && (*query).resultRelation as u32 == reference.rti
            && reference.usage == Usage::Read;
        updates && !keeps_key((*query).targetList, reference.rti, reference.table.key)
    };
    reading.tables.iter().find(is_changed).map(|reference| &*reference.table)
}

/// Whether a list of assignments to the table `rti` leaves its column `key` as it is.
///
/// # Safety
/// `targets` must be NIL or a list of target entries.
pub unsafe fn keeps_key(targets: *const pg_sys::List, rti: u32, key: i16) -> bool {
    items::<pg_sys::TargetEntry>(targets)
        .filter(|target| (**target).resno == key && !(**target).resjunk)
        .all(|target| is_column((*target).expr.cast(), rti, key))
}

/// Whether `node` is a column of the table `rti` of its own level.
///
/// # Safety
/// `node` must be NULL or a valid node.
pub unsafe fn is_column(node: *mut pg_sys::Node, rti: u32, column: i16) -> bool {
    cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var)
        .is_some_and(|var| (*var).varno as u32 == rti && (*var).varattno == column && (*var).varlevelsup == 0)
}

/// The assignment to column `key` in a list of them.
///
/// # Safety
/// `targets` must be NIL or a list of target entries.
pub unsafe fn assignment(targets: *const pg_sys::List, key: i16) -> Option<*mut pg_sys::TargetEntry> {
    items::<pg_sys::TargetEntry>(targets).find(|target| (**target).resno == key && !(**target).resjunk)
}

/// Assigns the column to itself, if that stores what the value would, which is equal to it.
///
/// # Safety
/// `target` must be an assignment to the key of `reference`.
pub unsafe fn assign_itself(target: *mut pg_sys::TargetEntry, reference: &Reference) {
    let (key, value) = (reference.table.key, (*target).expr.cast::<pg_sys::Node>());
    let kind = pg_sys::exprType(value);
    if !KeyType::of(kind).is_some_and(|kind| looks_equal(kind.kind)) {
        return;
    }
    let column =
        pg_sys::makeVar(reference.rti as i32, key, kind, pg_sys::exprTypmod(value), pg_sys::exprCollation(value), 0);
    (*target).expr = column.cast();
}

/// Whether equal values of these are one value.
fn looks_equal(kind: KeyKind) -> bool {
    !matches!(kind, KeyKind::Numeric | KeyKind::Bpchar)
}

/// `UPDATE t SET k = value`, where every row that it reaches has that value.
unsafe fn keep_named(reading: &Reading, reference: &Reference, reach: Option<&Reach>) {
    let Some(assigned) = reading.assigned.iter().find(|assigned| assigned.query == reference.query) else { return };
    if (*reference.query).resultRelation as u32 != reference.rti {
        return;
    }
    let same = match (&assigned.value, reach) {
        (Operand::Known(value), Some(Reach::Keys(keys))) => keys == std::slice::from_ref(value),
        (Operand::Deferred(value), Some(Reach::Deferred(late))) if late.keys.is_empty() && late.values.len() == 1 => {
            // The same parameter, though it is cast to the column's type to be stored.
            let node = |number: &u32| strip(reading.values[*number as usize]);
            let (value, reached) = (node(value), late.values.first().map_or(std::ptr::null_mut(), node));
            !value.is_null() && !reached.is_null() && pg_sys::equal(value.cast(), reached.cast())
        }
        _ => false,
    };
    if same {
        if let Some(target) = assignment((*reference.query).targetList, reference.table.key) {
            assign_itself(target, reference);
        }
    }
}

/// `ON CONFLICT (k, ..) DO UPDATE SET k = EXCLUDED.k`: the rows conflict because their keys are equal.
unsafe fn keep_excluded(reference: &Reference) {
    let (conflict, key) = ((*reference.query).onConflict, reference.table.key);
    if conflict.is_null() || (*conflict).action != pg_sys::OnConflictAction::ONCONFLICT_UPDATE {
        return;
    }
    let of_key = |element: *mut pg_sys::InferenceElem| {
        is_column((*element).expr, reference.rti, key) && (*element).inferopclass == pg_sys::InvalidOid
    };
    if !items::<pg_sys::InferenceElem>((*conflict).arbiterElems).any(of_key) {
        return;
    }
    if let Some(target) = assignment((*conflict).onConflictSet, key) {
        if is_column((*target).expr.cast(), (*conflict).exclRelIndex as u32, key) {
            assign_itself(target, reference);
        }
    }
}
