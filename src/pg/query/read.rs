//! A query tree, read into the core's plain description of it.
//!
//! Pointers are followed here and in [`super::facts`] only. What always holds: every reference to a logical table that
//! the statement reads or writes is in [`Reading::tables`] under the id that its leaf has in [`Reading::level`];
//! shapes that are not understood make it reach everywhere, never less.

use std::collections::HashMap;
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::route::{Column, Derived, Fact, Join, Level, Node, Operand, Output, Sublink, TableRef};

use super::columns::{strip, Columns};
use super::late::{Late, Understood};
use super::tree::{cast, items, nth, rte, tag, walk_expression, walk_level};
use crate::pg::catalog::{Catalog, LogicalTable};
use crate::pg::encoding;

/// How a statement uses a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Usage {
    /// Its rows are read, and changed if it is the target of UPDATE or DELETE.
    Read,
    /// Rows with these keys are inserted; `None`: each row's key is known only when it comes.
    Insert(Option<Vec<Operand>>),
    /// It is the target of MERGE.
    Merge,
}

/// A reference to a logical table.
pub struct Reference {
    pub query: *mut pg_sys::Query,
    pub rti: u32,
    pub table: Rc<LogicalTable>,
    pub usage: Usage,
}

/// A statement, read.
pub struct Reading {
    pub tables: Vec<Reference>,
    pub level: Level,
    pub late: Vec<Late>,
    /// The expressions behind `Operand::Deferred`, by its number; NULL for a subquery, whose value only the executor knows.
    pub values: Vec<*mut pg_sys::Node>,
}

/// A common table expression that is read where it is used.
type Inlined = HashMap<(usize, String), *mut pg_sys::Query>;

/// What reading needs to remember.
pub struct Reader<'a> {
    catalog: &'a Catalog,
    params: pg_sys::ParamListInfo,
    planner: *mut pg_sys::PlannerInfo,
    pub columns: Columns,
    /// The queries around the current one, outermost first.
    pub levels: Vec<*mut pg_sys::Query>,
    /// Comparisons met in the condition being read.
    pub understood: Understood,
    pub values: Vec<*mut pg_sys::Node>,
    late: Vec<Late>,
    tables: Vec<Reference>,
    inlined: Inlined,
    /// Sublinks that stand by themselves in a WHERE, with the outer column of `outer = ANY (..)`.
    required: HashMap<usize, Option<Column>>,
}

