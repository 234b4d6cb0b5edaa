//! A query tree, read into the core's plain description of it.
//!
//! Here stand the description and what reading remembers. The parts of a tree are read, and pointers followed, by
//! [`super::levels`], [`super::join_tree`], [`super::facts`], [`super::sublinks`], [`super::targets`] and
//! [`super::outputs`]. What always holds: every reference to a logical table that the statement reads or writes is in
//! [`Reading::tables`] under the id that its leaf has in [`Reading::level`]; shapes that are not understood make it reach
//! everywhere, never less.

use std::collections::HashMap;
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::route::{Column, Derived, Level, Node, Operand};

use super::columns::Columns;
use super::late::{Late, Understood};
use crate::pg::catalog::{Catalog, LogicalTable};

/// How a statement uses a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Usage {
    /// Its rows are read, and changed if it is the target of UPDATE or DELETE.
    Read,
    /// Rows with these keys are inserted; `None`: each row's key is known only when it comes.
    Insert(Option<Vec<Operand>>),
    /// It is the target of MERGE: rows that match, that are inserted, or that match nothing.
    Merge,
}

/// A reference to a logical table.
pub struct Reference {
    pub query: *mut pg_sys::Query,
    pub rti: u32,
    pub table: Rc<LogicalTable>,
    pub usage: Usage,
}

/// An UPDATE that assigns to the key of its target, and what it assigns.
pub struct Assigned {
    pub query: *mut pg_sys::Query,
    pub value: Operand,
}

/// A statement, read.
pub struct Reading {
    pub tables: Vec<Reference>,
    pub level: Level,
    pub late: Vec<Late>,
    pub assigned: Vec<Assigned>,
    /// The expressions behind `Operand::Deferred`, by its number; NULL for a subquery, whose value only the executor knows.
    pub values: Vec<*mut pg_sys::Node>,
}

/// A common table expression that is read where it is used.
type Inlined = HashMap<(usize, String), *mut pg_sys::Query>;

/// What reading needs to remember.
pub struct Reader<'a> {
    pub(super) catalog: &'a Catalog,
    params: pg_sys::ParamListInfo,
    planner: *mut pg_sys::PlannerInfo,
    pub columns: Columns,
    /// The queries around the current one, outermost first.
    pub levels: Vec<*mut pg_sys::Query>,
    /// Comparisons met in the condition being read.
    pub understood: Understood,
    pub values: Vec<*mut pg_sys::Node>,
    pub(super) late: Vec<Late>,
    pub(super) tables: Vec<Reference>,
    pub(super) assigned: Vec<Assigned>,
    pub(super) inlined: Inlined,
    /// Sublinks that stand by themselves in a WHERE, with the outer column of `outer = ANY (..)`.
    pub(super) required: HashMap<usize, Option<Column>>,
}

/// Reads `query`, with the parameter values that the planner was given.
///
/// # Safety
/// `query` must be a valid, rewritten query; `params` NULL or valid.
pub unsafe fn read(catalog: &Catalog, query: *mut pg_sys::Query, params: pg_sys::ParamListInfo) -> Reading {
    let mut reader = Reader {
        catalog,
        params,
        planner: std::ptr::null_mut(),
        columns: Columns::default(),
        levels: Vec::new(),
        understood: Understood::default(),
        values: Vec::new(),
        late: Vec::new(),
        tables: Vec::new(),
        assigned: Vec::new(),
        inlined: Inlined::new(),
        required: HashMap::new(),
    };
    let arms = reader.arms(query);
    let all = Derived { arms: arms.levels.into_iter().map(|(level, _)| level).collect(), outputs: Vec::new() };
    let level = level(Node::Derived(all));
    Reading { tables: reader.tables, level, late: reader.late, assigned: reader.assigned, values: reader.values }
}

/// A planner state with nothing but parameters in it.
///
/// # Safety
/// `params` must be NULL or valid.
pub unsafe fn bare_planner(params: pg_sys::ParamListInfo) -> *mut pg_sys::PlannerInfo {
    let root = pgrx::PgBox::<pg_sys::PlannerInfo>::alloc_node(pg_sys::NodeTag::T_PlannerInfo).into_pg();
    let global = pgrx::PgBox::<pg_sys::PlannerGlobal>::alloc_node(pg_sys::NodeTag::T_PlannerGlobal).into_pg();
    (*global).boundParams = params;
    (*root).glob = global;
    root
}

fn level(from: Node) -> Level {
    Level { from, sublinks: Vec::new(), apart: Vec::new(), always_yields: false }
}

impl Reader<'_> {
    /// A planner state with nothing but the parameters in it, for simplifying expressions.
    pub unsafe fn planner(&mut self) -> *mut pg_sys::PlannerInfo {
        if self.planner.is_null() {
            self.planner = bare_planner(self.params);
        }
        self.planner
    }
}
