//! An UPDATE or DELETE that the shard does by itself, in one remote statement; its RETURNING rows read as they come.
//!
//! Decides nothing; what may be done this way was decided by postgres_fdw's planning.

use std::rc::Rc;

use pgrx::pg_sys::{self, Datum};

use super::private::DirectPlan;
use super::shard::{connect, statement, Inputs};
use super::tuples::{clear, scan_types, Rows};
use crate::pg::query::tree::{cast, items};
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::remote::portal::{Portal, Request};
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::traffic::Traffic;
use crate::pg::remote::Connection;

/// The state of a direct modification that has begun.
pub struct Direct {
    connection: Connection,
    statement: Rc<Statement>,
    inputs: Inputs,
    rows: Rows,
    needs: Needs,
    has_returning: bool,
    counts: bool,
    portal: Option<Rc<Portal>>,
    row: Vec<u8>,
    /// Rows to return that carry no values of the shard's.
    blank: u64,
    /// Where the target's columns are in the rows of a remote join.
    target: Option<Target>,
}

/// The target's columns in a joined row: for each, the joined column, counted from 0.
struct Target {
    places: Vec<Option<usize>>,
    ctid: Option<usize>,
}

impl Direct {
    /// # Safety
    /// `node` must be a direct modification that starts, in the memory context of its statement.
    pub unsafe fn begin(node: *mut pg_sys::ForeignScanState, user: pg_sys::Oid) -> Result<Self> {
        let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
        let own = DirectPlan::read((*plan).fdw_private);
        let desc = (*(*node).ss.ss_ScanTupleSlot).tts_tupleDescriptor;
        let joins = (*plan).scan.scanrelid == 0;
        let retrieved = if own.has_returning { own.retrieved } else { Vec::new() };
        let target = (joins && own.has_returning).then(|| Target::find(node, plan, &retrieved));
        let rows = Rows::new(desc, &retrieved, &scan_types(node));
        let inputs = Inputs::new((*plan).fdw_exprs, std::ptr::addr_of_mut!((*node).ss.ps));
        Ok(Self {
            connection: connect((*plan).fs_server, user)?,
            statement: statement(own.sql, inputs.types.clone(), rows.formats(), rows.wanted()),
            inputs,
            needs: rows.needs(),
            rows,
            has_returning: own.has_returning,
            counts: own.counts,
            portal: None,
            row: Vec::new(),
            blank: 0,
            target,
        })
    }

    /// Runs the statement the first time; then returns its rows, if it has to.
    ///
    /// # Safety
    /// `node` must be the modification's.
    pub unsafe fn next(&mut self, node: *mut pg_sys::ForeignScanState) -> Result<*mut pg_sys::TupleTableSlot> {
        let slot = (*node).ss.ss_ScanTupleSlot;
        let estate = (*node).ss.ps.state;
        let result = (*node).resultRelInfo;
        let returns = !(*result).ri_projectReturning.is_null();
        let portal = match &self.portal {
            Some(portal) => Rc::clone(portal),
            None => {
                let portal = self.run(node)?;
                if !self.has_returning {
                    portal.next(&mut self.row)?;
                    self.blank = portal.affected();
                    if !returns {
                        self.count(node, self.blank);
                        return Ok(clear(slot));
                    }
                }
                portal
            }
        };
        let found = match self.has_returning {
            true => portal.next(&mut self.row)?,
            false => {
                let left = self.blank;
                self.blank = left.saturating_sub(1);
                left > 0
            }
        };
        if !found || !returns {
            return Ok(clear(slot));
        }
        if self.counts {
            (*estate).es_processed += 1;
        }
        let shown = if self.has_returning {
            let tuple = self.rows.form(&self.row)?;
            pg_sys::ExecStoreHeapTuple(tuple, slot, false);
            match &self.target {
                Some(target) => target.row(slot, result, estate),
                None => slot,
            }
        } else {
            // RETURNING with nothing of the row in it.
            pg_sys::ExecStoreAllNullTuple(slot)
        };
        (*(*(*result).ri_projectReturning).pi_exprContext).ecxt_scantuple = shown;
        Ok(slot)
    }

