//! INSERT .. SELECT, rewritten for its shard.
//!
//! Rewriting has sorted the columns that are written, and added those that have defaults; the text has them in the order of
//! the SELECT's columns. So they are put back in that order, and the defaults become columns of the SELECT. What always
//! holds: a default is computed here, and only if it is the same for all rows. Refuses a set operation with defaults beside
//! it, and assignments to parts of a column.

use std::collections::HashSet;

use pgrx::pg_sys;

use super::merge::shallow;
use super::ship::{stands_alone, Shipper};
use super::whole::SHAPE;
use crate::pg::query::tree::{cast, items, nth};

impl Shipper<'_> {
    /// Puts the columns of `copy`, an INSERT whose rows come from the subquery that is entry `at` (from 0), in the order of
    /// the subquery's, and its defaults among them.
    pub(super) unsafe fn insert_select(&mut self, copy: *mut pg_sys::Query, at: usize) {
        let Some(entry) = nth::<pg_sys::RangeTblEntry>((*copy).rtable, at) else { return };
        let rti = at as i32 + 1;
        let (mut columns, mut defaults) = (Vec::new(), Vec::new());
        for target in items::<pg_sys::TargetEntry>((*copy).targetList) {
            match source_column((*target).expr.cast(), rti) {
                Some(column) => columns.push((column, target)),
                None if stands_alone((*target).expr.cast()) => defaults.push(target),
                None => self.obstacle = Some(SHAPE),
            }
        }
        columns.sort_by_key(|(column, _)| *column);
        let select = shallow((*entry).subquery);
        if !drop_others(select, &columns.iter().map(|(column, _)| *column).collect())
            || (!defaults.is_empty() && !(*select).setOperations.is_null())
        {
            self.obstacle = Some(SHAPE);
            return;
        }
        let mut targets = std::ptr::null_mut();
        for (_, target) in columns {
            targets = pg_sys::lappend(targets, target.cast());
        }
        for target in defaults {
            self.lifts = true;
            let expr = self.node((*target).expr.cast());
            self.lifts = false;
            let number = (*(*select).targetList).length as i16 + 1;
            let output = pg_sys::makeTargetEntry(expr.cast(), number, std::ptr::null_mut(), false);
            (*select).targetList = pg_sys::lappend((*select).targetList, output.cast());
            let (kind, typmod) = (pg_sys::exprType(expr), pg_sys::exprTypmod(expr));
            let column = pg_sys::makeVar(rti, number, kind, typmod, pg_sys::exprCollation(expr), 0);
            let own = pg_sys::makeTargetEntry(column.cast(), (*target).resno, (*target).resname, false);
            targets = pg_sys::lappend(targets, own.cast());
        }
        let own = shallow(entry);
        (*own).subquery = select;
        (*copy).rtable = pg_sys::list_copy((*copy).rtable);
        (*(*(*copy).rtable).elements.add(at)).ptr_value = own.cast();
        (*copy).targetList = targets;
    }
}

/// Takes the columns out of `select`, whose list of them becomes its own, that nothing is written from: literals without a
/// type, which stand in the INSERT itself. `false`: they are needed.
unsafe fn drop_others(select: *mut pg_sys::Query, used: &HashSet<i16>) -> bool {
    let mut outputs = std::ptr::null_mut();
    for output in items::<pg_sys::TargetEntry>((*select).targetList) {
        let own = shallow(output);
        if !(*own).resjunk && !used.contains(&(*own).resno) {
            if (*own).ressortgroupref != 0 || !(*select).setOperations.is_null() {
                return false;
            }
            (*own).resjunk = true;
        }
        outputs = pg_sys::lappend(outputs, own.cast());
    }
    (*select).targetList = outputs;
    true
}

/// The column of entry `rti` that is written, through the casts that assigning it brings: the text leaves them out, and the
/// shard puts them in again.
unsafe fn source_column(node: *mut pg_sys::Node, rti: i32) -> Option<i16> {
    if let Some(var) = cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var) {
        return ((*var).varno == rti && (*var).varlevelsup == 0).then_some((*var).varattno);
    }
    let implicit = |form| form == pg_sys::CoercionForm::COERCE_IMPLICIT_CAST;
    let inner = if let Some(call) = cast::<pg_sys::FuncExpr>(node, pg_sys::NodeTag::T_FuncExpr) {
        nth((*call).args, 0).filter(|_| implicit((*call).funcformat))
    } else if let Some(relabel) = cast::<pg_sys::RelabelType>(node, pg_sys::NodeTag::T_RelabelType) {
        implicit((*relabel).relabelformat).then_some((*relabel).arg.cast())
    } else if let Some(coerced) = cast::<pg_sys::CoerceViaIO>(node, pg_sys::NodeTag::T_CoerceViaIO) {
        implicit((*coerced).coerceformat).then_some((*coerced).arg.cast())
    } else if let Some(array) = cast::<pg_sys::ArrayCoerceExpr>(node, pg_sys::NodeTag::T_ArrayCoerceExpr) {
        implicit((*array).coerceformat).then_some((*array).arg.cast())
    } else {
        cast::<pg_sys::CoerceToDomain>(node, pg_sys::NodeTag::T_CoerceToDomain)
            .filter(|domain| implicit((**domain).coercionformat))
            .map(|domain| (*domain).arg.cast())
    };
    source_column(inner?, rti)
}
