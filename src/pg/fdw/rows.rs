//! A foreign scan's rows: asked for when the first is wanted, read a chunk at a time.
//!
//! What always holds: between two rescans without a changed parameter the node yields the same rows, from a store of its
//! own; another statement may use the connection at any time. Read next: [`super::lazy`] for what comes before the first
//! row, `remote::portal` for the chunks.

use std::rc::Rc;

use pgrx::pg_sys;

use super::note;
use super::private::ScanPlan;
use super::shard::{statement, Inputs};
use super::side_by_side::Turn;
use super::together::Together;
use super::tuples::{clear, scan_types, Rows};
use crate::pg::reads::reader::Reader;
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::remote::portal::{Next, Portal, Request};
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::traffic::Traffic;

/// The state of a foreign scan that has begun.
pub struct Scan {
    reader: Reader,
    statement: Rc<Statement>,
    inputs: Inputs,
    rows: Rows,
    needs: Needs,
    chunk: i32,
    portal: Option<Rc<Portal>>,
    /// Of what was run before the portal.
    spent: Traffic,
    row: Vec<u8>,
    /// A row has been passed on.
    has_begun: bool,
    /// Tuples must look like stored ones.
    forms_tuples: bool,
    /// The rows read so far, if the node may be rewound.
    store: Option<Store>,
    /// The last row wanted has not come (asynchronous scans only).
    pub pending: bool,
    /// Its place among the scans that run side by side, while it has rows to come.
    pub turn: Option<Turn>,
    /// Those that may be asked when it has ended.
    together: Option<Rc<Together>>,
}

/// Rows kept for a rewind.
struct Store {
    raw: *mut pg_sys::Tuplestorestate,
    /// Where a row comes back from it.
    slot: *mut pg_sys::TupleTableSlot,
    /// All rows are in it.
    complete: bool,
    /// The reader is behind what is in it.
    replays: bool,
}

impl Scan {
    /// # Safety
    /// `node` must be a foreign scan that starts, in the memory context of its statement. `rewinds`: the executor may
    /// rewind it.
    pub unsafe fn begin(
        node: *mut pg_sys::ForeignScanState,
        user: pg_sys::Oid,
        rewinds: bool,
        together: Option<Rc<Together>>,
    ) -> Result<Self> {
        let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
        let own = ScanPlan::read((*plan).fdw_private);
        let desc = (*(*node).ss.ss_ScanTupleSlot).tts_tupleDescriptor;
        let rows = Rows::new(desc, &own.retrieved, &scan_types(node));
        let inputs = Inputs::new((*plan).fdw_exprs, std::ptr::addr_of_mut!((*node).ss.ps));
        let forms_tuples = (*plan).fsSystemCol || rows.has_ctid();
        Ok(Self {
            reader: Reader::open((*plan).fs_server, user, reads_only(plan))?,
            statement: statement(own.sql, inputs.types.clone(), rows.formats(), rows.wanted()),
            inputs,
            needs: rows.needs(),
            rows,
            chunk: own.fetch_size,
            portal: None,
            spent: Traffic::default(),
            row: Vec::new(),
            has_begun: false,
            forms_tuples,
            store: (rewinds && !forms_tuples).then(|| Store::new(desc)),
            pending: false,
            turn: None,
            together,
        })
    }

    /// Sends the statement, unless it was sent.
    ///
    /// # Safety
    /// `node` must be the scan's.
    pub unsafe fn start(&mut self, node: *mut pg_sys::ForeignScanState) -> Result<Rc<Portal>> {
        if let Some(portal) = &self.portal {
            return Ok(Rc::clone(portal));
        }
        let portal = loop {
            let params = self.inputs.compute((*node).ss.ps.ps_ExprContext);
            let statement = Rc::clone(&self.statement);
            let request = Request {
                statement,
                params,
                chunk: self.chunk,
                begin: true,
                writes: false,
                needs: self.needs,
                commits: false,
            };
            match self.reader.connection.start(request) {
                Ok(portal) => break portal,
                Err(failure) => self.reader.move_on(failure)?,
            }
        };
        self.portal = Some(Rc::clone(&portal));
        Ok(portal)
    }

    /// Reads a row. A lost replica is replaced as long as no row was passed on.
    unsafe fn read(&mut self, node: *mut pg_sys::ForeignScanState, waits: bool) -> Result<Next> {
        loop {
            let portal = self.start(node)?;
            let next = match waits {
                false => portal.try_next(&mut self.row),
                true => portal.next(&mut self.row).map(|more| if more { Next::Row } else { Next::End }),
            };
            match next {
                Err(failure) if !self.has_begun => {
                    self.reader.move_on(failure)?;
                    self.portal = None;
                }
                next => {
                    self.has_begun |= matches!(next, Ok(Next::Row));
                    return next;
                }
            }
        }
    }

