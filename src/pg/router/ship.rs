//! A statement rewritten for its shard: what must not or cannot be computed there becomes a parameter.
//!
//! Decides, for each expression, who computes it. Here, once, before the statement is sent: what depends on the session,
//! the moment or a function of one's own, and on no row; and the values of an INSERT that are volatile, once for their
//! row. There: all else, if every function in it is built in and its meaning depends on nothing but its arguments and the
//! settings that a connection carries over ([`super::stable`]). Constants in conditions and in written values become
//! parameters too, so that one statement on the shard serves all of them.

use std::ffi::c_void;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::merge::shallow;
use super::security::with_policies;
use super::stable::is_carried_over;
use super::whole::{source_of_rows, Obstacle, NOT_SHIPPABLE, SHAPE, VOLATILE};
use crate::pg::catalog::{domain_base, Known};
use crate::pg::query::tree::{cast, cells, items, nth, rte, tag, walk_expression};
use crate::pg::raw;
use crate::pg::transfer::{Form, FIRST_VARIABLE};

/// Where a parameter of ours says that it stands in the text.
const SHIPPED: i32 = -7;

/// A statement for a shard.
pub struct Shipment {
    pub query: *mut pg_sys::Query,
    /// What its parameters are, from $1 on: expressions over the statement's own parameters.
    pub inputs: Vec<*mut pg_sys::Node>,
}

pub(super) struct Shipper<'a> {
    known: &'a Known<'a>,
    inputs: Vec<*mut pg_sys::Node>,
    pub(super) obstacle: Option<Obstacle>,
    /// Constants become parameters.
    pub(super) lifts: bool,
    /// Each expression is computed for one row only.
    pub(super) once: bool,
}

