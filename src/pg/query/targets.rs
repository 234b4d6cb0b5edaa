//! What a statement writes: the target of an INSERT, which is in no join tree, the keys of its rows, and what an UPDATE makes
//! of the key. Of MERGE: [`super::merge`].

use pgrx::pg_sys;
use shardmap_core::route::{Join, Node, Operand, TableRef};

use super::merge::without_range_check;
use super::read::{Assigned, Reader, Reference, Usage};
use super::tree::{cast, items, nth, rte};
use crate::pg::catalog::LogicalTable;

impl Reader<'_> {
    /// The target of INSERT.
    pub(super) unsafe fn written(&mut self, query: *mut pg_sys::Query) {
        let rti = (*query).resultRelation as u32;
        let Some(entry) = rte(query, rti) else { return };
        let Some(table) = self.catalog.table((*entry).relid).cloned() else { return };
        let usage = match (*query).commandType {
            pg_sys::CmdType::CMD_INSERT => Usage::Insert(self.inserted_keys(query, &table)),
            pg_sys::CmdType::CMD_UPDATE => return self.assigned_key(query, &table),
            _ => return,
        };
        self.tables.push(Reference { query, rti, table, usage });
    }

    /// The join tree of an INSERT, with the rows that come from a SELECT as one more side of it: a table whose key is the
    /// column that is inserted as the key.
    pub(super) unsafe fn with_inserted(&mut self, query: *mut pg_sys::Query, from: Node) -> Node {
        let is_own = |own: &Reference| own.query == query && matches!(own.usage, Usage::Insert(_));
        let Some(id) = self.tables.iter().position(is_own) else { return from };
        let key = self.tables[id].table.key;
        let target = items::<pg_sys::TargetEntry>((*query).targetList).find(|target| (**target).resno == key);
        let expr = target.map(|target| without_range_check((*target).expr.cast()));
        let Some(side) = expr.and_then(|expr| self.columns.side(expr, &self.levels)) else { return from };
        match &self.tables[id].usage {
            Usage::Insert(Some(rows)) if !rows.contains(&Operand::Unknown) => return from,
            _ => self.tables[id].usage = Usage::Insert(None),
        }
        let inserted = Node::Table(TableRef { id, key: side.column }, Vec::new());
        Node::Join(Join::Left, Box::new(from), Box::new(inserted), Vec::new())
    }

    /// What an UPDATE assigns to the key.
    unsafe fn assigned_key(&mut self, query: *mut pg_sys::Query, table: &LogicalTable) {
        let targets = items::<pg_sys::TargetEntry>((*query).targetList);
        for target in targets.filter(|target| (**target).resno == table.key && !(**target).resjunk) {
            let value = self.value((*target).expr.cast());
            self.assigned.push(Assigned { query, value });
        }
    }

    /// The keys of an INSERT's rows, where they can be seen.
    unsafe fn inserted_keys(&mut self, query: *mut pg_sys::Query, table: &LogicalTable) -> Option<Vec<Operand>> {
        let target = items::<pg_sys::TargetEntry>((*query).targetList).find(|t| (**t).resno == table.key)?;
        let expr = (*target).expr.cast::<pg_sys::Node>();
        let column = match cast::<pg_sys::Var>(expr, pg_sys::NodeTag::T_Var) {
            None => return Some(vec![self.value(expr)]),
            Some(column) => column,
        };
        let values = rte(query, (*column).varno as u32)?;
        if (*values).rtekind != pg_sys::RTEKind::RTE_VALUES || (*column).varlevelsup != 0 {
            return None;
        }
        let at = usize::try_from((*column).varattno - 1).ok()?;
        let rows: Vec<_> = items::<pg_sys::List>((*values).values_lists).collect();
        rows.into_iter().map(|row| Some(self.value(nth(row, at)?))).collect()
    }
}
