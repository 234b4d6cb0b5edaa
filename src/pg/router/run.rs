//! A routed statement executed: its shard is chosen when it starts, asked at once, and its rows passed on.
//!
//! What always holds: a write is sent when the statement runs, never before; the shard's transaction is begun unless the
//! statement stands alone, and its single round trip is then all there is. Read next: `remote::portal`.

use std::rc::Rc;

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::PgMemoryContexts;
use shardmap_core::ids::ShardNumber;

use super::explain::explain;
use super::plan::{OneKey, Private, NODE};
use crate::pg::alone::{ends_transaction, stands_alone};
use crate::pg::catalog::{self, LogicalTable};
use crate::pg::error::Refusal;
use crate::pg::fdw::shard::{statement, Inputs, Source};
use crate::pg::fdw::tuples::{clear, types, Rows};
use crate::pg::fdw::{order, users};
use crate::pg::keys::KeyType;
use crate::pg::query::tree::items;
use crate::pg::reads::reader::Reader;
use crate::pg::reads::{fence, session};
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::remote::guard;
use crate::pg::remote::portal::{Portal, Request};
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::traffic::Traffic;
use crate::pg::remote::transaction;
use crate::pg::stats;

/// Rows asked for first, inside a transaction.
const CHUNK: i32 = 500;

/// The node's state, as Postgres knows it.
#[repr(C)]
struct State {
    css: pg_sys::CustomScanState,
    route: *mut Route,
}

/// What a running node has.
pub(super) struct Route {
    pub(super) reader: Reader,
    statement: Rc<Statement>,
    inputs: Inputs,
    rows: Rows,
    private: Private,
    /// The statement is all that its transaction does.
    pub(super) alone: bool,
    pub(super) portal: Option<Rc<Portal>>,
    /// Of what was run before the portal.
    spent: Traffic,
    row: Vec<u8>,
    /// A row has been passed on.
    has_begun: bool,
}

struct Methods(pg_sys::CustomExecMethods);
// SAFETY: constants.
unsafe impl Sync for Methods {}

static METHODS: Methods = Methods(pg_sys::CustomExecMethods {
    CustomName: NODE.as_ptr(),
    BeginCustomScan: Some(begin),
    ExecCustomScan: Some(next),
    EndCustomScan: Some(end),
    ReScanCustomScan: Some(rescan),
    MarkPosCustomScan: None,
    RestrPosCustomScan: None,
    EstimateDSMCustomScan: None,
    InitializeDSMCustomScan: None,
    ReInitializeDSMCustomScan: None,
    InitializeWorkerCustomScan: None,
    ShutdownCustomScan: None,
    ExplainCustomScan: Some(explain),
});

/// # Safety
/// Called by the executor.
#[pg_guard]
pub unsafe extern "C-unwind" fn create_state(_plan: *mut pg_sys::CustomScan) -> *mut pg_sys::Node {
    let state = pg_sys::palloc0(std::mem::size_of::<State>()).cast::<State>();
    (*state).css.ss.ps.type_ = pg_sys::NodeTag::T_CustomScanState;
    (*state).css.methods = &METHODS.0;
    state.cast()
}

/// What the node has, if it runs.
///
/// # Safety
/// `node` must be one of this module's; no other reference to it be in use.
pub(super) unsafe fn route_of<'a>(node: *mut pg_sys::CustomScanState) -> Option<&'a Route> {
    (*node.cast::<State>()).route.as_ref()
}

/// # Safety
/// `node` must be one of this module's.
pub(super) unsafe fn plan_of(node: *mut pg_sys::CustomScanState) -> *mut pg_sys::CustomScan {
    (*node).ss.ps.plan.cast()
}