/// Rewrites a copy of `query`.
///
/// # Safety
/// `query` must be valid and have passed [`super::whole::key`].
pub unsafe fn ship(query: *mut pg_sys::Query, known: &Known) -> Result<Shipment, Obstacle> {
    let mut shipper = Shipper { known, inputs: Vec::new(), obstacle: None, lifts: false, once: false };
    let query = shipper.level(query);
    match shipper.obstacle {
        Some(obstacle) => Err(obstacle),
        None => Ok(Shipment { query, inputs: shipper.inputs }),
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn step(node: *mut pg_sys::Node, context: *mut c_void) -> *mut pg_sys::Node {
    match node.is_null() {
        true => node,
        false => (*context.cast::<Shipper<'_>>()).node(node),
    }
}

impl Shipper<'_> {
    fn context(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }

    unsafe fn level(&mut self, query: *mut pg_sys::Query) -> *mut pg_sys::Query {
        let before = (self.lifts, self.once);
        (self.lifts, self.once) = (false, false);
        let query = self.written_values(with_policies(query));
        let shipped = raw::query_tree_mutator(query, Some(step), self.context());
        (self.lifts, self.once) = before;
        // The table below a view that is written would be written out a second time.
        if let Some(target) = rte(shipped, (*shipped).resultRelation as u32) {
            (*target).inFromCl = false;
        }
        shipped
    }

    /// The values that an INSERT or UPDATE gives, which are looked at before the rest of their level: a copy of the query.
    unsafe fn written_values(&mut self, query: *mut pg_sys::Query) -> *mut pg_sys::Query {
        if (*query).commandType == pg_sys::CmdType::CMD_MERGE {
            return self.merge(query);
        }
        let inserts = (*query).commandType == pg_sys::CmdType::CMD_INSERT;
        if !inserts && (*query).commandType != pg_sys::CmdType::CMD_UPDATE {
            return query;
        }
        let copy = pg_sys::palloc(std::mem::size_of::<pg_sys::Query>()).cast::<pg_sys::Query>();
        copy.copy_from_nonoverlapping(query, 1);
        let values = items::<pg_sys::RangeTblEntry>((*query).rtable)
            .enumerate()
            .find(|(_, entry)| (**entry).rtekind == pg_sys::RTEKind::RTE_VALUES);
        if let Some(at) = inserts.then(|| source_of_rows(query)).flatten() {
            self.insert_select(copy, at);
            return copy;
        }
        (self.lifts, self.once) = (true, inserts);
        match values {
            Some((at, entry)) if inserts => {
                let own = pg_sys::copyObjectImpl(entry.cast()).cast::<pg_sys::RangeTblEntry>();
                let rows = self.rows_in_order(query, entry);
                (*own).values_lists = self.list(rows);
                let table = pg_sys::list_copy((*query).rtable);
                (*(*table).elements.add(at)).ptr_value = own.cast();
                (*copy).rtable = table;
                (*copy).targetList = in_order((*query).targetList, at as i32 + 1);
            }
            _ => {
                self.once = inserts && (*(*query).jointree).fromlist.is_null();
                (*copy).targetList = self.list((*query).targetList);
            }
        }
        (self.lifts, self.once) = (false, false);
        copy
    }

    /// The rows of an INSERT's VALUES with a value for each target, in the targets' order, as the text will have them:
    /// rewriting has sorted the targets, and added defaults that stand beside the rows.
    unsafe fn rows_in_order(
        &mut self,
        query: *mut pg_sys::Query,
        values: *mut pg_sys::RangeTblEntry,
    ) -> *mut pg_sys::List {
        let mut rows = std::ptr::null_mut();
        for row in items::<pg_sys::List>((*values).values_lists) {
            let mut ordered = std::ptr::null_mut();
            for target in items::<pg_sys::TargetEntry>((*query).targetList) {
                let expr = (*target).expr.cast::<pg_sys::Node>();
                let value = match cast::<pg_sys::Var>(expr, pg_sys::NodeTag::T_Var) {
                    Some(var) => nth::<pg_sys::Node>(row, (*var).varattno as usize - 1),
                    None if stands_alone(expr) => Some(expr),
                    None => None,
                };
                if value.is_none() {
                    self.obstacle = Some(SHAPE);
                }
                ordered = pg_sys::lappend(ordered, value.unwrap_or(expr).cast());
            }
            rows = pg_sys::lappend(rows, ordered.cast());
        }
        rows
    }

    pub(super) unsafe fn list(&mut self, list: *mut pg_sys::List) -> *mut pg_sys::List {
        raw::expression_tree_mutator(list.cast(), Some(step), self.context()).cast()
    }

    pub(super) unsafe fn node(&mut self, node: *mut pg_sys::Node) -> *mut pg_sys::Node {
        if self.obstacle.is_some() {
            return node;
        }
        match tag(node) {
            pg_sys::NodeTag::T_Query => return self.level(node.cast()).cast(),
            pg_sys::NodeTag::T_Param => return self.param(node.cast()),
            pg_sys::NodeTag::T_Const => return self.constant(node.cast()),
            pg_sys::NodeTag::T_OnConflictExpr => return self.conflict(node.cast()),
            pg_sys::NodeTag::T_CommonTableExpr => return self.with_item(node.cast()),
            pg_sys::NodeTag::T_FromExpr | pg_sys::NodeTag::T_JoinExpr => {
                // Conditions are matched with nothing else, unlike what is selected or grouped by.
                let before = std::mem::replace(&mut self.lifts, true);
                let shipped = raw::expression_tree_mutator(node, Some(step), self.context());
                self.lifts = before;
                return shipped;
            }
            _ => {}
        }
        if !has_common_parts(node, self.known) {
            self.obstacle = Some(NOT_SHIPPABLE);
            return node;
        }
        if is_computed(node) {
            if let Some(parameter) = self.computed_here(node) {
                return parameter;
            }
            if !is_known_there(node, self.known) {
                self.obstacle = Some(NOT_SHIPPABLE);
                return node;
            }
        }
        let before = self.lifts;
        self.lifts &= !writes_constants(node);
        let shipped = raw::expression_tree_mutator(node, Some(step), self.context());
        self.lifts = before;
        shipped
    }

    /// A CTE without its SEARCH and CYCLE clauses, which rewriting has put into its query.
    unsafe fn with_item(&mut self, cte: *mut pg_sys::CommonTableExpr) -> *mut pg_sys::Node {
        let copy = shallow(cte);
        ((*copy).search_clause, (*copy).cycle_clause) = (std::ptr::null_mut(), std::ptr::null_mut());
        raw::expression_tree_mutator(copy.cast(), Some(step), self.context())
    }

    /// An ON CONFLICT, but for its list of all the table's columns, which is not in the text.
    unsafe fn conflict(&mut self, conflict: *mut pg_sys::OnConflictExpr) -> *mut pg_sys::Node {
        let copy = pg_sys::palloc(std::mem::size_of::<pg_sys::OnConflictExpr>()).cast::<pg_sys::OnConflictExpr>();
        copy.copy_from_nonoverlapping(conflict, 1);
        (*copy).exclRelTlist = std::ptr::null_mut();
        let shipped = raw::expression_tree_mutator(copy.cast(), Some(step), self.context());
        (*shipped.cast::<pg_sys::OnConflictExpr>()).exclRelTlist = (*conflict).exclRelTlist;
        shipped
    }

    /// A parameter of the statement's own; $n of another number on the shard.
    unsafe fn param(&mut self, param: *mut pg_sys::Param) -> *mut pg_sys::Node {
        match (*param).paramkind {
            // The values that are written have been here before.
            pg_sys::ParamKind::PARAM_EXTERN if (*param).location != SHIPPED => self.input(param.cast()),
            _ => param.cast(),
        }
    }

    unsafe fn constant(&mut self, constant: *mut pg_sys::Const) -> *mut pg_sys::Node {
        let kind = (*constant).consttype;
        let plain = !(*constant).constisnull && Form::of(kind, -1) != Form::Other && kind != pg_sys::BOOLOID;
        if self.lifts && plain {
            return self.input(constant.cast());
        }
        if !self.known.kind(kind) || (!(*constant).constisnull && names_object(kind, (*constant).constvalue)) {
            self.obstacle = Some(NOT_SHIPPABLE);
        }
        constant.cast()
    }

    /// The parameter for an expression that is computed here, if it has to be, and can be.
    unsafe fn computed_here(&mut self, node: *mut pg_sys::Node) -> Option<*mut pg_sys::Node> {
        let must = pg_sys::contain_mutable_functions(node) || !is_known_there(node, self.known);
        if !must || !stands_alone(node) {
            return None;
        }
        if pg_sys::contain_volatile_functions(node) && !self.once {
            if is_known_throughout(node, self.known) {
                return None;
            }
            self.obstacle = Some(VOLATILE);
            return Some(node);
        }
        Some(self.input(node))
    }

    /// The parameter that stands for `node`; the same for what is the same.
    unsafe fn input(&mut self, node: *mut pg_sys::Node) -> *mut pg_sys::Node {
        let is_volatile = pg_sys::contain_volatile_functions(node);
        let known = self.inputs.iter().position(|input| !is_volatile && pg_sys::equal((*input).cast(), node.cast()));
        let number = known.unwrap_or_else(|| {
            self.inputs.push(pg_sys::copyObjectImpl(node.cast()).cast());
            self.inputs.len() - 1
        });
        let own = pg_sys::exprType(node);
        if !self.known.values(own) || is_name_type(own) {
            self.obstacle = Some(NOT_SHIPPABLE);
        }
        // A domain's value has been checked here. There, it is one of the type below.
        let base = domain_base(own).filter(|_| !self.known.kind(own));
        let kind = base.unwrap_or(own);
        let param = pgrx::PgBox::<pg_sys::Param>::alloc_node(pg_sys::NodeTag::T_Param).into_pg();
        (*param).paramkind = pg_sys::ParamKind::PARAM_EXTERN;
        (*param).paramid = number as i32 + 1;
        (*param).paramtype = kind;
        (*param).paramtypmod = if base.is_some() { -1 } else { pg_sys::exprTypmod(node) };
        (*param).paramcollid = pg_sys::exprCollation(node);
        (*param).location = SHIPPED;
        match is_own_type(own) {
            true => cast_to_itself(param),
            false => param.cast(),
        }
    }
}

/// A parameter whose type is not declared, as it has another number on the shard, but written beside it.
unsafe fn cast_to_itself(param: *mut pg_sys::Param) -> *mut pg_sys::Node {
    let relabel = pgrx::PgBox::<pg_sys::RelabelType>::alloc_node(pg_sys::NodeTag::T_RelabelType).into_pg();
    (*relabel).arg = param.cast();
    (*relabel).resulttype = (*param).paramtype;
    (*relabel).resulttypmod = -1;
    (*relabel).resultcollid = (*param).paramcollid;
    (*relabel).relabelformat = pg_sys::CoercionForm::COERCE_EXPLICIT_CAST;
    (*relabel).location = -1;
    relabel.cast()
}

/// Whether Postgres writes constants below `node` out as something else than expressions: the length of `::varchar(3)`, the
/// field of EXTRACT, the form of NORMALIZE, the parts of XML functions. It would leave out a parameter there, or take it for
/// a constant and crash.
unsafe fn writes_constants(node: *mut pg_sys::Node) -> bool {
    let syntax = pg_sys::CoercionForm::COERCE_SQL_SYNTAX;
    pg_sys::exprIsLengthCoercion(node, std::ptr::null_mut())
        || cast::<pg_sys::FuncExpr>(node, pg_sys::NodeTag::T_FuncExpr).is_some_and(|call| (*call).funcformat == syntax)
        || tag(node) == pg_sys::NodeTag::T_XmlExpr
}

/// The targets of an INSERT, which now are the columns of its VALUES one by one.
unsafe fn in_order(targets: *mut pg_sys::List, values: i32) -> *mut pg_sys::List {
    let mut ordered = std::ptr::null_mut();
    for (at, target) in items::<pg_sys::TargetEntry>(targets).enumerate() {
        let expr = (*target).expr.cast();
        let (kind, typmod) = (pg_sys::exprType(expr), pg_sys::exprTypmod(expr));
        let column = pg_sys::makeVar(values as _, at as i16 + 1, kind, typmod, pg_sys::exprCollation(expr), 0);
        let own = pg_sys::makeTargetEntry(column.cast(), (*target).resno, (*target).resname, false);
        ordered = pg_sys::lappend(ordered, own.cast());
    }
    ordered
}

/// A type that is not the same in every database.
fn is_own_type(kind: pg_sys::Oid) -> bool {
    kind.to_u32() >= FIRST_VARIABLE
}

/// Types whose values are names of objects, which have other numbers on a shard, if they are there at all.
fn is_name_type(kind: pg_sys::Oid) -> bool {
    matches!(
        kind,
        pg_sys::REGPROCOID
            | pg_sys::REGPROCEDUREOID
            | pg_sys::REGOPEROID
            | pg_sys::REGOPERATOROID
            | pg_sys::REGCLASSOID
            | pg_sys::REGCOLLATIONOID
            | pg_sys::REGTYPEOID
            | pg_sys::REGROLEOID
            | pg_sys::REGNAMESPACEOID
            | pg_sys::REGCONFIGOID
            | pg_sys::REGDICTIONARYOID
    )
}

/// Whether a constant names an object that is not the same everywhere. (Those that come with Postgres, such as the
/// configurations of text search, are.)
fn names_object(kind: pg_sys::Oid, value: pg_sys::Datum) -> bool {
    is_name_type(kind) && value.value() as u32 >= pg_sys::FirstNormalObjectId
}

/// Whether the shard knows the operators and the collation of `node` itself; and its type, if it is a column's.
unsafe fn has_common_parts(node: *const pg_sys::Node, known: &Known) -> bool {
    let common = |operator: pg_sys::Oid| known.operator(operator);
    match tag(node) {
        pg_sys::NodeTag::T_Var => known.values((*node.cast::<pg_sys::Var>()).vartype),
        pg_sys::NodeTag::T_OpExpr | pg_sys::NodeTag::T_DistinctExpr | pg_sys::NodeTag::T_NullIfExpr => {
            common((*node.cast::<pg_sys::OpExpr>()).opno)
        }
        pg_sys::NodeTag::T_ScalarArrayOpExpr => common((*node.cast::<pg_sys::ScalarArrayOpExpr>()).opno),
        pg_sys::NodeTag::T_RowCompareExpr => {
            cells((*node.cast::<pg_sys::RowCompareExpr>()).opnos).all(|cell| common(cell.oid_value))
        }
        pg_sys::NodeTag::T_SortGroupClause => {
            let clause = node.cast::<pg_sys::SortGroupClause>();
            common((*clause).eqop) && common((*clause).sortop)
        }
        pg_sys::NodeTag::T_CollateExpr => (*node.cast::<pg_sys::CollateExpr>()).collOid.to_u32() < FIRST_VARIABLE,
        _ => true,
    }
}

/// Nodes that compute a value, and might have a function in them.
unsafe fn is_computed(node: *const pg_sys::Node) -> bool {
    matches!(
        tag(node),
        pg_sys::NodeTag::T_FuncExpr
            | pg_sys::NodeTag::T_OpExpr
            | pg_sys::NodeTag::T_DistinctExpr
            | pg_sys::NodeTag::T_NullIfExpr
            | pg_sys::NodeTag::T_ScalarArrayOpExpr
            | pg_sys::NodeTag::T_BoolExpr
            | pg_sys::NodeTag::T_Aggref
            | pg_sys::NodeTag::T_WindowFunc
            | pg_sys::NodeTag::T_CoerceViaIO
            | pg_sys::NodeTag::T_ArrayCoerceExpr
            | pg_sys::NodeTag::T_ConvertRowtypeExpr
            | pg_sys::NodeTag::T_RelabelType
            | pg_sys::NodeTag::T_CoerceToDomain
            | pg_sys::NodeTag::T_CaseExpr
            | pg_sys::NodeTag::T_CoalesceExpr
            | pg_sys::NodeTag::T_MinMaxExpr
            | pg_sys::NodeTag::T_ArrayExpr
            | pg_sys::NodeTag::T_RowExpr
            | pg_sys::NodeTag::T_RowCompareExpr
            | pg_sys::NodeTag::T_SQLValueFunction
            | pg_sys::NodeTag::T_NextValueExpr
            | pg_sys::NodeTag::T_XmlExpr
            | pg_sys::NodeTag::T_NullTest
            | pg_sys::NodeTag::T_BooleanTest
            | pg_sys::NodeTag::T_FieldSelect
            | pg_sys::NodeTag::T_FieldStore
            | pg_sys::NodeTag::T_SubscriptingRef
    )
}

/// Whether `node` depends on no row and no subquery, so that it can be computed before the statement is sent.
///
/// # Safety
/// `node` must be NULL or a valid expression.
pub(super) unsafe fn stands_alone(node: *mut pg_sys::Node) -> bool {
    let mut alone = !pg_sys::expression_returns_set(node);
    walk_expression(node, &mut |below| {
        let depends = matches!(
            tag(below),
            pg_sys::NodeTag::T_Var
                | pg_sys::NodeTag::T_SubLink
                | pg_sys::NodeTag::T_Aggref
                | pg_sys::NodeTag::T_WindowFunc
                | pg_sys::NodeTag::T_GroupingFunc
                | pg_sys::NodeTag::T_CaseTestExpr
                | pg_sys::NodeTag::T_CoerceToDomainValue
                | pg_sys::NodeTag::T_SetToDefault
                | pg_sys::NodeTag::T_CurrentOfExpr
        );
        let internal = cast::<pg_sys::Param>(below, pg_sys::NodeTag::T_Param)
            .is_some_and(|param| (*param).paramkind != pg_sys::ParamKind::PARAM_EXTERN);
        alone &= !depends && !internal;
        alone
    });
    alone
}

/// Whether the shard computes `node` itself (what is below it aside) as we do.
unsafe fn is_known_there(node: *mut pg_sys::Node, known: &Known) -> bool {
    let own_kind = match tag(node) {
        // Rows of a type that has no name.
        pg_sys::NodeTag::T_RowExpr => (*node.cast::<pg_sys::RowExpr>()).row_typeid != pg_sys::RECORDOID,
        pg_sys::NodeTag::T_XmlExpr | pg_sys::NodeTag::T_NextValueExpr | pg_sys::NodeTag::T_SQLValueFunction => true,
        _ => !known.kind(pg_sys::exprType(node)),
    };
    !own_kind && !pg_sys::check_functions_in_node(node, Some(is_foreign), std::ptr::from_ref(known).cast_mut().cast())
}

/// Whether the shard knows `node` and all that is below it, volatile functions too.
unsafe fn is_known_throughout(node: *mut pg_sys::Node, known: &Known) -> bool {
    let mut all = true;
    walk_expression(node, &mut |below| {
        all &= !is_computed(below) || is_known_there(below, known);
        all
    });
    all
}

/// Whether a function's meaning on a shard may differ from here.
#[pg_guard]
unsafe extern "C-unwind" fn is_foreign(function: pg_sys::Oid, context: *mut c_void) -> bool {
    if function.to_u32() >= FIRST_VARIABLE || pg_sys::func_volatile(function) as u8 == pg_sys::PROVOLATILE_VOLATILE {
        return !(*context.cast::<Known<'_>>()).function(function);
    }
    match pg_sys::func_volatile(function) as u8 {
        pg_sys::PROVOLATILE_IMMUTABLE => false,
        _ => !is_carried_over(function) && !(*context.cast::<Known<'_>>()).function(function),
    }
}
