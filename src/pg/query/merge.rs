//! MERGE: which rows of its target it reads, changes and inserts.
//!
//! The target's rows that match are the inner side of a join that keeps the source's rows, if the statement does something
//! with those that match none. The rows inserted are read as one more such side: a table whose key is the column of the
//! source, or the value, that the action inserts as the key. What always holds: a reference stands for each of them (the
//! rows matched, each INSERT, the rows that no row of the source matches), so that the statement is about one shard only if
//! all of these are.

use pgrx::pg_sys;
use shardmap_core::route::{Column, Derived, Fact, Join, Level, Node, TableRef};

use super::read::{Reader, Reference, Usage};
use super::same_key::{assign_itself, assignment};
use super::tree::{cast, items, nth, rte};
use crate::pg::catalog::LogicalTable;

/// The columns that stand for inserted values are numbered below those of a table, whose system columns are few.
const VALUES_FROM: i16 = -1000;

impl Reader<'_> {
    /// Reads what a MERGE joins: its join tree, and what hears nothing of it.
    pub(super) unsafe fn merge(&mut self, query: *mut pg_sys::Query) -> (Node, Option<Derived>) {
        let sources: Vec<_> = items::<pg_sys::Node>((*(*query).jointree).fromlist).collect();
        let source = Node::From(sources.into_iter().map(|item| self.node(query, item)).collect(), Vec::new());
        let rti = (*query).resultRelation as u32;
        let Some(table) = rte(query, rti).and_then(|entry| self.catalog.table((*entry).relid).cloned()) else {
            return (source, None);
        };
        let on = self.facts(condition(query));
        let key = self.columns.number(query, rti, table.key);
        let keeps_source = actions(query).any(|action| is_insert_side(action));
        let kind = if keeps_source { Join::Left } else { Join::Inner };
        let target = self.target_of_merge(query, &table, key, Vec::new());
        self.keep_joined_key(query, key, &on);
        let mut all = Node::Join(kind, Box::new(source), Box::new(target), on);
        for action in actions(query).collect::<Vec<_>>() {
            if (*action).commandType == pg_sys::CmdType::CMD_INSERT {
                let inserted = self.inserted_by(query, &table, action);
                let when = self.facts((*action).qual);
                all = Node::Join(Join::Left, Box::new(all), Box::new(inserted), when);
            }
        }
        (all, self.without_source(query, &table, key))
    }

    unsafe fn target_of_merge(
        &mut self,
        query: *mut pg_sys::Query,
        table: &std::rc::Rc<LogicalTable>,
        key: Column,
        own: Vec<Fact>,
    ) -> Node {
        let id = self.tables.len();
        let (rti, table) = ((*query).resultRelation as u32, std::rc::Rc::clone(table));
        self.tables.push(Reference { query, rti, table, usage: Usage::Merge });
        Node::Table(TableRef { id, key }, own)
    }

    /// `UPDATE SET k = s.k`, where ON says that it is so: makes it `k = k`. The target's reference has just been pushed.
    unsafe fn keep_joined_key(&mut self, query: *mut pg_sys::Query, key: Column, on: &[Fact]) {
        for action in actions(query).filter(|action| !lacks_source(*action)).collect::<Vec<_>>() {
            let Some(target) = self.tables.last().and_then(|own| assignment((*action).targetList, own.table.key))
            else {
                continue;
            };
            let other = self.columns.side((*target).expr.cast(), &self.levels).map(|side| side.column);
            let is_same = |fact: &Fact| match (fact, other) {
                (Fact::Same(a, b), Some(other)) => [*a, *b] == [key, other] || [*a, *b] == [other, key],
                _ => false,
            };
            let updates = (*action).commandType == pg_sys::CmdType::CMD_UPDATE;
            if let Some(own) = self.tables.last().filter(|_| updates && on.iter().any(is_same)) {
                assign_itself(target, own);
            }
        }
    }

    /// The rows that an action inserts.
    unsafe fn inserted_by(
        &mut self,
        query: *mut pg_sys::Query,
        table: &std::rc::Rc<LogicalTable>,
        action: *mut pg_sys::MergeAction,
    ) -> Node {
        let given = items::<pg_sys::TargetEntry>((*action).targetList).find(|target| (**target).resno == table.key);
        let expr = given.map(|target| (*target).expr.cast::<pg_sys::Node>());
        if let Some(side) = expr.and_then(|expr| self.columns.side(without_range_check(expr), &self.levels)) {
            return self.target_of_merge(query, table, side.column, Vec::new());
        }
        let at = VALUES_FROM - self.tables.len() as i16;
        let key = self.columns.number(query, (*query).resultRelation as u32, at);
        let own = expr.map(|expr| Fact::Is(key, vec![self.value(expr)]));
        self.target_of_merge(query, table, key, own.into_iter().collect())
    }

    /// The target's rows that match no row of the source, where there is an action for them: each must say by itself which
    /// rows it means.
    unsafe fn without_source(
        &mut self,
        query: *mut pg_sys::Query,
        table: &std::rc::Rc<LogicalTable>,
        key: Column,
    ) -> Option<Derived> {
        let acting: Vec<_> = actions(query)
            .filter(|action| lacks_source(*action) && (**action).commandType != pg_sys::CmdType::CMD_NOTHING)
            .collect();
        if acting.is_empty() {
            return None;
        }
        let arms = acting.into_iter().map(|action| Fact::All(self.facts((*action).qual))).collect();
        let from = self.target_of_merge(query, table, key, vec![Fact::Any(arms)]);
        let level = Level { from, sublinks: Vec::new(), apart: Vec::new(), always_yields: false };
        Some(Derived { arms: vec![level], outputs: Vec::new() })
    }
}

