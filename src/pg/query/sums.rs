//! Sums and averages of which no shard could compute its part, made of such of which it can.
//!
//! Postgres splits an aggregate over partitions by its state. `sum` of `bigint` and `numeric`, and every `avg`, have states that
//! are no values which a shard could be asked for. So `avg(x)` becomes `sum(x)` divided by `count(x)`, and such a `sum(x)`
//! becomes `shardmap.numeric_sum(x)`, the sum of numerics with the sum itself as its state.
//!
//! What always holds: the values are those of Postgres' own aggregates, to the digit. Both add numerics exactly and divide
//! the sum by the count; floats are added as they are, in whatever order the shards answer. (Sources: numeric_avg,
//! float8_avg.) Leaves a query alone if another aggregate in it cannot be split: its rows come here anyway.
//! Read next: `fdw::partial`.

use std::ffi::c_void;
use std::ptr;

use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;

use super::tree::{cast, items, nth, subqueries, walk_level};
use crate::pg::catalog::Catalog;
use crate::pg::raw;

/// Source: catalog/pg_aggregate.h.
const AGGFINALFN: i16 = 5;
/// The operators `numeric / numeric` and `float8 / float8`. Source: catalog/pg_operator.dat.
const DIVIDE_NUMERIC: u32 = 1761;
const DIVIDE_FLOAT8: u32 = 593;

/// Rewrites the aggregates of `query`, and of the queries in it, that read logical tables.
///
/// # Safety
/// `query` must be valid, and the caller's own.
pub unsafe fn split(catalog: &Catalog, query: *mut pg_sys::Query) {
    subqueries(query).into_iter().for_each(|inner| split(catalog, inner));
    let mut tables = items::<pg_sys::RangeTblEntry>((*query).rtable);
    if !(*query).hasAggs
        || !(*query).groupingSets.is_null()
        || !tables
            .any(|entry| (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION && catalog.table((*entry).relid).is_some())
    {
        return;
    }
    let (mut all_split, mut any) = (true, false);
    walk_level(query, &mut |node| {
        if let Some(aggregate) = cast::<pg_sys::Aggref>(node, pg_sys::NodeTag::T_Aggref) {
            let becomes = Becomes::of(aggregate);
            any |= becomes.is_some();
            all_split &= becomes.is_some() || is_split(aggregate);
        }
        all_split
    });
    if any && all_split {
        let sum = numeric_sum();
        let context = ptr::addr_of!(sum).cast_mut().cast();
        (*query).targetList = raw::expression_tree_mutator((*query).targetList.cast(), Some(step), context).cast();
        (*query).havingQual = step((*query).havingQual, context);
    }
}

/// What an aggregate is made of instead.
enum Becomes {
    NumericSum,
    NumericAverage,
    /// The average of integers whose sum, by this function, is a bigint.
    IntegerAverage(u32),
    FloatAverage,
}

impl Becomes {
    unsafe fn of(aggregate: *const pg_sys::Aggref) -> Option<Self> {
        if !is_plain(aggregate) {
            return None;
        }
        match (*aggregate).aggfnoid.to_u32() {
            pg_sys::F_SUM_INT8 | pg_sys::F_SUM_NUMERIC => Some(Self::NumericSum),
            pg_sys::F_AVG_INT8 | pg_sys::F_AVG_NUMERIC => Some(Self::NumericAverage),
            pg_sys::F_AVG_INT2 => Some(Self::IntegerAverage(pg_sys::F_SUM_INT2)),
            pg_sys::F_AVG_INT4 => Some(Self::IntegerAverage(pg_sys::F_SUM_INT4)),
            pg_sys::F_AVG_FLOAT4 | pg_sys::F_AVG_FLOAT8 => Some(Self::FloatAverage),
            _ => None,
        }
    }
}

unsafe fn is_plain(aggregate: *const pg_sys::Aggref) -> bool {
    (*aggregate).agglevelsup == 0 && (*aggregate).aggdistinct.is_null() && (*aggregate).aggorder.is_null()
}

/// Whether Postgres itself can have parts of it computed by shards: its state is its result.
unsafe fn is_split(aggregate: *const pg_sys::Aggref) -> bool {
    is_plain(aggregate) && !has_final_function((*aggregate).aggfnoid)
}

/// Whether an aggregate makes its result of its state by a function.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn has_final_function(aggregate: Oid) -> bool {
    let cache = pg_sys::SysCacheIdentifier::AGGFNOID as i32;
    let tuple = pg_sys::SearchSysCache1(cache, aggregate.into());
    if tuple.is_null() {
        return true;
    }
    let mut is_null = false;
    let function = pg_sys::SysCacheGetAttr(cache, tuple, AGGFINALFN, &mut is_null);
    let has = is_null || Oid::from_datum(function, false) != Some(pg_sys::InvalidOid);
    pg_sys::ReleaseSysCache(tuple);
    has
}

/// The aggregate `shardmap.numeric_sum`.
unsafe fn numeric_sum() -> Oid {
    pg_sys::LookupFuncName(raw::name_list(c"shardmap", c"numeric_sum"), 1, [pg_sys::NUMERICOID].as_ptr(), false)
}

/// Whether `aggregate` is `shardmap.numeric_sum`. Looks nothing up for those that are built in.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn is_numeric_sum(aggregate: Oid) -> bool {
    aggregate.to_u32() >= pg_sys::FirstNormalObjectId && aggregate == numeric_sum()
}

