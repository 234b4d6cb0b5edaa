//! The generic plan of a statement that can run with some parameters only: with those it is planned anew each time.
//!
//! A statement that only a whole shard can do is refused where it is not about one shard. Of a prepared statement with
//! several keys that is not known before they are. Postgres plans it without them all the same, to see what that would
//! save; so it gets a plan that costs more than any other, and refuses to run.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::plan::stand_in_plan;
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::flag;
use crate::pg::query::tree::nth;
use crate::pg::raw::explain_text;

const NODE: &CStr = c"ShardRefusal";
/// More than any plan that could be chosen.
const COST: f64 = 1e12;

struct PlanMethods(pg_sys::CustomScanMethods);
// SAFETY: constants.
unsafe impl Sync for PlanMethods {}
static PLAN: PlanMethods =
    PlanMethods(pg_sys::CustomScanMethods { CustomName: NODE.as_ptr(), CreateCustomScanState: Some(create_state) });

struct ExecMethods(pg_sys::CustomExecMethods);
// SAFETY: constants.
unsafe impl Sync for ExecMethods {}
static EXEC: ExecMethods = ExecMethods(pg_sys::CustomExecMethods {
    CustomName: NODE.as_ptr(),
    BeginCustomScan: Some(begin),
    ExecCustomScan: Some(next),
    EndCustomScan: Some(end),
    ReScanCustomScan: Some(end),
    MarkPosCustomScan: None,
    RestrPosCustomScan: None,
    EstimateDSMCustomScan: None,
    InitializeDSMCustomScan: None,
    ReInitializeDSMCustomScan: None,
    InitializeWorkerCustomScan: None,
    ShutdownCustomScan: None,
    ExplainCustomScan: Some(explain),
});

/// Makes the node known. Once per process.
pub fn register() {
    // SAFETY: a constant, which Postgres keeps.
    unsafe { pg_sys::RegisterCustomScanMethods(&PLAN.0) }
}

/// Plans `query` to be refused. `None`: the hooks below made something else of it.
///
/// # Safety
/// `query` must be valid and about to be planned.
pub unsafe fn plan(
    query: *mut pg_sys::Query,
    refusal: &Refusal,
    hand_on: impl FnOnce(*mut pg_sys::Query) -> *mut pg_sys::PlannedStmt,
) -> Option<*mut pg_sys::PlannedStmt> {
    let text = |text: &str| {
        let text: CString = encoding::server_string(text);
        pg_sys::makeString(pg_sys::pstrdup(text.as_ptr())).cast::<std::ffi::c_void>()
    };
    let parts = [Some(&refusal.message), refusal.detail.as_ref(), refusal.hint.as_ref()];
    let private = parts
        .into_iter()
        .fold(std::ptr::null_mut(), |list, part| pg_sys::lappend(list, text(part.map_or("", String::as_str))));
    stand_in_plan(query, &PLAN.0, hand_on, |scan, _| {
        (*scan).scan.plan.total_cost = COST;
        (*scan).custom_private = private;
    })
}

/// # Safety
/// Called by the executor.
#[pg_guard]
unsafe extern "C-unwind" fn create_state(_plan: *mut pg_sys::CustomScan) -> *mut pg_sys::Node {
    let state = pg_sys::palloc0(std::mem::size_of::<pg_sys::CustomScanState>()).cast::<pg_sys::CustomScanState>();
    (*state).ss.ps.type_ = pg_sys::NodeTag::T_CustomScanState;
    (*state).methods = &EXEC.0;
    state.cast()
}

unsafe fn refusal(node: *mut pg_sys::CustomScanState) -> Refusal {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::CustomScan>();
    let part = |at| nth::<pg_sys::String>((*plan).custom_private, at).map(|text| encoding::utf8_string((*text).sval));
    let mut refusal = Refusal::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, part(0).unwrap_or_default());
    let given = |at| part(at).filter(|text| !text.is_empty());
    (refusal.detail, refusal.hint) = (given(1), given(2));
    refusal
}

#[pg_guard]
unsafe extern "C-unwind" fn begin(node: *mut pg_sys::CustomScanState, _estate: *mut pg_sys::EState, eflags: i32) {
    if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 == 0 {
        flag::refuse(refusal(node))
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn next(node: *mut pg_sys::CustomScanState) -> *mut pg_sys::TupleTableSlot {
    flag::refuse(refusal(node))
}

#[pg_guard]
unsafe extern "C-unwind" fn end(_node: *mut pg_sys::CustomScanState) {}

#[pg_guard]
unsafe extern "C-unwind" fn explain(
    node: *mut pg_sys::CustomScanState,
    _ancestors: *mut pg_sys::List,
    es: *mut pg_sys::ExplainState,
) {
    explain_text(es, c"Refused", &encoding::server(&refusal(node).message));
}