/// The integer that `expr` casts to a smaller type, where the cast keeps the value, or fails; else `expr`.
///
/// # Safety
/// `expr` must be NULL or a valid expression.
pub unsafe fn without_range_check(expr: *mut pg_sys::Node) -> *mut pg_sys::Node {
    const CHECKED: [u32; 3] = [pg_sys::F_INT2_INT4, pg_sys::F_INT2_INT8, pg_sys::F_INT4_INT8];
    cast::<pg_sys::FuncExpr>(expr, pg_sys::NodeTag::T_FuncExpr)
        .filter(|call| CHECKED.contains(&(**call).funcid.to_u32()))
        .and_then(|call| nth((*call).args, 0))
        .unwrap_or(expr)
}

/// The actions of a MERGE.
///
/// # Safety
/// `query` must be valid and outlive the iterator.
pub unsafe fn actions(query: *const pg_sys::Query) -> impl Iterator<Item = *mut pg_sys::MergeAction> {
    items((*query).mergeActionList)
}

/// The join condition of a MERGE.
#[cfg(any(feature = "pg15", feature = "pg16"))]
unsafe fn condition(query: *const pg_sys::Query) -> *mut pg_sys::Node {
    (*(*query).jointree).quals
}

#[cfg(not(any(feature = "pg15", feature = "pg16")))]
unsafe fn condition(query: *const pg_sys::Query) -> *mut pg_sys::Node {
    (*query).mergeJoinCondition
}

/// Whether the action is for rows of the source that match none of the target.
#[cfg(any(feature = "pg15", feature = "pg16"))]
unsafe fn is_insert_side(action: *const pg_sys::MergeAction) -> bool {
    !(*action).matched
}

#[cfg(not(any(feature = "pg15", feature = "pg16")))]
unsafe fn is_insert_side(action: *const pg_sys::MergeAction) -> bool {
    (*action).matchKind == pg_sys::MergeMatchKind::MERGE_WHEN_NOT_MATCHED_BY_TARGET
}

/// Whether the action is for rows of the target that no row of the source matches.
///
/// # Safety
/// `action` must be valid.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub unsafe fn lacks_source(_action: *const pg_sys::MergeAction) -> bool {
    false
}

/// Whether the action is for rows of the target that no row of the source matches.
///
/// # Safety
/// `action` must be valid.
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub unsafe fn lacks_source(action: *const pg_sys::MergeAction) -> bool {
    (*action).matchKind == pg_sys::MergeMatchKind::MERGE_WHEN_NOT_MATCHED_BY_SOURCE
}
