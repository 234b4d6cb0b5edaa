//! Functions of the server that pgrx's bindings leave out. Each is exported by every version from 15 to 18.

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;

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