    unsafe fn run(&mut self, node: *mut pg_sys::ForeignScanState) -> Result<Rc<Portal>> {
        let params = self.inputs.compute((*node).ss.ps.ps_ExprContext);
        let statement = Rc::clone(&self.statement);
        let portal = self.connection.start(Request {
            statement,
            params,
            chunk: 0,
            begin: true,
            writes: true,
            needs: self.needs,
            commits: false,
        })?;
        self.portal = Some(Rc::clone(&portal));
        Ok(portal)
    }

    /// Counts rows written that are not returned.
    unsafe fn count(&self, node: *mut pg_sys::ForeignScanState, rows: u64) {
        if self.counts {
            (*(*node).ss.ps.state).es_processed += rows;
        }
        if let Some(instrument) = (*node).ss.ps.instrument.as_mut() {
            instrument.tuplecount += rows as f64;
        }
    }

    /// What it has cost on the way.
    pub fn traffic(&self) -> Traffic {
        self.portal.as_ref().map_or_else(Traffic::default, |portal| portal.traffic())
    }

    pub fn end(self) -> Result<()> {
        self.portal.map_or(Ok(()), |portal| portal.close())
    }
}

impl Target {
    unsafe fn find(node: *mut pg_sys::ForeignScanState, plan: *const pg_sys::ForeignScan, retrieved: &[i16]) -> Self {
        let relation = (*(*node).resultRelInfo).ri_RelationDesc;
        let mut places = vec![None; (*(*relation).rd_att).natts as usize];
        let mut ctid = None;
        for (at, entry) in items::<pg_sys::TargetEntry>((*plan).fdw_scan_tlist).enumerate() {
            let Some(var) = cast::<pg_sys::Var>((*entry).expr.cast(), pg_sys::NodeTag::T_Var) else { continue };
            let is_target = (*var).varno as u32 == (*(*node).resultRelInfo).ri_RangeTableIndex;
            if !is_target || !retrieved.contains(&(at as i16 + 1)) {
                continue;
            }
            match (*var).varattno {
                number if number > 0 => places[number as usize - 1] = Some(at),
                number if i32::from(number) == pg_sys::SelfItemPointerAttributeNumber => ctid = Some(at),
                _ => {}
            }
        }
        Self { places, ctid }
    }

    /// The target's row in a slot of its own.
    unsafe fn row(
        &self,
        joined: *mut pg_sys::TupleTableSlot,
        result: *mut pg_sys::ResultRelInfo,
        estate: *mut pg_sys::EState,
    ) -> *mut pg_sys::TupleTableSlot {
        let slot = pg_sys::ExecGetReturningSlot(estate, result);
        pg_sys::slot_getsomeattrs_int(joined, (*(*joined).tts_tupleDescriptor).natts);
        clear(slot);
        for (at, place) in self.places.iter().enumerate() {
            let is_null = place.is_none_or(|place| *(*joined).tts_isnull.add(place));
            *(*slot).tts_isnull.add(at) = is_null;
            *(*slot).tts_values.add(at) = match place {
                Some(place) if !is_null => *(*joined).tts_values.add(*place),
                _ => Datum::from(0),
            };
        }
        pg_sys::ExecStoreVirtualTuple(slot);
        if let Some(place) = self.ctid.filter(|place| !*(*joined).tts_isnull.add(*place)) {
            let ctid = *(*(*joined).tts_values.add(place)).cast_mut_ptr::<pg_sys::ItemPointerData>();
            let tuple = pg_sys::ExecFetchSlotHeapTuple(slot, true, std::ptr::null_mut());
            (*tuple).t_self = ctid;
            (*tuple).t_tableOid = (*(*result).ri_RelationDesc).rd_id;
            (*slot).tts_tid = ctid;
        }
        slot
    }
}
