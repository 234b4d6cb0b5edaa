//! The output columns of a query level: which columns stand behind them, and what may be said about them from outside.

use pgrx::pg_sys;
use shardmap_core::route::Column;

use super::columns::strip;
use super::read::Reader;
use super::tree::{cast, items};

impl Reader<'_> {
    /// The column behind each output column; `None` for an expression.
    pub(super) unsafe fn outputs(&mut self, query: *mut pg_sys::Query) -> Vec<Option<Column>> {
        items::<pg_sys::TargetEntry>((*query).targetList)
            .filter(|target| !(**target).resjunk)
            .collect::<Vec<_>>()
            .into_iter()
            .map(|target| {
                let var = cast::<pg_sys::Var>(strip((*target).expr.cast()), pg_sys::NodeTag::T_Var)?;
                // A cast that keeps values apart may still change their kind: only the bare column passes.
                (var.cast::<pg_sys::Node>() == (*target).expr.cast()
                    || (*var).vartype == pg_sys::exprType((*target).expr.cast()))
                .then(|| self.columns.of_var(var, &self.levels))?
            })
            .collect()
    }
}

/// For each output column of `query`: whether leaving out rows with another value in it, before everything else that the
/// query does, only leaves out output rows with another value in it.
pub(super) unsafe fn open_outputs(query: *mut pg_sys::Query) -> Vec<bool> {
    let targets = items::<pg_sys::TargetEntry>((*query).targetList).filter(|t| !(**t).resjunk);
    let closed = !(*query).limitCount.is_null()
        || !(*query).limitOffset.is_null()
        || (*query).hasWindowFuncs
        || (*query).hasDistinctOn
        || (*query).hasTargetSRFs
        || !(*query).groupingSets.is_null()
        || !(*query).rowMarks.is_null()
        || (*query).commandType != pg_sys::CmdType::CMD_SELECT
        || pg_sys::contain_volatile_functions((*query).targetList.cast());
    let grouped = (*query).hasAggs || !(*query).groupClause.is_null() || !(*query).havingQual.is_null();
    let is_open = |target: *mut pg_sys::TargetEntry| {
        let groups = items::<pg_sys::SortGroupClause>((*query).groupClause);
        let reference = (*target).ressortgroupref;
        !closed && (!grouped || (reference != 0 && groups.into_iter().any(|g| (*g).tleSortGroupRef == reference)))
    };
    targets.map(is_open).collect()
}
