//! Set-returning SQL functions in FROM, put in as subqueries before the statement is read.
//!
//! Postgres does so itself, but after the planner hook: the tables inside would be neither routed nor flagged, nor kept in
//! the order of reads and writes. What always holds: what the planner would have noted about the functions (plan
//! invalidation, dependence on the role) is noted in the finished plan.

use pgrx::pg_sys;

use super::read::bare_planner;
use super::tree::{cast, items, nth, subqueries};

/// Functions that were put in.
pub struct Inlined {
    planner: *mut pg_sys::PlannerInfo,
}

/// Puts in all functions that can be, at every level; `None` if there are none.
///
/// # Safety
/// `query` must be valid and about to be planned; `params` NULL or valid.
pub unsafe fn inline(query: *mut pg_sys::Query, params: pg_sys::ParamListInfo) -> Option<Inlined> {
    let mut inlined = None;
    inline_level(query, params, &mut inlined);
    inlined
}

unsafe fn inline_level(query: *mut pg_sys::Query, params: pg_sys::ParamListInfo, inlined: &mut Option<Inlined>) {
    for entry in items::<pg_sys::RangeTblEntry>((*query).rtable).filter(|entry| is_candidate(*entry)) {
        let planner = inlined.get_or_insert_with(|| Inlined { planner: bare_planner(params) }).planner;
        (*entry).functions = pg_sys::eval_const_expressions(planner, (*entry).functions.cast()).cast();
        let body = pg_sys::inline_set_returning_function(planner, entry);
        if !body.is_null() {
            (*entry).rtekind = pg_sys::RTEKind::RTE_SUBQUERY;
            (*entry).subquery = body;
            (*entry).security_barrier = false;
            (*entry).funcordinality = false;
        }
    }
    subqueries(query).into_iter().for_each(|inner| inline_level(inner, params, inlined));
}

/// Whether `entry` is a call of one function that is not built in.
///
/// # Safety
/// `entry` must be valid.
pub unsafe fn is_candidate(entry: *const pg_sys::RangeTblEntry) -> bool {
    (*entry).rtekind == pg_sys::RTEKind::RTE_FUNCTION
        && nth::<pg_sys::RangeTblFunction>((*entry).functions, 0)
            .and_then(|function| cast::<pg_sys::FuncExpr>((*function).funcexpr, pg_sys::NodeTag::T_FuncExpr))
            .is_some_and(|call| (*call).funcid.to_u32() >= pg_sys::FirstNormalObjectId)
}

impl Inlined {
    /// Notes in a finished plan what it depends on by the functions.
    ///
    /// # Safety
    /// `planned` must be the plan of the query that was given to [`inline`].
    pub unsafe fn note_in(&self, planned: *mut pg_sys::PlannedStmt) {
        let global = (*self.planner).glob;
        (*planned).invalItems = pg_sys::list_concat((*planned).invalItems, (*global).invalItems);
        (*planned).dependsOnRole |= (*global).dependsOnRole;
    }
}
