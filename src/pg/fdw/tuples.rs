//! A shard's rows put into slots, for the row type of a table or of a join.

use pgrx::pg_sys::{self, Datum};

use crate::pg::query::tree::{cast, nth};
use crate::pg::raw::attribute;
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::transfer::decode::{fill, Column};

/// The column of a table that says where a row is.
const CTID: i16 = pg_sys::SelfItemPointerAttributeNumber as i16;

/// Reads rows of one row type.
pub struct Rows {
    columns: Vec<Column>,
    places: Vec<usize>,
    width: usize,
    /// The result column that is the row's ctid.
    ctid: Option<usize>,
    desc: pg_sys::TupleDesc,
    /// Room for a row: the columns, and the ctid behind them.
    values: Vec<Datum>,
    nulls: Vec<bool>,
}

impl Rows {
    /// For rows of `desc` whose result columns are `retrieved`, with the types in `types`.
    ///
    /// # Safety
    /// `desc` must outlive the reader, which must not outlive the current memory context.
    pub unsafe fn new(desc: pg_sys::TupleDesc, retrieved: &[i16], types: &[(pg_sys::Oid, i32)]) -> Self {
        let width = (*desc).natts as usize;
        let ctid = retrieved.iter().position(|column| *column == CTID);
        let column = |number: &i16| match usize::try_from(number - 1).ok().and_then(|at| types.get(at)) {
            Some((kind, typmod)) => Column::new(*kind, *typmod),
            None => Column::new(pg_sys::TIDOID, -1),
        };
        Self {
            columns: retrieved.iter().map(column).collect(),
            places: retrieved.iter().map(|number| usize::try_from(number - 1).unwrap_or(width)).collect(),
            width,
            ctid,
            desc,
            values: vec![Datum::from(0); width + 1],
            nulls: vec![true; width + 1],
        }
    }

    /// The formats in which results are to come.
    pub fn formats(&self) -> Box<[i16]> {
        self.columns.iter().map(Column::format).collect()
    }

    /// What the results' text needs of the session.
    pub fn needs(&self) -> Needs {
        match self.columns.iter().any(Column::depends_on_settings) {
            true => Needs::Plain,
            false => Needs::Nothing,
        }
    }

    /// The types that the results must have on the shard.
    pub fn wanted(&self) -> Box<[pg_sys::Oid]> {
        self.columns.iter().map(Column::wanted).collect()
    }

    /// Puts the row into `slot`, with values in the current memory context, which must live as long as the slot holds it.
    ///
    /// # Safety
    /// `slot` must be of the row type, and able to hold virtual tuples.
    pub unsafe fn store_virtual(&mut self, row: &[u8], slot: *mut pg_sys::TupleTableSlot) -> Result<()> {
        clear(slot);
        let (values, nulls) = ((*slot).tts_values, (*slot).tts_isnull);
        std::slice::from_raw_parts_mut(nulls, self.width).fill(true);
        fill(row, &mut self.columns, &self.places, values, nulls)?;
        pg_sys::ExecStoreVirtualTuple(slot);
        Ok(())
    }

    /// The row as a tuple in the current memory context, with its ctid if that is among the results.
    ///
    /// # Safety
    /// As [`Rows::new`].
    pub unsafe fn form(&mut self, row: &[u8]) -> Result<pg_sys::HeapTuple> {
        self.nulls.fill(true);
        fill(row, &mut self.columns, &self.places, self.values.as_mut_ptr(), self.nulls.as_mut_ptr())?;
        let tuple = pg_sys::heap_form_tuple(self.desc, self.values.as_mut_ptr(), self.nulls.as_mut_ptr());
        if self.ctid.is_some() && !self.nulls[self.width] {
            let ctid = *self.values[self.width].cast_mut_ptr::<pg_sys::ItemPointerData>();
            (*tuple).t_self = ctid;
            (*(*tuple).t_data).t_ctid = ctid;
        }
        // As postgres_fdw does: there is no transaction of ours to show in xmin, xmax and cmin.
        let header = std::ptr::addr_of_mut!((*(*tuple).t_data).t_choice.t_heap);
        (*header).t_xmin = pg_sys::InvalidTransactionId;
        (*header).t_xmax = pg_sys::InvalidTransactionId;
        (*header).t_field3.t_cid = 0;
        Ok(tuple)
    }

    pub fn has_ctid(&self) -> bool {
        self.ctid.is_some()
    }
}

/// Types and type modifiers of a row type's columns.
///
/// # Safety
/// `desc` must be valid.
pub unsafe fn types(desc: pg_sys::TupleDesc) -> Vec<(pg_sys::Oid, i32)> {
    (0..(*desc).natts as usize)
        .map(|at| {
            let column = attribute(desc, at);
            (column.atttypid, column.atttypmod)
        })
        .collect()
}

/// [`types`] of a foreign scan's rows.
///
/// # Safety
/// `node` must be an initialised foreign scan.
pub unsafe fn scan_types(node: *mut pg_sys::ForeignScanState) -> Vec<(pg_sys::Oid, i32)> {
    let plan = (*node).ss.ps.plan.cast::<pg_sys::ForeignScan>();
    let desc = (*(*node).ss.ss_ScanTupleSlot).tts_tupleDescriptor;
    match (*plan).scan.scanrelid {
        0 => join_types(desc, plan, (*(*node).ss.ps.state).es_range_table),
        _ => types(desc),
    }
}

/// As [`types`], for the rows of a remote join: a whole row of a table has that table's row type, where the plan says
/// only `record`.
///
/// # Safety
/// `plan` must be the plan that `desc` was made for, in a statement with this range table.
unsafe fn join_types(
    desc: pg_sys::TupleDesc,
    plan: *const pg_sys::ForeignScan,
    range_table: *const pg_sys::List,
) -> Vec<(pg_sys::Oid, i32)> {
    let mut all = types(desc);
    for (at, (kind, typmod)) in all.iter_mut().enumerate() {
        if *kind != pg_sys::RECORDOID || *typmod >= 0 {
            continue;
        }
        let Some(entry) = nth::<pg_sys::TargetEntry>((*plan).fdw_scan_tlist, at) else { continue };
        let Some(var) = cast::<pg_sys::Var>((*entry).expr.cast(), pg_sys::NodeTag::T_Var) else { continue };
        let table = nth::<pg_sys::RangeTblEntry>(range_table, (*var).varno as usize - 1);
        if let (0, Some(table)) = ((*var).varattno, table) {
            let own = pg_sys::get_rel_type_id((*table).relid);
            if own != pg_sys::InvalidOid {
                *kind = own;
            }
        }
    }
    all
}

/// Empties `slot` and returns it.
///
/// # Safety
/// `slot` must be valid.
pub unsafe fn clear(slot: *mut pg_sys::TupleTableSlot) -> *mut pg_sys::TupleTableSlot {
    if let Some(clear) = (*(*slot).tts_ops).clear {
        pgrx::pg_sys::ffi::pg_guard_ffi_boundary(|| clear(slot));
    }
    slot
}
