//! The foreign data wrapper `shardmap_fdw`: postgres_fdw plans and deparses, we execute.
//!
//! [`scan`] and [`modify`] plan: they remember which step of the ladder a statement took, and refuse a change of a row's
//! key. [`lazy`] stands before execution: it flags fan-outs before a shard is asked, and asks a shard only when rows are
//! wanted that it can have. Then [`rows`] reads, [`side_by_side`] from several shards at once; [`direct`] and [`write`]
//! change rows, those that [`insert`] and [`modify`] let pass, [`bulk`] many of them by COPY; [`maintain`] truncates and samples. All of them use the
//! transaction's one connection to a shard (`remote`), so that each sees what the others wrote.
//! What always holds: every call into postgres_fdw crosses a guarded boundary, so its errors unwind cleanly; none of its
//! callbacks that would connect is called.

pub mod bulk;
mod direct;
mod insert;
pub mod lazy;
mod maintain;
pub mod modify;
pub mod note;
pub mod one_map;
pub mod options;
pub mod order;
mod owned;
mod partial;
mod private;
mod probe;
mod rows;
pub mod scan;
mod security;
pub mod shard;
mod side_by_side;
pub mod together;
pub mod tuples;
pub mod users;
mod write;

use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;

/// postgres_fdw's callbacks, as its handler returned them.
struct Original(pg_sys::FdwRoutine);

// SAFETY: a struct of pointers to functions of a library that stays loaded; it is only read.
unsafe impl Send for Original {}
// SAFETY: as above.
unsafe impl Sync for Original {}

static ORIGINAL: OnceLock<Original> = OnceLock::new();

/// postgres_fdw's routine, loaded when first needed.
fn original() -> &'static pg_sys::FdwRoutine {
    let load = || {
        // SAFETY: the handler is a V1 function without arguments that returns a palloc'd FdwRoutine; it is copied.
        unsafe {
            let handler = pg_sys::load_external_function(
                c"$libdir/postgres_fdw".as_ptr(),
                c"postgres_fdw_handler".as_ptr(),
                true,
                std::ptr::null_mut(),
            );
            let handler: unsafe extern "C-unwind" fn(pg_sys::FunctionCallInfo) -> pg_sys::Datum =
                std::mem::transmute(handler);
            let routine = pg_sys::DirectFunctionCall1Coll(Some(handler), pg_sys::InvalidOid, pg_sys::Datum::from(0));
            Original(*routine.cast_mut_ptr::<pg_sys::FdwRoutine>())
        }
    };
    &ORIGINAL.get_or_init(load).0
}

/// Calls a callback of postgres_fdw by its name, through a guarded boundary.
macro_rules! call_original {
    ($callback:ident($($arg:expr),* $(,)?)) => {{
        let callback = $crate::pg::fdw::original().$callback;
        match callback {
            // SAFETY (of the caller): the arguments are those Postgres handed to our callback of the same name.
            Some(callback) => pgrx::pg_sys::ffi::pg_guard_ffi_boundary(|| callback($($arg),*)),
            None => pgrx::error!("postgres_fdw has no {}", stringify!($callback)),
        }
    }};
}
pub(crate) use call_original;

/// The handler of `shardmap_fdw`: postgres_fdw's routine with our callbacks in it.
///
/// # Safety
/// Called by Postgres' function manager.
#[no_mangle]
#[pg_guard]
pub unsafe extern "C-unwind" fn shardmap_fdw_handler(_fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
    let mut routine = *original();
    routine.GetForeignRelSize = Some(scan::get_foreign_rel_size);
    routine.GetForeignPlan = Some(scan::get_foreign_plan);
    routine.GetForeignJoinPaths = Some(scan::get_foreign_join_paths);
    routine.GetForeignUpperPaths = Some(scan::get_foreign_upper_paths);
    routine.IsForeignPathAsyncCapable = Some(scan::is_foreign_path_async_capable);
    routine.BeginForeignScan = Some(lazy::begin_foreign_scan);
    routine.IterateForeignScan = Some(lazy::iterate_foreign_scan);
    routine.ReScanForeignScan = Some(lazy::rescan_foreign_scan);
    routine.EndForeignScan = Some(lazy::end_foreign_scan);
    routine.ForeignAsyncRequest = Some(side_by_side::foreign_async_request);
    routine.ForeignAsyncConfigureWait = Some(side_by_side::foreign_async_configure_wait);
    routine.ForeignAsyncNotify = Some(side_by_side::foreign_async_notify);
    routine.ExplainForeignScan = Some(scan::explain_foreign_scan);
    routine.PlanForeignModify = Some(modify::plan_foreign_modify);
    routine.BeginForeignModify = Some(lazy::begin_foreign_modify);
    routine.EndForeignModify = Some(lazy::end_foreign_modify);
    routine.ExecForeignDelete = Some(modify::exec_foreign_delete);
    routine.ExplainForeignModify = Some(modify::explain_foreign_modify);
    routine.PlanDirectModify = Some(modify::plan_direct_modify);
    routine.BeginDirectModify = Some(lazy::begin_direct_modify);
    routine.EndDirectModify = Some(lazy::end_direct_modify);
    routine.IterateDirectModify = Some(lazy::iterate_direct_modify);
    routine.ExplainDirectModify = Some(modify::explain_direct_modify);
    routine.BeginForeignInsert = Some(modify::begin_foreign_insert);
    routine.EndForeignInsert = Some(lazy::end_foreign_insert);
    routine.GetForeignModifyBatchSize = Some(modify::get_foreign_modify_batch_size);
    routine.ExecForeignTruncate = Some(maintain::exec_foreign_truncate);
    routine.AnalyzeForeignTable = Some(maintain::analyze_foreign_table);
    routine.ExecForeignInsert = Some(modify::exec_foreign_insert);
    routine.ExecForeignBatchInsert = Some(modify::exec_foreign_batch_insert);
    routine.ExecForeignUpdate = Some(modify::exec_foreign_update);
    let size = std::mem::size_of::<pg_sys::FdwRoutine>();
    let copy = pg_guard_ffi_boundary(|| pg_sys::palloc(size)).cast::<pg_sys::FdwRoutine>();
    copy.write(routine);
    pg_sys::Datum::from(copy)
}

#[no_mangle]
#[doc(hidden)]
pub extern "C" fn pg_finfo_shardmap_fdw_handler() -> &'static pg_sys::Pg_finfo_record {
    const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
    &RECORD
}
