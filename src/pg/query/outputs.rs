//! The output columns of a query level: which columns stand behind them, and what may be said about them from outside.

use pgrx::pg_sys;
use shardmap_core::route::{Column, Fact, Node, Operand};

use super::columns::strip;
use super::read::Reader;
use super::tree::{cast, items, nth};
use crate::pg::keys::KeyType;

/// The longest VALUES list that is looked into.
const MANY: usize = 100;

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

    /// The output columns of `body`, which is entry `rti` of `query`, that have one value in all rows.
    pub(super) unsafe fn fixed_outputs(
        &mut self,
        query: *mut pg_sys::Query,
        rti: u32,
        body: *mut pg_sys::Query,
    ) -> Vec<Fact> {
        // Grouping sets put NULL in place of what is not grouped by.
        if (*body).commandType != pg_sys::CmdType::CMD_SELECT
            || !(*body).setOperations.is_null()
            || !(*body).groupingSets.is_null()
        {
            return Vec::new();
        }
        let mut facts = Vec::new();
        let targets = items::<pg_sys::TargetEntry>((*body).targetList).filter(|target| !(**target).resjunk);
        for (at, target) in targets.collect::<Vec<_>>().into_iter().enumerate() {
            let value = self.fixed((*target).expr.cast());
            if value != Operand::Unknown {
                facts.push(Fact::Is(self.columns.number(query, rti, at as i16 + 1), vec![value]));
            }
        }
        facts
    }

    /// A VALUES list: the values that its columns can have.
    pub(super) unsafe fn values(&mut self, query: *mut pg_sys::Query, rti: u32, rows: *const pg_sys::List) -> Node {
        let rows: Vec<_> = items::<pg_sys::List>(rows).take(MANY + 1).collect();
        // An INSERT's are looked at row by row. Postgres does not prune by a list of several.
        let most = if self.is_in_merge() { MANY } else { 1 };
        if rows.is_empty() || rows.len() > most || (*query).commandType == pg_sys::CmdType::CMD_INSERT {
            return Node::Local;
        }
        let mut facts = Vec::new();
        for at in 0..items::<pg_sys::Node>(rows[0]).count() {
            let mut values = Vec::with_capacity(rows.len());
            for row in &rows {
                values.extend(nth(*row, at).map(|value| self.fixed(value)));
            }
            if !values.contains(&Operand::Unknown) {
                facts.push(Fact::Is(self.columns.number(query, rti, at as i16 + 1), values));
            }
        }
        Node::From(Vec::new(), facts)
    }

    unsafe fn is_in_merge(&self) -> bool {
        self.levels.iter().any(|level| (**level).commandType == pg_sys::CmdType::CMD_MERGE)
    }

    /// What an expression is worth in all rows, if that may be a key.
    unsafe fn fixed(&mut self, node: *mut pg_sys::Node) -> Operand {
        match cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var) {
            None if KeyType::of(pg_sys::exprType(node)).is_some() => self.value(node),
            _ => Operand::Unknown,
        }
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