    /// Puts the next row into the node's slot; an empty slot: there are no more, or it is [`Scan::pending`].
    ///
    /// # Safety
    /// `node` must be the scan's, and the current memory context that of the row.
    pub unsafe fn next(
        &mut self,
        node: *mut pg_sys::ForeignScanState,
        waits: bool,
    ) -> Result<*mut pg_sys::TupleTableSlot> {
        let slot = (*node).ss.ss_ScanTupleSlot;
        self.pending = false;
        if let Some(store) = &mut self.store {
            if store.replays && store.next(slot) {
                return Ok(slot);
            }
            if store.complete {
                return Ok(clear(slot));
            }
        }
        match self.read(node, waits)? {
            Next::Row if self.forms_tuples => {
                let tuple = self.rows.form(&self.row)?;
                pg_sys::ExecStoreHeapTuple(tuple, slot, false);
            }
            Next::Row => {
                self.rows.store_virtual(&self.row, slot)?;
                if let Some(store) = &self.store {
                    pg_sys::tuplestore_puttupleslot(store.raw, slot);
                }
            }
            Next::End => {
                self.turn = None;
                self.store.iter_mut().for_each(|store| store.complete = true);
                clear(slot);
                if let Some(together) = self.together.take() {
                    together.ask()?;
                }
            }
            Next::Pending => {
                self.pending = true;
                clear(slot);
            }
        }
        Ok(slot)
    }

    /// Begins anew. `changed`: with other parameters.
    pub fn rescan(&mut self, changed: bool) -> Result<()> {
        match &mut self.store {
            Some(store) if !changed => store.rewind(),
            store => {
                store.iter_mut().for_each(Store::empty);
                self.close()?;
                self.has_begun = false;
            }
        }
        Ok(())
    }

    /// Ends the statement on the shard.
    pub fn close(&mut self) -> Result<()> {
        self.turn = None;
        let Some(portal) = self.portal.take() else { return Ok(()) };
        portal.close()?;
        self.spent = self.spent + portal.traffic();
        Ok(())
    }

    /// What it has cost on the way.
    pub fn traffic(&self) -> Traffic {
        self.portal.as_ref().map_or(self.spent, |portal| self.spent + portal.traffic())
    }

    /// From where it reads.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// What has been sent, if anything.
    pub fn portal(&self) -> Option<&Rc<Portal>> {
        self.portal.as_ref()
    }
}

/// Whether the statement of a scan was found to do nothing but read.
///
/// # Safety
/// `plan` must be valid.
pub unsafe fn reads_only(plan: *const pg_sys::ForeignScan) -> bool {
    note::read((*plan).fdw_private).is_some_and(|note| note.reads_only)
}

impl Store {
    /// # Safety
    /// In the memory context of the statement, for rows of `desc`.
    unsafe fn new(desc: pg_sys::TupleDesc) -> Self {
        let raw = pg_sys::tuplestore_begin_heap(false, false, pg_sys::work_mem);
        let slot = pg_sys::MakeSingleTupleTableSlot(desc, std::ptr::addr_of!(pg_sys::TTSOpsMinimalTuple));
        Self { raw, slot, complete: false, replays: false }
    }

    /// # Safety
    /// `slot` must be of the rows' type.
    unsafe fn next(&mut self, slot: *mut pg_sys::TupleTableSlot) -> bool {
        self.replays = pg_sys::tuplestore_gettupleslot(self.raw, true, false, self.slot);
        if self.replays {
            let width = (*(*slot).tts_tupleDescriptor).natts as usize;
            if width > 0 {
                pg_sys::slot_getsomeattrs_int(self.slot, width as i32);
            }
            clear(slot);
            std::ptr::copy_nonoverlapping((*self.slot).tts_values, (*slot).tts_values, width);
            std::ptr::copy_nonoverlapping((*self.slot).tts_isnull, (*slot).tts_isnull, width);
            pg_sys::ExecStoreVirtualTuple(slot);
        }
        self.replays
    }

    fn rewind(&mut self) {
        // SAFETY: a live store.
        unsafe { pg_sys::tuplestore_rescan(self.raw) }
        self.replays = true;
    }

    fn empty(&mut self) {
        // SAFETY: a live store.
        unsafe { pg_sys::tuplestore_clear(self.raw) }
        (self.complete, self.replays) = (false, false);
    }

    fn end(&mut self) {
        // SAFETY: ended once, when the node ends in good order; else its memory context ends it.
        unsafe {
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::tuplestore_end(self.raw);
        }
    }
}

impl Scan {
    /// Ends the scan in good order.
    pub fn end(mut self) -> Result<()> {
        self.store.iter_mut().for_each(Store::end);
        self.close()
    }
}