unsafe extern "C-unwind" fn begin(node: *mut pg_sys::CustomScanState, estate: *mut pg_sys::EState, eflags: i32) {
    guard(|| {
        let plan = plan_of(node);
        if eflags & pg_sys::EXEC_FLAG_EXPLAIN_ONLY as i32 != 0 {
            return Ok(());
        }
        let Some(private) = Private::read((*plan).custom_private) else { return Ok(()) };
        let Some(table) = table(&private) else { return Ok(()) };
        let Some(shard) = shard(node, &private, &table)? else { return Ok(()) };
        let Some(server) = table.servers.get(&shard).copied() else { return Ok(()) };
        let writes = !private.written.is_empty();
        let user = if private.user == pg_sys::InvalidOid { pg_sys::GetUserId() } else { private.user };
        // What is kept of a statement while it runs is for fan-outs; here both counts are known at once.
        stats::count_step(stats::Step::Routed);
        stats::count_shard(&table.keyspace.name, shard.0);
        users::admit(server, user, writes);
        if writes {
            fence::check(server, user)?;
        }
        let desc = (*(*node).ss.ss_ScanTupleSlot).tts_tupleDescriptor;
        let all: Vec<i16> = (1..=(*desc).natts as i16).collect();
        let rows = Rows::new(desc, &all, &types(desc));
        let inputs = inputs(node, &private);
        let route = Route {
            reader: Reader::open(server, user, private.reads_only)?,
            statement: statement(private.sql.clone(), inputs.types.clone(), rows.formats(), rows.wanted()),
            inputs,
            rows,
            alone: stands_alone(estate) && if writes { may_commit_there(estate) } else { !private.locks_rows },
            private,
            portal: None,
            spent: Traffic::default(),
            row: Vec::new(),
            has_begun: false,
        };
        let route = PgMemoryContexts::For((*estate).es_query_cxt).leak_and_drop_on_delete(route);
        (*node.cast::<State>()).route = route;
        if !writes {
            (*route).start(node)?;
        }
        Ok(())
    });
}

/// A logical table of the statement.
pub(super) fn table(private: &Private) -> Option<Rc<LogicalTable>> {
    catalog::current()?.table(private.table).cloned()
}

unsafe fn inputs(node: *mut pg_sys::CustomScanState, private: &Private) -> Inputs {
    let expressions = (*plan_of(node)).custom_exprs;
    let inputs = match private.key {
        OneKey::Known(_) | OneKey::Any => expressions,
        OneKey::Late => pg_sys::list_truncate(pg_sys::list_copy(expressions), (*expressions).length - 1),
    };
    Inputs::new(inputs, std::ptr::addr_of_mut!((*node).ss.ps))
}

/// The shard of the statement's key; `None`: the key is NULL, and there is nothing to ask for.
///
/// # Safety
/// `private` must be the node's.
pub(super) unsafe fn shard(
    node: *mut pg_sys::CustomScanState,
    private: &Private,
    table: &LogicalTable,
) -> Result<Option<ShardNumber>> {
    let keyspace = &table.keyspace;
    match &private.key {
        OneKey::Known(key) => return Ok(Some(keyspace.owner(key))),
        OneKey::Any => return Ok(table.partitions.keys().next().copied()),
        OneKey::Late => {}
    }
    let Some(expression) = items::<pg_sys::Expr>((*plan_of(node)).custom_exprs).last() else { return Ok(None) };
    let context = (*node).ss.ps.ps_ExprContext;
    let source = Source::of(expression.cast(), std::ptr::addr_of_mut!((*node).ss.ps));
    let before = pg_sys::MemoryContextSwitchTo((*context).ecxt_per_tuple_memory);
    let kind = KeyType::of(pg_sys::exprType(expression.cast()));
    let value = source.value(context);
    let owner = kind.zip(value).map(|(kind, value)| kind.with_canonical(value, |key| keyspace.owner(key)));
    pg_sys::MemoryContextSwitchTo(before);
    Ok(match owner {
        // No shard has a row whose key is NULL: whichever is asked gives the right answer.
        None if !private.is_empty_without_key => table.partitions.keys().min().copied(),
        owner => owner,
    })
}

/// Whether a write that stands alone may be committed by the shard itself, without a transaction begun: nothing can follow
/// it in the transaction, nothing else is to be committed with it, and nothing can go wrong here after it.
/// Source: the conditions of the measurements that this was designed by.
unsafe fn may_commit_there(estate: *mut pg_sys::EState) -> bool {
    transaction::is_untouched()
        && pg_sys::GetTopTransactionIdIfAny() == pg_sys::InvalidTransactionId
        && !(*(*estate).es_plannedstmt).hasReturning
        && ends_transaction()
}

