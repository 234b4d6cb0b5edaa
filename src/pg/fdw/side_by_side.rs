//! Scans of several shards at once, below an Append: all are asked before the first is waited for.
//!
//! Source: executor/execAsync.h. What always holds: of one Append's scans no more are at work than `shardmap.max_fanout_width`
//! says, and never none while there are some to do, so that it goes on by itself, whatever other Appends do; a request is either complete or waits for the one portal whose rows
//! are on its connection's way; a scan whose rows were set aside for another's sake is served without waiting.

use std::cell::Cell;
use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::lazy::{self, Node};
use super::rows::Scan;
use super::together;
use crate::pg::raw;
use crate::pg::remote::deadlock::wait_for_any;
use crate::pg::remote::{guard, Result};
use crate::pg::settings::fanout_width;

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn foreign_async_request(request: *mut pg_sys::AsyncRequest) {
    guard(|| {
        let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
        connect_all(request)?;
        match lazy::begin_scan(node)? {
            None => raw::ExecAsyncRequestDone(request, std::ptr::null_mut()),
            Some(_) => begin_in_turn(request)?,
        }
        Ok(())
    });
}

/// Connects to the shards of the scan's own Append that will be asked now, if this is the first of them to be asked.
unsafe fn connect_all(request: *mut pg_sys::AsyncRequest) -> Result<()> {
    let append = (*request).requestor.cast::<pg_sys::AppendState>();
    let own = (*request).request_index;
    let will_run = |at: &i32| pg_sys::bms_is_member(*at, (*append).as_valid_asyncplans);
    let scan = |at: i32| {
        let request = *(*append).as_asyncrequests.add(at as usize);
        is_ours(request).then(|| (*request).requestee.cast::<pg_sys::ForeignScanState>())
    };
    together::connect((own..(*append).as_nplans).filter(will_run).filter_map(scan).take(fanout_width()))
}

/// # Safety
/// Called by the executor, before it waits.
pub unsafe extern "C-unwind" fn foreign_async_configure_wait(request: *mut pg_sys::AsyncRequest) {
    guard(|| {
        let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
        (*request).callback_pending = false;
        begin_in_turn(request)?;
        if (*request).request_complete {
            raw::ExecAsyncResponse(request);
            if let Some(instrument) = (*(*request).requestee).instrument.as_mut() {
                let rows = if (*request).result.is_null() { 0.0 } else { 1.0 };
                pg_sys::InstrUpdateTupleCount(instrument, rows);
            }
            return Ok(());
        }
        let append = (*request).requestor.cast::<pg_sys::AppendState>();
        watch(append, request)?;
        if let Some(socket) = state(node).and_then(|scan| scan.portal().map(|portal| portal.link().socket())) {
            pg_sys::AddWaitEventToSet(
                (*append).as_eventset,
                pg_sys::WL_SOCKET_READABLE,
                socket,
                std::ptr::null_mut(),
                request.cast(),
            );
        }
        Ok(())
    });
}

/// # Safety
/// Called by the executor when the socket can be read.
#[pg_guard]
pub unsafe extern "C-unwind" fn foreign_async_notify(request: *mut pg_sys::AsyncRequest) {
    produce(request);
}

/// The executor is about to wait for as long as it takes, which is no place to look for deadlocks: so what is waited for is
/// waited for here, by the last request of the node to be asked.
unsafe fn watch(append: *mut pg_sys::AppendState, last: *mut pg_sys::AsyncRequest) -> Result<()> {
    let requests = std::slice::from_raw_parts((*append).as_asyncrequests, (*append).as_nplans as usize);
    let pending = || requests.iter().copied().filter(|request| !request.is_null() && (**request).callback_pending);
    let waits = (*append).as_syncdone && (*append).as_nasyncresults == 0 && pending().all(|request| is_ours(request));
    if !waits || pending().next_back() != Some(last) {
        return Ok(());
    }
    let link = |request: *mut pg_sys::AsyncRequest| {
        let portal = state((*request).requestee.cast())?.portal()?;
        Some(Rc::clone(portal.link()))
    };
    wait_for_any(&pending().filter_map(link).collect::<Vec<_>>())
}

/// Tables of other wrappers may be scanned beside ours.
unsafe fn is_ours(request: *mut pg_sys::AsyncRequest) -> bool {
    lazy::is_ours((*request).requestee.cast())
}

unsafe fn state<'a>(node: *mut pg_sys::ForeignScanState) -> Option<&'a mut Scan> {
    match (*node).fdw_state.cast::<Node>().as_mut() {
        Some(Node::Scan(scan)) => Some(scan),
        _ => None,
    }
}

/// The place of a scan at work among those of its Append.
pub struct Turn(Rc<Cell<usize>>);

impl Turn {
    /// One more is at work.
    pub fn take(at_work: &Rc<Cell<usize>>) -> Self {
        at_work.set(at_work.get() + 1);
        Self(Rc::clone(at_work))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Begins the scan if it has not begun and may, and looks for a row. Else it is pending, with nothing to wait for but the
/// others' ends.
unsafe fn begin_in_turn(request: *mut pg_sys::AsyncRequest) -> Result<()> {
    let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
    if !takes_turn(request) {
        raw::ExecAsyncRequestPending(request);
        return Ok(());
    }
    if let Some(scan) = state(node) {
        scan.start(node)?;
    }
    produce(request);
    Ok(())
}

/// Whether the scan of a request is at work, or may begin now.
unsafe fn takes_turn(request: *mut pg_sys::AsyncRequest) -> bool {
    let own = |request: *mut pg_sys::AsyncRequest| state((*request).requestee.cast());
    if own(request).is_none_or(|scan| scan.portal().is_some()) {
        return true;
    }
    let count = at_work((*request).requestor.cast());
    if count.get() >= fanout_width() {
        return false;
    }
    own(request).into_iter().for_each(|scan| scan.turn = Some(Turn::take(&count)));
    true
}

/// How many scans of an Append are at work.
unsafe fn at_work(append: *mut pg_sys::AppendState) -> Rc<Cell<usize>> {
    for at in 0..(*append).as_nplans as usize {
        let other = *(*append).as_asyncrequests.add(at);
        if other.is_null() || !is_ours(other) {
            continue;
        }
        if let Some(Turn(count)) = state((*other).requestee.cast()).and_then(|scan| scan.turn.as_ref()) {
            return Rc::clone(count);
        }
    }
    Rc::default()
}

/// Completes the request if a row, or the end of rows, is there; else it is pending.
unsafe fn produce(request: *mut pg_sys::AsyncRequest) {
    let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
    let result = raw::exec_proc_node_real(std::ptr::addr_of_mut!((*node).ss.ps));
    let is_empty = result.is_null() || (*result).tts_flags & pg_sys::TTS_FLAG_EMPTY as u16 != 0;
    if is_empty && state(node).is_some_and(|scan| scan.pending) {
        raw::ExecAsyncRequestPending(request);
    } else {
        raw::ExecAsyncRequestDone(request, if is_empty { std::ptr::null_mut() } else { result });
    }
}