#[pg_guard]
unsafe extern "C-unwind" fn step(node: *mut pg_sys::Node, context: *mut c_void) -> *mut pg_sys::Node {
    if node.is_null() || (*node).type_ == pg_sys::NodeTag::T_Query {
        return node;
    }
    let aggregate = cast::<pg_sys::Aggref>(node, pg_sys::NodeTag::T_Aggref);
    match aggregate.and_then(|aggregate| Some((aggregate, Becomes::of(aggregate)?))) {
        Some((aggregate, becomes)) => replaced(aggregate, becomes, *context.cast::<Oid>()),
        None => raw::expression_tree_mutator(node, Some(step), context),
    }
}

unsafe fn replaced(aggregate: *const pg_sys::Aggref, becomes: Becomes, numeric_sum: Oid) -> *mut pg_sys::Node {
    let (numeric, float8) = (pg_sys::NUMERICOID, pg_sys::FLOAT8OID);
    let divided_numeric = |sum| {
        let count = called(pg_sys::F_NUMERIC_INT8, numeric, counted(aggregate));
        divided(DIVIDE_NUMERIC, pg_sys::F_NUMERIC_DIV, numeric, [sum, count])
    };
    match becomes {
        Becomes::NumericSum => summed(aggregate, numeric_sum, numeric),
        Becomes::NumericAverage => divided_numeric(summed(aggregate, numeric_sum, numeric)),
        Becomes::IntegerAverage(function) => {
            let sum = with_function(aggregate, function.into(), pg_sys::INT8OID);
            divided_numeric(called(pg_sys::F_NUMERIC_INT8, numeric, sum.cast()))
        }
        Becomes::FloatAverage => {
            let sum = summed(aggregate, pg_sys::F_SUM_FLOAT8.into(), float8);
            let count = called(pg_sys::F_FLOAT8_INT8, float8, counted(aggregate));
            divided(DIVIDE_FLOAT8, pg_sys::F_FLOAT8DIV, float8, [sum, count])
        }
    }
}

/// `aggregate` with another function, whose result is of `kind`.
unsafe fn with_function(aggregate: *const pg_sys::Aggref, function: Oid, kind: Oid) -> *mut pg_sys::Aggref {
    let other = pg_sys::copyObjectImpl(aggregate.cast()).cast::<pg_sys::Aggref>();
    (*other).aggfnoid = function;
    (*other).aggtype = kind;
    other
}

/// `aggregate` as the sum, by `function`, of its argument as a value of `kind`.
unsafe fn summed(aggregate: *const pg_sys::Aggref, function: Oid, kind: Oid) -> *mut pg_sys::Node {
    let sum = with_function(aggregate, function, kind);
    (*sum).aggargtypes = pg_sys::lappend_oid(ptr::null_mut(), kind);
    if let Some(argument) = nth::<pg_sys::TargetEntry>((*sum).args, 0) {
        (*argument).expr = match pg_sys::exprType((*argument).expr.cast()) {
            pg_sys::INT8OID => called(pg_sys::F_NUMERIC_INT8, kind, (*argument).expr.cast()).cast(),
            pg_sys::FLOAT4OID => called(pg_sys::F_FLOAT8_FLOAT4, kind, (*argument).expr.cast()).cast(),
            _ => (*argument).expr,
        };
    }
    sum.cast()
}

/// Makes a `shardmap.numeric_sum` the `sum` of every Postgres, for a shard.
///
/// # Safety
/// `sum` must be valid, and the caller's own.
pub unsafe fn name_built_in(sum: *mut pg_sys::Aggref) {
    (*sum).aggfnoid = pg_sys::F_SUM_NUMERIC.into();
    let Some(argument) = nth::<pg_sys::TargetEntry>((*sum).args, 0) else { return };
    let Some(cast) = cast::<pg_sys::FuncExpr>((*argument).expr.cast(), pg_sys::NodeTag::T_FuncExpr) else { return };
    if (*cast).funcid.to_u32() == pg_sys::F_NUMERIC_INT8 {
        if let Some(integer) = nth::<pg_sys::Expr>((*cast).args, 0) {
            (*sum).aggfnoid = pg_sys::F_SUM_INT8.into();
            (*sum).aggargtypes = pg_sys::lappend_oid(ptr::null_mut(), pg_sys::INT8OID);
            (*argument).expr = integer;
        }
    }
}

/// `aggregate` as the count of what it aggregates.
unsafe fn counted(aggregate: *const pg_sys::Aggref) -> *mut pg_sys::Node {
    with_function(aggregate, pg_sys::F_COUNT_ANY.into(), pg_sys::INT8OID).cast()
}

unsafe fn called(function: u32, kind: Oid, argument: *mut pg_sys::Node) -> *mut pg_sys::Node {
    let form = pg_sys::CoercionForm::COERCE_EXPLICIT_CAST;
    let arguments = pg_sys::lappend(ptr::null_mut(), argument.cast());
    pg_sys::makeFuncExpr(function.into(), kind, arguments, pg_sys::InvalidOid, pg_sys::InvalidOid, form).cast()
}

/// The sum of nothing is NULL, so that nothing is divided by 0.
unsafe fn divided(operator: u32, function: u32, kind: Oid, [sum, count]: [*mut pg_sys::Node; 2]) -> *mut pg_sys::Node {
    let none = pg_sys::InvalidOid;
    let quotient = pg_sys::make_opclause(operator.into(), kind, false, sum.cast(), count.cast(), none, none);
    (*quotient.cast::<pg_sys::OpExpr>()).opfuncid = function.into();
    quotient.cast()
}
