//! Functions of the server that pgrx's bindings leave out, each exported by every version from 15 to 18, and small calls of
//! others.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;

use crate::pg::query::tree::items;

/// Declares a function of the server, called with its errors turned into panics at the boundary.
macro_rules! server_function {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the function of that name in Postgres.
        #[allow(non_snake_case)]
        pub unsafe fn $name($($arg: $type),*) -> $result {
            unsafe extern "C-unwind" {
                fn $name($($arg: $type),*) -> $result;
            }
            pg_guard_ffi_boundary(|| $name($($arg),*))
        }
    };
}

server_function! {
    /// The children of a table in pg_inherits. Source: catalog/pg_inherits.h.
    fn find_inheritance_children(parent: pg_sys::Oid, lockmode: pg_sys::LOCKMODE) -> *mut pg_sys::List;
}
/// The description of the attribute at position `at`, counted from 0.
///
/// # Safety
/// `desc` must be valid for `'a` and have more than `at` attributes.
pub unsafe fn attribute<'a>(desc: pg_sys::TupleDesc, at: usize) -> &'a pg_sys::FormData_pg_attribute {
    #[cfg(feature = "pg18")]
    {
        &*pg_sys::TupleDescAttr(desc, at as i32)
    }
    #[cfg(not(feature = "pg18"))]
    {
        &(*desc).attrs.as_slice((*desc).natts as usize)[at]
    }
}

server_function! {
    /// Answers an asynchronous request with a row, or with the end of rows. Source: executor/execAsync.h.
    fn ExecAsyncRequestDone(request: *mut pg_sys::AsyncRequest, result: *mut pg_sys::TupleTableSlot) -> ();
}

server_function! {
    /// Runs the InitPlans behind those of `params` that have not run. Source: executor/nodeSubplan.h.
    fn ExecSetParamPlanMulti(params: *const pg_sys::Bitmapset, context: *mut pg_sys::ExprContext) -> ();
}

server_function! {
    /// Says that an asynchronous request will be answered later. Source: executor/execAsync.h.
    fn ExecAsyncRequestPending(request: *mut pg_sys::AsyncRequest) -> ();
}

server_function! {
    /// Hands an answered request to the node that made it. Source: executor/execAsync.h.
    fn ExecAsyncResponse(request: *mut pg_sys::AsyncRequest) -> ();
}

/// The list of a qualified name, as look-ups of functions and operators take it.
///
/// # Safety
/// Allocates in the current memory context.
pub unsafe fn name_list(schema: &CStr, name: &CStr) -> *mut pg_sys::List {
    let part = |text: &CStr| pg_sys::makeString(pg_sys::pstrdup(text.as_ptr())).cast();
    pg_sys::lappend(pg_sys::lappend(std::ptr::null_mut(), part(schema)), part(name))
}

/// The next row of a node that answers an asynchronous request, which is timed elsewhere.
///
/// # Safety
/// `node` must be an initialised node of a running statement.
pub unsafe fn exec_proc_node_real(node: *mut pg_sys::PlanState) -> *mut pg_sys::TupleTableSlot {
    match (*node).ExecProcNodeReal {
        Some(function) => pg_guard_ffi_boundary(|| function(node)),
        None => std::ptr::null_mut(),
    }
}

/// Copies an expression, with what `mutator` makes of each part.
///
/// # Safety
/// As the function of that name in Postgres.
pub unsafe fn expression_tree_mutator(
    node: *mut pg_sys::Node,
    mutator: Mutator,
    context: *mut std::ffi::c_void,
) -> *mut pg_sys::Node {
    #[cfg(feature = "pg15")]
    {
        pg_sys::expression_tree_mutator(node, mutator.map(|m| std::mem::transmute(m)), context)
    }
    #[cfg(not(feature = "pg15"))]
    {
        pg_sys::expression_tree_mutator_impl(node, mutator, context)
    }
}

/// As [`expression_tree_mutator`], for a query, subqueries included; the lists of joins' columns stay as they are.
///
/// # Safety
/// As the function of that name in Postgres.
pub unsafe fn query_tree_mutator(
    query: *mut pg_sys::Query,
    mutator: Mutator,
    context: *mut std::ffi::c_void,
) -> *mut pg_sys::Query {
    let flags = pg_sys::QTW_IGNORE_JOINALIASES as i32;
    #[cfg(feature = "pg15")]
    let copy = pg_sys::query_tree_mutator(query, mutator.map(|m| std::mem::transmute(m)), context, flags);
    #[cfg(not(feature = "pg15"))]
    let copy = pg_sys::query_tree_mutator_impl(query, mutator, context, flags);
    for (own, entry) in
        items::<pg_sys::RangeTblEntry>((*copy).rtable).zip(items::<pg_sys::RangeTblEntry>((*query).rtable))
    {
        (*own).joinaliasvars = (*entry).joinaliasvars;
    }
    copy
}

/// What makes something else of a node.
pub type Mutator = Option<unsafe extern "C-unwind" fn(*mut pg_sys::Node, *mut std::ffi::c_void) -> *mut pg_sys::Node>;

#[cfg(any(feature = "pg15", feature = "pg16"))]
server_function! {
    /// Whether more of the client's messages has been read already. Source: libpq/libpq.h.
    fn pq_buffer_has_data() -> bool;
}

#[cfg(any(feature = "pg17", feature = "pg18"))]
server_function! {
    /// How much more of the client's messages has been read already. Source: libpq/libpq.h.
    fn pq_buffer_remaining_data() -> isize;
}

server_function! {
    /// The next byte of the client's messages. Source: libpq/libpq.h.
    fn pq_peekbyte() -> i32;
}

/// The kind of the client's next message, if it has been read already.
pub fn next_message() -> Option<u8> {
    // SAFETY: looks into the receive buffer; a byte is there, so that none is waited for.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let is_there = pq_buffer_has_data();
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        let is_there = pq_buffer_remaining_data() > 0;
        is_there.then(|| u8::try_from(pq_peekbyte()).ok()).flatten()
    }
}

/// The value of `expression`; as the inline function ExecEvalExpr.
///
/// # Safety
/// `expression` must have been prepared by ExecInitExpr, `context` be its context.
pub unsafe fn evaluate(
    expression: *mut pg_sys::ExprState,
    context: *mut pg_sys::ExprContext,
    is_null: &mut bool,
) -> pg_sys::Datum {
    match (*expression).evalfunc {
        Some(function) => pg_guard_ffi_boundary(|| function(expression, context, is_null)),
        None => {
            *is_null = true;
            pg_sys::Datum::from(0)
        }
    }
}

/// Adds a line to EXPLAIN's output: `value` is in the database's encoding.
///
/// # Safety
/// Inside EXPLAIN.
pub unsafe fn explain_text(es: *mut pg_sys::ExplainState, label: &CStr, value: &[u8]) {
    let value = CString::new(value).unwrap_or_default();
    pg_sys::ExplainPropertyText(label.as_ptr(), value.as_ptr(), es);
}
