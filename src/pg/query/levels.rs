//! Query levels: a query, its WITH list, and the arms of its set operations.
//!
//! What always holds: a common table expression that is used once and changes nothing is read where it is used; any other
//! stands for itself, and hears nothing of who reads it. Read next: [`super::join_tree`] for the FROM of one level.

use pgrx::pg_sys;
use shardmap_core::route::{Column, Derived, Level, Node};

use super::outputs::open_outputs;
use super::read::Reader;
use super::tree::{items, rte, tag};
use crate::pg::encoding;

/// The queries whose rows a subquery yields, with their output columns, and which of these a condition may be pushed to.
pub(super) struct Arms {
    pub levels: Vec<(Level, Vec<Option<Column>>)>,
    pub open: Vec<bool>,
}

impl Reader<'_> {
    /// Reads a query with all that is in it.
    pub(super) unsafe fn arms(&mut self, query: *mut pg_sys::Query) -> Arms {
        self.levels.push(query);
        let apart = self.ctes(query);
        let mut arms = match (*query).setOperations.is_null() {
            true => self.plain(query),
            false => self.set_operation(query),
        };
        self.levels.pop();
        if let Some((first, _)) = arms.levels.first_mut() {
            first.apart.extend(apart);
        }
        arms
    }

    /// Sorts out the WITH list: what is read once where it is used, and what stands by itself.
    unsafe fn ctes(&mut self, query: *mut pg_sys::Query) -> Vec<Derived> {
        let mut apart = Vec::new();
        for cte in items::<pg_sys::CommonTableExpr>((*query).cteList) {
            let body = (*cte).ctequery.cast::<pg_sys::Query>();
            let inline = (*cte).cterefcount == 1
                && !(*cte).cterecursive
                && (*body).commandType == pg_sys::CmdType::CMD_SELECT
                && !pg_sys::contain_volatile_functions(body.cast());
            if inline {
                let name = encoding::utf8_string((*cte).ctename);
                self.inlined.insert((query as usize, name), body);
            } else {
                let arms = self.arms(body);
                apart.push(Derived { arms: arms.levels.into_iter().map(|(l, _)| l).collect(), outputs: Vec::new() });
            }
        }
        apart
    }

    unsafe fn set_operation(&mut self, query: *mut pg_sys::Query) -> Arms {
        let mut leaves = Vec::new();
        set_leaves((*query).setOperations, &mut leaves);
        let width = items::<pg_sys::Node>((*query).targetList).count();
        let closed = !(*query).limitCount.is_null() || !(*query).limitOffset.is_null();
        let mut all = Arms { levels: Vec::new(), open: vec![!closed; width] };
        for leaf in leaves {
            let Some(entry) = rte(query, leaf) else { continue };
            if (*entry).subquery.is_null() {
                continue;
            }
            let arms = self.arms((*entry).subquery);
            all.open.iter_mut().zip(arms.open).for_each(|(open, own)| *open &= own);
            all.levels.extend(arms.levels);
        }
        all
    }

    /// A query without set operations.
    unsafe fn plain(&mut self, query: *mut pg_sys::Query) -> Arms {
        self.written(query);
        let jointree = (*query).jointree;
        let (from, apart) = match (*query).commandType {
            _ if jointree.is_null() => (Node::Local, None),
            pg_sys::CmdType::CMD_MERGE => self.merge(query),
            pg_sys::CmdType::CMD_INSERT => {
                let from = self.from(query, jointree);
                (self.with_inserted(query, from), None)
            }
            _ => (self.from(query, jointree), None),
        };
        let sublinks = self.sublinks(query);
        let outputs = self.outputs(query);
        let grouped = (*query).hasAggs || !(*query).havingQual.is_null();
        let always_yields = (grouped && (*query).groupClause.is_null()) || !(*query).groupingSets.is_null();
        let open = open_outputs(query);
        let apart = apart.into_iter().collect();
        Arms { levels: vec![(Level { from, sublinks, apart, always_yields }, outputs)], open }
    }
}

/// The leaves of a tree of set operations, as range table indexes.
unsafe fn set_leaves(node: *mut pg_sys::Node, leaves: &mut Vec<u32>) {
    match tag(node) {
        pg_sys::NodeTag::T_RangeTblRef => leaves.push((*node.cast::<pg_sys::RangeTblRef>()).rtindex as u32),
        pg_sys::NodeTag::T_SetOperationStmt => {
            let operation = node.cast::<pg_sys::SetOperationStmt>();
            set_leaves((*operation).larg, leaves);
            set_leaves((*operation).rarg, leaves);
        }
        _ => {}
    }
}