/// The queries whose rows a subquery yields, with their output columns, and which of these a condition may be pushed to.
struct Arms {
    levels: Vec<(Level, Vec<Option<Column>>)>,
    open: Vec<bool>,
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
        inlined: Inlined::new(),
        required: HashMap::new(),
    };
    let arms = reader.arms(query);
    let all = Derived { arms: arms.levels.into_iter().map(|(level, _)| level).collect(), outputs: Vec::new() };
    let level = level(Node::Derived(all));
    Reading { tables: reader.tables, level, late: reader.late, values: reader.values }
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

    unsafe fn arms(&mut self, query: *mut pg_sys::Query) -> Arms {
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
        let from = match jointree.is_null() {
            true => Node::Local,
            false => self.from(query, jointree),
        };
        let sublinks = self.sublinks(query);
        let outputs = items::<pg_sys::TargetEntry>((*query).targetList)
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
            .collect();
        let grouped = (*query).hasAggs || !(*query).havingQual.is_null();
        let always_yields = (grouped && (*query).groupClause.is_null()) || !(*query).groupingSets.is_null();
        let open = open_outputs(query);
        Arms { levels: vec![(Level { from, sublinks, apart: Vec::new(), always_yields }, outputs)], open }
    }

    /// The target of INSERT or MERGE, which is not in the join tree.
    unsafe fn written(&mut self, query: *mut pg_sys::Query) {
        let rti = (*query).resultRelation as u32;
        let Some(entry) = rte(query, rti) else { return };
        let Some(table) = self.catalog.table((*entry).relid).cloned() else { return };
        let usage = match (*query).commandType {
            pg_sys::CmdType::CMD_INSERT => Usage::Insert(self.inserted_keys(query, &table)),
            pg_sys::CmdType::CMD_MERGE => Usage::Merge,
            _ => return,
        };
        self.tables.push(Reference { query, rti, table, usage });
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

    unsafe fn from(&mut self, query: *mut pg_sys::Query, from: *mut pg_sys::FromExpr) -> Node {
        let nodes: Vec<_> = items::<pg_sys::Node>((*from).fromlist).collect();
        let nodes = nodes.into_iter().map(|node| self.node(query, node)).collect();
        if (*query).commandType == pg_sys::CmdType::CMD_MERGE {
            // Up to 16 MERGE's ON stands here, which keeps source rows without a match.
            return Node::From(nodes, Vec::new());
        }
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

    unsafe fn node(&mut self, query: *mut pg_sys::Query, node: *mut pg_sys::Node) -> Node {
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
        self.derive(query, rti, arms)
    }

    unsafe fn derived(&mut self, query: *mut pg_sys::Query, rti: u32, body: *mut pg_sys::Query) -> Node {
        let arms = self.arms(body);
        self.derive(query, rti, arms)
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

    /// Remembers the sublinks that are conjuncts of a WHERE.
    unsafe fn note_required(&mut self, quals: *mut pg_sys::Node) {
        let mut conjuncts = Vec::new();
        conjuncts_of(quals, &mut conjuncts);
        for link in conjuncts.into_iter().filter_map(|n| cast::<pg_sys::SubLink>(n, pg_sys::NodeTag::T_SubLink)) {
            match (*link).subLinkType {
                pg_sys::SubLinkType::EXISTS_SUBLINK => {
                    self.required.insert(link as usize, None);
                }
                pg_sys::SubLinkType::ANY_SUBLINK => {
                    let outer = self.any_column((*link).testexpr);
                    self.required.insert(link as usize, outer);
                }
                _ => {}
            }
        }
    }

    /// The outer column of `outer = ANY (SELECT inner ..)`, if both are compared as they are.
    unsafe fn any_column(&mut self, test: *mut pg_sys::Node) -> Option<Column> {
        let op = cast::<pg_sys::OpExpr>(test, pg_sys::NodeTag::T_OpExpr)?;
        let param = cast::<pg_sys::Param>(nth((*op).args, 1)?, pg_sys::NodeTag::T_Param)?;
        let side = self.columns.side(nth((*op).args, 0)?, &self.levels)?;
        let inner = crate::pg::keys::KeyType::of((*param).paramtype)?;
        let equal = super::columns::is_equality((*op).opno, (*op).inputcollid)
            && super::columns::comparable(side.kind, inner.kind);
        equal.then_some(side.column)
    }

    unsafe fn sublinks(&mut self, query: *mut pg_sys::Query) -> Vec<Sublink> {
        if !(*query).hasSubLinks {
            return Vec::new();
        }
        let mut links: Vec<*mut pg_sys::SubLink> = Vec::new();
        walk_level(query, &mut |node| {
            links.extend(cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink));
            true
        });
        let after = computed_after(query);
        links.into_iter().map(|link| Sublink { after: after.contains(&link), ..self.sublink(link) }).collect()
    }

    unsafe fn sublink(&mut self, link: *mut pg_sys::SubLink) -> Sublink {
        let arms = self.arms((*link).subselect.cast());
        let noted = self.required.get(&(link as usize)).copied();
        let inner = arms.levels.first().and_then(|(_, outputs)| outputs.first().copied().flatten());
        let equal = match (noted.flatten(), inner, arms.levels.len(), arms.open.first()) {
            (Some(outer), Some(inner), 1, Some(true)) => Some((outer, inner)),
            _ => None,
        };
        let arms = arms.levels.into_iter().map(|(level, _)| level).collect();
        Sublink { arms, required: noted.is_some(), equal, after: false }
    }
}

/// The subqueries of an UPDATE that see the new row: in RETURNING and in the checks of policies and views.
unsafe fn computed_after(query: *mut pg_sys::Query) -> Vec<*mut pg_sys::SubLink> {
    let mut links = Vec::new();
    if (*query).commandType != pg_sys::CmdType::CMD_UPDATE {
        return links;
    }
    let checks = items::<pg_sys::WithCheckOption>((*query).withCheckOptions).map(|check| (*check).qual);
    for part in checks.chain([(*query).returningList.cast()]) {
        walk_expression(part, &mut |node| {
            links.extend(cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink));
            true
        });
    }
    links
}

/// The conjuncts of a condition.
unsafe fn conjuncts_of(node: *mut pg_sys::Node, conjuncts: &mut Vec<*mut pg_sys::Node>) {
    match tag(node) {
        pg_sys::NodeTag::T_Invalid => {}
        pg_sys::NodeTag::T_List => items::<pg_sys::Node>(node.cast()).for_each(|n| conjuncts_of(n, conjuncts)),
        pg_sys::NodeTag::T_BoolExpr if (*node.cast::<pg_sys::BoolExpr>()).boolop == pg_sys::BoolExprType::AND_EXPR => {
            conjuncts_of((*node.cast::<pg_sys::BoolExpr>()).args.cast(), conjuncts);
        }
        _ => conjuncts.push(node),
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

/// For each output column of `query`: whether leaving out rows with another value in it, before everything else that the
/// query does, only leaves out output rows with another value in it.
unsafe fn open_outputs(query: *mut pg_sys::Query) -> Vec<bool> {
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
