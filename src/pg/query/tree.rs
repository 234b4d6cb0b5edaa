//! Small safe-to-use readers of Postgres' lists and trees.

use std::ffi::c_void;

use pgrx::pg_sys;
use pgrx::prelude::*;

/// The cells of a list, of pointers, numbers or OIDs.
///
/// # Safety
/// `list` must be NIL or a valid list that outlives the iterator.
pub unsafe fn cells(list: *const pg_sys::List) -> impl DoubleEndedIterator<Item = pg_sys::ListCell> {
    let length = if list.is_null() { 0 } else { (*list).length as usize };
    (0..length).map(move |at| *(*list).elements.add(at))
}

/// The elements of a list of pointers.
///
/// # Safety
/// `list` must be NIL or a valid list of pointers to `T` that outlives the iterator.
pub unsafe fn items<T>(list: *const pg_sys::List) -> impl DoubleEndedIterator<Item = *mut T> {
    cells(list).map(|cell| cell.ptr_value.cast::<T>())
}

/// The element at position `at`, counted from 0.
///
/// # Safety
/// As [`items`].
pub unsafe fn nth<T>(list: *const pg_sys::List, at: usize) -> Option<*mut T> {
    items(list).nth(at)
}

/// The range table entry number `rti`, counted from 1.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn rte(query: *const pg_sys::Query, rti: u32) -> Option<*mut pg_sys::RangeTblEntry> {
    nth((*query).rtable, (rti as usize).checked_sub(1)?)
}

/// The tag of a node, or `T_Invalid` for NULL.
///
/// # Safety
/// `node` must be NULL or a valid node.
pub unsafe fn tag<T>(node: *const T) -> pg_sys::NodeTag {
    match node.is_null() {
        true => pg_sys::NodeTag::T_Invalid,
        false => (*node.cast::<pg_sys::Node>()).type_,
    }
}

/// Casts a node whose tag is `wanted`.
///
/// # Safety
/// `node` must be NULL or a valid node; `T` must be the struct of `wanted`.
pub unsafe fn cast<T>(node: *mut pg_sys::Node, wanted: pg_sys::NodeTag) -> Option<*mut T> {
    (tag(node) == wanted).then(|| node.cast())
}

/// What a walk calls: with each node; returns whether to go on below it.
type Visitor<'a> = &'a mut dyn FnMut(*mut pg_sys::Node) -> bool;

#[pg_guard]
unsafe extern "C-unwind" fn step(node: *mut pg_sys::Node, context: *mut c_void) -> bool {
    if node.is_null() {
        return false;
    }
    let visitor = context.cast::<Visitor<'_>>();
    if (*visitor)(node) && tag(node) != pg_sys::NodeTag::T_Query {
        pg_sys::expression_tree_walker(node, Some(step), context);
    }
    false
}

/// Visits `node` and the nodes below it, without entering subqueries' Query nodes.
///
/// # Safety
/// `node` must be NULL or a valid expression.
pub unsafe fn walk_expression(node: *mut pg_sys::Node, visit: &mut dyn FnMut(*mut pg_sys::Node) -> bool) {
    let mut visitor: Visitor<'_> = visit;
    step(node, std::ptr::addr_of_mut!(visitor).cast());
}

/// Visits every expression of one query level: neither subqueries in FROM nor CTEs, nor the alias lists of joins; of a
/// sublink, its node and its test expression.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn walk_level(query: *mut pg_sys::Query, visit: &mut dyn FnMut(*mut pg_sys::Node) -> bool) {
    let mut visitor: Visitor<'_> = visit;
    let flags = pg_sys::QTW_IGNORE_RT_SUBQUERIES | pg_sys::QTW_IGNORE_CTE_SUBQUERIES | pg_sys::QTW_IGNORE_JOINALIASES;
    pg_sys::query_tree_walker(query, Some(step), std::ptr::addr_of_mut!(visitor).cast(), flags as i32);
}

/// The queries directly below `query`: in FROM, in WITH, in expressions.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn subqueries(query: *mut pg_sys::Query) -> Vec<*mut pg_sys::Query> {
    // Most statements have none: nothing is allocated then.
    let mut below: Vec<*mut pg_sys::Node> = Vec::new();
    let derived = items::<pg_sys::RangeTblEntry>((*query).rtable).map(|entry| (*entry).subquery.cast::<pg_sys::Node>());
    below.extend(derived.filter(|subquery| !subquery.is_null()));
    below.extend(items::<pg_sys::CommonTableExpr>((*query).cteList).map(|cte| (*cte).ctequery));
    if (*query).hasSubLinks {
        walk_level(query, &mut |node| {
            below.extend(cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink).map(|link| (*link).subselect));
            true
        });
    }
    below.into_iter().filter_map(|node| cast(node, pg_sys::NodeTag::T_Query)).collect()
}
