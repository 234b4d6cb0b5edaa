//! Scans that are read one after another, though all of them will be: below a MergeAppend, or below aggregates of an Append,
//! which Postgres does not run side by side. Their shards are all asked when the first of them is.
//!
//! What always holds: ahead of their turn no more scans are at work than `shardmap.max_fanout_width` says; a statement that locks or writes rows
//! asks its shards in order; a scan that depends on another part of the statement, or that may be left out, is asked in its turn.
//! Source: executor/nodeMergeAppend.c, nodeAppend.c. Read next: [`super::side_by_side`] for those that Postgres does run so.

use std::cell::Cell;
use std::rc::Rc;

use pgrx::pg_sys;

use super::lazy::{self, Node};
use super::side_by_side::Turn;
use super::{note, users};
use crate::pg::query::tree::{items, tag};
use crate::pg::reads::route::is_on;
use crate::pg::remote::{connect_ahead, Result};
use crate::pg::settings::fanout_width;

/// The scans of one Append, in its order.
pub struct Together {
    scans: Vec<*mut pg_sys::ForeignScanState>,
    /// The first of them that was not asked ahead of its turn, nor passed over.
    next: Cell<usize>,
    at_work: Rc<Cell<usize>>,
}

impl Together {
    /// Asks the shards of the scans that come next, as many as may be at work.
    ///
    /// # Safety
    /// While the statement runs, and nothing borrows the state of a scan that has not begun.
    pub unsafe fn ask(&self) -> Result<()> {
        let free = || fanout_width().saturating_sub(self.at_work.get());
        if self.next.get() < self.scans.len() && free() > 0 {
            connect(self.scans[self.next.get()..].iter().copied().take(free()))?;
        }
        while free() > 0 {
            let Some(node) = self.scans.get(self.next.get()).copied() else { return Ok(()) };
            self.next.set(self.next.get() + 1);
            if !waits(node) {
                continue;
            }
            if let Some(scan) = lazy::begin_scan(node)? {
                scan.turn = Some(Turn::take(&self.at_work));
                scan.start(node)?;
            }
        }
        Ok(())
    }
}

/// Makes the connections that these scans lack, all at the same time. Where replicas may answer, each scan finds its own.
///
/// # Safety
/// They must be scans of ours in a running statement.
pub unsafe fn connect(scans: impl Iterator<Item = *mut pg_sys::ForeignScanState>) -> Result<()> {
    if is_on() {
        return Ok(());
    }
    let place = |node: *mut pg_sys::ForeignScanState| {
        let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
        ((*plan).fs_server, users::of_scan(node, plan))
    };
    let certain = |node: &*mut pg_sys::ForeignScanState| waits(*node) && stands_alone(*node);
    connect_ahead(&scans.filter(certain).map(place).collect::<Vec<_>>())
}

/// Whether a scan of ours has not begun.
unsafe fn waits(node: *mut pg_sys::ForeignScanState) -> bool {
    matches!((*node).fdw_state.cast::<Node>().as_ref(), Some(Node::Waiting { .. }))
}

/// Finds the scans of a statement that are to be asked together.
///
/// # Safety
/// `desc` must have been started, to be run.
pub unsafe fn gather(desc: *const pg_sys::QueryDesc) {
    let planned = (*desc).plannedstmt;
    let only_reads = (*planned).commandType == pg_sys::CmdType::CMD_SELECT && !(*planned).hasModifyingCTE;
    if !only_reads || !(*planned).rowMarks.is_null() {
        return;
    }
    visit((*desc).planstate);
    items::<pg_sys::PlanState>((*(*desc).estate).es_subplanstates).for_each(|state| visit(state));
}

unsafe fn visit(state: *mut pg_sys::PlanState) {
    if state.is_null() {
        return;
    }
    let (children, certain) = match tag(state) {
        pg_sys::NodeTag::T_AppendState => {
            let append = state.cast::<pg_sys::AppendState>();
            (slice((*append).appendplans, (*append).as_nplans), (*append).as_valid_subplans)
        }
        pg_sys::NodeTag::T_MergeAppendState => {
            let append = state.cast::<pg_sys::MergeAppendState>();
            (slice((*append).mergeplans, (*append).ms_nplans), (*append).ms_valid_subplans)
        }
        pg_sys::NodeTag::T_SubqueryScanState => {
            return visit((*state.cast::<pg_sys::SubqueryScanState>()).subplan);
        }
        _ => {
            visit((*state).lefttree);
            return visit((*state).righttree);
        }
    };
    // Not known yet: some may be left out.
    if !certain.is_null() {
        put_together(children);
    }
    children.iter().for_each(|child| visit(*child));
}

unsafe fn slice<'a>(plans: *mut *mut pg_sys::PlanState, count: i32) -> &'a [*mut pg_sys::PlanState] {
    match usize::try_from(count) {
        Ok(count) if count > 0 => std::slice::from_raw_parts(plans, count),
        _ => &[],
    }
}

unsafe fn put_together(children: &[*mut pg_sys::PlanState]) {
    let scans: Vec<_> = children.iter().filter_map(|child| first_scan(*child)).collect();
    if scans.len() < 2 {
        return;
    }
    let together = Rc::new(Together { scans, next: Cell::new(0), at_work: Rc::default() });
    for node in &together.scans {
        if let Some(Node::Waiting { together: own, .. }) = (**node).fdw_state.cast::<Node>().as_mut() {
            *own = Some(Rc::clone(&together));
        }
    }
}

/// The scan of ours that `state` begins with, and reads whatever becomes of its rows.
unsafe fn first_scan(mut state: *mut pg_sys::PlanState) -> Option<*mut pg_sys::ForeignScanState> {
    loop {
        state = match tag(state) {
            pg_sys::NodeTag::T_ForeignScanState => break,
            pg_sys::NodeTag::T_AggState
            | pg_sys::NodeTag::T_GroupState
            | pg_sys::NodeTag::T_SortState
            | pg_sys::NodeTag::T_IncrementalSortState
            | pg_sys::NodeTag::T_UniqueState
            | pg_sys::NodeTag::T_WindowAggState => (*state).lefttree,
            pg_sys::NodeTag::T_ResultState if (*state.cast::<pg_sys::ResultState>()).resconstantqual.is_null() => {
                (*state).lefttree
            }
            pg_sys::NodeTag::T_SubqueryScanState => (*state.cast::<pg_sys::SubqueryScanState>()).subplan,
            _ => return None,
        };
    }
    let node = state.cast::<pg_sys::ForeignScanState>();
    let plan = (*state).plan.cast::<pg_sys::ForeignScan>();
    let reads = (*plan).operation == pg_sys::CmdType::CMD_SELECT && !(*state).async_capable;
    (lazy::is_ours(node) && reads && waits(node) && stands_alone(node)).then_some(node)
}

/// Whether nothing else in the statement decides about a scan's rows, or whether it has any.
unsafe fn stands_alone(node: *mut pg_sys::ForeignScanState) -> bool {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    (*plan).scan.plan.allParam.is_null() && note::read_late((*plan).fdw_private).is_none()
}
