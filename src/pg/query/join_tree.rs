//! The join tree of a level: its tables, derived tables and joins, with the conditions on each.
//!
//! What always holds: whatever is not understood is [`Node::Local`] and says nothing; a table with row security has its
//! policies' conditions as its own. Read next: [`super::facts`] for conditions.

use pgrx::pg_sys;
use shardmap_core::route::{Derived, Fact, Join, Node, Output, TableRef};

use super::late::{Late, Understood};
use super::levels::Arms;
use super::read::{Reader, Reference, Usage};
use super::tree::{items, rte, tag};
use crate::pg::encoding;

impl Reader<'_> {
    /// Reads the FROM and WHERE of a query.
    pub(super) unsafe fn from(&mut self, query: *mut pg_sys::Query, from: *mut pg_sys::FromExpr) -> Node {
        let nodes: Vec<_> = items::<pg_sys::Node>((*from).fromlist).collect();
        let nodes = nodes.into_iter().map(|node| self.node(query, node)).collect();
        self.note_required((*from).quals);
        Node::From(nodes, self.whole(query, std::ptr::addr_of_mut!((*from).quals)))
    }

    /// The facts of a whole condition; remembers which of its conjuncts become known late.
    unsafe fn whole(&mut self, query: *mut pg_sys::Query, whole: *mut *mut pg_sys::Node) -> Vec<Fact> {
        self.understood = Understood::default();
        let facts = self.facts(*whole);
        let mut conjuncts = Vec::new();
        conjuncts_of(*whole, &mut conjuncts);
        let understood = std::mem::take(&mut self.understood);
        let late = conjuncts.into_iter().filter_map(|conjunct| understood.late(conjunct));
        self.late.extend(late.map(|condition| Late { query, whole, condition }));
        facts
    }

    pub(super) unsafe fn node(&mut self, query: *mut pg_sys::Query, node: *mut pg_sys::Node) -> Node {
        match tag(node) {
            pg_sys::NodeTag::T_FromExpr => self.from(query, node.cast()),
            pg_sys::NodeTag::T_RangeTblRef => self.leaf(query, (*node.cast::<pg_sys::RangeTblRef>()).rtindex as u32),
            pg_sys::NodeTag::T_JoinExpr => {
                let join = node.cast::<pg_sys::JoinExpr>();
                let (mut left, mut right) = (self.node(query, (*join).larg), self.node(query, (*join).rarg));
                let on = match (*join).jointype {
                    // One more condition that cannot be merged or hashed, a full join would not take.
                    pg_sys::JoinType::JOIN_FULL => self.facts((*join).quals),
                    _ => self.whole(query, std::ptr::addr_of_mut!((*join).quals)),
                };
                let kind = match (*join).jointype {
                    pg_sys::JoinType::JOIN_INNER => Join::Inner,
                    pg_sys::JoinType::JOIN_LEFT => Join::Left,
                    pg_sys::JoinType::JOIN_RIGHT => {
                        std::mem::swap(&mut left, &mut right);
                        Join::Left
                    }
                    _ => Join::Full,
                };
                Node::Join(kind, Box::new(left), Box::new(right), on)
            }
            _ => Node::Local,
        }
    }

    unsafe fn leaf(&mut self, query: *mut pg_sys::Query, rti: u32) -> Node {
        let Some(entry) = rte(query, rti) else { return Node::Local };
        match (*entry).rtekind {
            pg_sys::RTEKind::RTE_RELATION => self.relation(query, rti, entry),
            pg_sys::RTEKind::RTE_SUBQUERY => self.derived(query, rti, (*entry).subquery),
            pg_sys::RTEKind::RTE_CTE => self.cte(query, rti, entry),
            pg_sys::RTEKind::RTE_VALUES => self.values(query, rti, (*entry).values_lists),
            _ => Node::Local,
        }
    }

    unsafe fn relation(&mut self, query: *mut pg_sys::Query, rti: u32, entry: *mut pg_sys::RangeTblEntry) -> Node {
        // FROM ONLY: the logical table itself holds no rows.
        let Some(table) = self.catalog.table((*entry).relid).cloned().filter(|_| (*entry).inh) else {
            return Node::Local;
        };
        let policies = (*entry).securityQuals;
        let count = items::<pg_sys::Node>(policies).count();
        let cells = (0..count).map(|at| (*policies).elements.add(at).cast::<*mut pg_sys::Node>()).collect::<Vec<_>>();
        let own: Vec<Fact> = cells.into_iter().flat_map(|cell| self.whole(query, cell)).collect();
        let id = self.tables.len();
        let key = self.columns.number(query, rti, table.key);
        self.tables.push(Reference { query, rti, table, usage: Usage::Read });
        Node::Table(TableRef { id, key }, own)
    }

    unsafe fn cte(&mut self, query: *mut pg_sys::Query, rti: u32, entry: *mut pg_sys::RangeTblEntry) -> Node {
        let name = encoding::utf8_string((*entry).ctename);
        let Some(depth) = self.levels.len().checked_sub(1 + (*entry).ctelevelsup as usize) else { return Node::Local };
        let Some(body) = self.inlined.get(&(self.levels[depth] as usize, name)).copied() else { return Node::Local };
        // The body stands below the level of its WITH, not below this one.
        let inner = self.levels.split_off(depth + 1);
        let arms = self.arms(body);
        self.levels.extend(inner);
        let values = self.fixed_outputs(query, rti, body);
        Node::From(vec![self.derive(query, rti, arms)], values)
    }

    unsafe fn derived(&mut self, query: *mut pg_sys::Query, rti: u32, body: *mut pg_sys::Query) -> Node {
        let arms = self.arms(body);
        let values = self.fixed_outputs(query, rti, body);
        match (self.derive(query, rti, arms), values) {
            (node, values) if values.is_empty() => node,
            (node, values) => Node::From(vec![node], values),
        }
    }

    fn derive(&mut self, query: *mut pg_sys::Query, rti: u32, arms: Arms) -> Node {
        let outputs = arms.open.iter().enumerate().map(|(at, open)| Output {
            outer: self.columns.number(query, rti, at as i16 + 1),
            inner: arms.levels.iter().map(|(_, outputs)| outputs.get(at).copied().flatten()).collect(),
            open: *open,
        });
        let outputs = outputs.collect();
        Node::Derived(Derived { arms: arms.levels.into_iter().map(|(level, _)| level).collect(), outputs })
    }
}

/// The conjuncts of a condition.
pub(super) unsafe fn conjuncts_of(node: *mut pg_sys::Node, conjuncts: &mut Vec<*mut pg_sys::Node>) {
    match tag(node) {
        pg_sys::NodeTag::T_Invalid => {}
        pg_sys::NodeTag::T_List => items::<pg_sys::Node>(node.cast()).for_each(|n| conjuncts_of(n, conjuncts)),
        pg_sys::NodeTag::T_BoolExpr if (*node.cast::<pg_sys::BoolExpr>()).boolop == pg_sys::BoolExprType::AND_EXPR => {
            conjuncts_of((*node.cast::<pg_sys::BoolExpr>()).args.cast(), conjuncts);
        }
        _ => conjuncts.push(node),
    }
}
