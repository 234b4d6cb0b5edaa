//! Reading the extension's own small tables, whole, with the newest snapshot.
//!
//! The statement's own snapshot would show a stale map to a writer that waited for a mover's lock, and to REPEATABLE
//! READ; so every scan takes a fresh one. A parallel worker may not take one: it uses the snapshot that it was given.

use std::collections::HashMap;

use pgrx::{pg_sys, FromDatum, IntoDatum, PgList};

use crate::pg::encoding;
use crate::pg::keys::Varlena;

/// One row of a catalog table, by column name.
pub struct Row<'a> {
    columns: &'a HashMap<String, (usize, pg_sys::Oid)>,
    values: &'a [pg_sys::Datum],
    nulls: &'a [bool],
}

impl Row<'_> {
    /// The value of column `name`; `None` if it is NULL, or if the table has no such column of a type that fits.
    pub fn get<T: FromDatum + IntoDatum>(&self, name: &str) -> Option<T> {
        let (at, type_oid) = *self.columns.get(name)?;
        if !T::is_compatible_with(type_oid) {
            return None;
        }
        // SAFETY: the datum belongs to a live tuple, and its type has just been checked.
        unsafe { T::from_datum(*self.values.get(at)?, *self.nulls.get(at)?) }
    }

    /// The text of column `name`, which is of type text or name.
    pub fn text(&self, name: &str) -> Option<String> {
        let (at, type_oid) = *self.columns.get(name)?;
        match type_oid {
            _ if *self.nulls.get(at)? => None,
            // SAFETY: a name is passed as a pointer to a zero-terminated array.
            pg_sys::NAMEOID => Some(unsafe { encoding::utf8_string(self.values.get(at)?.cast_mut_ptr()) }),
            pg_sys::TEXTOID => {
                // SAFETY: the datum belongs to a live tuple, and is a text.
                let text = unsafe { Varlena::of(*self.values.get(at)?) };
                Some(encoding::utf8(text.bytes()).into_owned())
            }
            _ => None,
        }
    }

    /// The OID in column `name`, which is of type oid or one of its aliases (regclass, regtype, regprocedure).
    pub fn oid(&self, name: &str) -> Option<pg_sys::Oid> {
        let (at, type_oid) = *self.columns.get(name)?;
        let is_oid =
            [pg_sys::OIDOID, pg_sys::REGCLASSOID, pg_sys::REGTYPEOID, pg_sys::REGPROCEDUREOID].contains(&type_oid);
        let found = is_oid && !*self.nulls.get(at)?;
        found.then(|| pg_sys::Oid::from(self.values[at].value() as u32))
    }
}

/// The snapshot a scan runs under, given back when it is dropped.
struct Fresh(pg_sys::Snapshot);

impl Fresh {
    fn take() -> Self {
        // SAFETY: called inside a transaction. A parallel worker must not take a new snapshot; it has an active one.
        unsafe {
            let snapshot = match pg_sys::IsInParallelMode() {
                true => pg_sys::GetActiveSnapshot(),
                false => pg_sys::GetLatestSnapshot(),
            };
            Self(pg_sys::RegisterSnapshot(snapshot))
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // After an error the resource owner gives it back itself, at abort.
        if !std::thread::panicking() {
            // SAFETY: registered in `take`.
            unsafe { pg_sys::UnregisterSnapshot(self.0) }
        }
    }
}

/// Calls `each` for every row of table `relid`, which the caller has looked up.
pub fn rows(relid: pg_sys::Oid, mut each: impl FnMut(&Row<'_>)) {
    let snapshot = Fresh::take();
    // SAFETY: relation, descriptor and tuples are used between table_open and table_close only; a tuple is deformed
    // into vectors of the descriptor's length. An error in between is cleaned up by the transaction's abort.
    unsafe {
        let rel = pg_sys::table_open(relid, pg_sys::AccessShareLock as _);
        let desc = (*rel).rd_att;
        let width = (*desc).natts as usize;
        let columns = column_names(desc, width);
        let mut values = vec![pg_sys::Datum::from(0); width];
        let mut nulls = vec![true; width];
        let scan = pg_sys::systable_beginscan(rel, pg_sys::InvalidOid, false, snapshot.0, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            pg_sys::heap_deform_tuple(tuple, desc, values.as_mut_ptr(), nulls.as_mut_ptr());
            each(&Row { columns: &columns, values: &values, nulls: &nulls });
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(rel, pg_sys::AccessShareLock as _);
    }
}

/// # Safety
/// `desc` must be valid and have `width` attributes.
unsafe fn column_names(desc: pg_sys::TupleDesc, width: usize) -> HashMap<String, (usize, pg_sys::Oid)> {
    (0..width)
        .filter_map(|at| {
            let attribute = crate::pg::raw::attribute(desc, at);
            if attribute.attisdropped {
                return None;
            }
            let name = encoding::utf8_string(attribute.attname.data.as_ptr());
            Some((name, (at, attribute.atttypid)))
        })
        .collect()
}

/// The partitions of `parent`, in no particular order; no lock is taken.
pub fn children(parent: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    // SAFETY: a catalog look-up that returns a list of OIDs, or NIL.
    unsafe {
        let list = crate::pg::raw::find_inheritance_children(parent, pg_sys::NoLock as _);
        PgList::<pg_sys::Oid>::from_pg(list).iter_oid().collect()
    }
}
