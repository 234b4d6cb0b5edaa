//! Scans of several shards at once, below an Append: all are asked before the first is waited for.
//!
//! Source: executor/execAsync.h. What always holds: a request is either complete or waits for the one portal whose rows
//! are on its connection's way; a scan whose rows were set aside for another's sake is served without waiting.

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::lazy::{self, Node};
use super::rows::Scan;
use crate::pg::raw;
use crate::pg::remote::guard;

/// # Safety
/// Called by the executor.
pub unsafe extern "C-unwind" fn foreign_async_request(request: *mut pg_sys::AsyncRequest) {
    guard(|| {
        let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
        match lazy::begin_scan(node)? {
            None => raw::ExecAsyncRequestDone(request, std::ptr::null_mut()),
            Some(scan) => {
                scan.start(node)?;
                produce(request);
            }
        }
        Ok(())
    });
}

/// # Safety
/// Called by the executor, before it waits.
pub unsafe extern "C-unwind" fn foreign_async_configure_wait(request: *mut pg_sys::AsyncRequest) {
    guard(|| {
        let node = (*request).requestee.cast::<pg_sys::ForeignScanState>();
        (*request).callback_pending = false;
        produce(request);
        if (*request).request_complete {
            raw::ExecAsyncResponse(request);
            if let Some(instrument) = (*(*request).requestee).instrument.as_mut() {
                let rows = if (*request).result.is_null() { 0.0 } else { 1.0 };
                pg_sys::InstrUpdateTupleCount(instrument, rows);
            }
            return Ok(());
        }
        let append = (*request).requestor.cast::<pg_sys::AppendState>();
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

unsafe fn state<'a>(node: *mut pg_sys::ForeignScanState) -> Option<&'a Scan> {
    match (*node).fdw_state.cast::<Node>().as_ref() {
        Some(Node::Scan(scan)) => Some(scan),
        _ => None,
    }
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