impl Route {
    /// What it has cost on the way.
    pub(super) fn traffic(&self) -> Traffic {
        self.portal.as_ref().map_or(self.spent, |portal| self.spent + portal.traffic())
    }

    unsafe fn start(&mut self, node: *mut pg_sys::CustomScanState) -> Result<Rc<Portal>> {
        if let Some(portal) = &self.portal {
            return Ok(Rc::clone(portal));
        }
        let writes = !self.private.written.is_empty();
        if !writes {
            order::check_statement((*node).ss.ps.state);
        }
        for table in &self.private.written {
            order::note_write_to((*node).ss.ps.state, *table);
        }
        if writes && self.alone {
            // Should the connection be lost, it may be written all the same.
            session::note_write(self.reader.shard());
        }
        let portal = loop {
            let request = Request {
                statement: Rc::clone(&self.statement),
                params: self.inputs.compute((*node).ss.ps.ps_ExprContext),
                chunk: if writes || self.alone { 0 } else { CHUNK },
                begin: !self.alone,
                // A volatile function that is marked shippable may write.
                writes: writes || !(self.alone || self.private.reads_only || self.private.locks_rows),
                needs: Needs::Ours,
                commits: writes && self.alone,
            };
            match self.reader.connection.start(request) {
                Ok(portal) => break portal,
                Err(failure) => self.reader.move_on(failure)?,
            }
        };
        self.portal = Some(Rc::clone(&portal));
        Ok(portal)
    }

    /// The next row, in `row`. A lost replica is replaced as long as no row was passed on.
    unsafe fn next(&mut self, node: *mut pg_sys::CustomScanState) -> Result<Option<Rc<Portal>>> {
        loop {
            let portal = self.start(node)?;
            match portal.next(&mut self.row) {
                Ok(true) => {
                    self.has_begun = true;
                    return Ok(None);
                }
                Ok(false) => return Ok(Some(portal)),
                Err(failure) if self.has_begun => return Err(failure),
                Err(failure) => {
                    self.reader.move_on(failure)?;
                    self.portal = None;
                }
            }
        }
    }
}

unsafe extern "C-unwind" fn next(node: *mut pg_sys::CustomScanState) -> *mut pg_sys::TupleTableSlot {
    guard(|| {
        let slot = (*node).ss.ss_ScanTupleSlot;
        let Some(route) = (*node.cast::<State>()).route.as_mut() else { return Ok(clear(slot)) };
        let context = (*(*node).ss.ps.ps_ExprContext).ecxt_per_tuple_memory;
        pg_sys::MemoryContextReset(context);
        let Some(portal) = route.next(node)? else {
            let before = pg_sys::MemoryContextSwitchTo(context);
            route.rows.store_virtual(&route.row, slot)?;
            pg_sys::MemoryContextSwitchTo(before);
            return Ok(slot);
        };
        if route.alone && !route.private.written.is_empty() {
            transaction::hold_interrupts();
            session::note_write(route.reader.shard());
        }
        let estate = (*node).ss.ps.state;
        if (*(*estate).es_plannedstmt).commandType != pg_sys::CmdType::CMD_SELECT {
            (*estate).es_processed = portal.affected();
        }
        Ok(clear(slot))
    })
}

unsafe extern "C-unwind" fn end(node: *mut pg_sys::CustomScanState) {
    guard(|| match (*node.cast::<State>()).route.as_mut() {
        Some(route) => route.portal.take().map_or(Ok(()), |portal| portal.close()),
        None => Ok(()),
    });
}

unsafe extern "C-unwind" fn rescan(node: *mut pg_sys::CustomScanState) {
    guard(|| {
        if let Some(route) = (*node.cast::<State>()).route.as_mut() {
            if !route.private.written.is_empty() {
                return Err(Refusal::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    "cannot run a statement that writes to a shard a second time",
                )
                .hint("Execute it anew.")
                .into());
            }
            if let Some(portal) = route.portal.take() {
                portal.close()?;
                route.spent = route.spent + portal.traffic();
            }
            route.has_begun = false;
        }
        Ok(())
    });
}
