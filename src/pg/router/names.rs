//! Names that the text of a statement would give another meaning.
//!
//! `SELECT -id AS id FROM t ORDER BY t.id` is written out as `ORDER BY id`, which is the output column; some versions of
//! Postgres see to it themselves. What always holds: where a column that is sorted by has the name of another output, all
//! columns are written with their table.

use std::ffi::CStr;

use pgrx::pg_sys;

use crate::pg::query::tree::{cast, items, nth};

/// Makes the text of `query` name tables, if it has to. Only the columns of the one table of a whole statement are ever
/// written without it.
///
/// # Safety
/// `query` must be a valid copy that is about to be written out, and for nothing else.
pub unsafe fn qualify(query: *mut pg_sys::Query) {
    let Some(entry) = nth::<pg_sys::RangeTblEntry>((*query).rtable, 0) else { return };
    if (*(*query).rtable).length == 1 && sorts_by_hidden_column(query, entry) {
        let other = pgrx::PgBox::<pg_sys::RangeTblEntry>::alloc_node(pg_sys::NodeTag::T_RangeTblEntry).into_pg();
        (*other).rtekind = pg_sys::RTEKind::RTE_RESULT;
        (*other).eref = pg_sys::makeAlias(c"*RESULT*".as_ptr(), std::ptr::null_mut());
        (*query).rtable = pg_sys::lappend((*query).rtable, other.cast());
    }
}

unsafe fn sorts_by_hidden_column(query: *mut pg_sys::Query, entry: *mut pg_sys::RangeTblEntry) -> bool {
    let targets = || items::<pg_sys::TargetEntry>((*query).targetList);
    items::<pg_sys::SortGroupClause>((*query).sortClause)
        .chain(items::<pg_sys::SortGroupClause>((*query).distinctClause))
        .filter_map(|clause| targets().find(|target| (**target).ressortgroupref == (*clause).tleSortGroupRef))
        .any(|sorted| {
            let name = column_name(entry, (*sorted).expr.cast());
            let hides = |target: *mut pg_sys::TargetEntry| {
                !(*target).resjunk
                    && !(*target).resname.is_null()
                    && name.is_some_and(|name| CStr::from_ptr((*target).resname) == name)
                    && !pg_sys::equal((*target).expr.cast(), (*sorted).expr.cast())
            };
            targets().any(hides)
        })
}

/// The name of the column that `node` is.
unsafe fn column_name<'a>(entry: *mut pg_sys::RangeTblEntry, node: *mut pg_sys::Node) -> Option<&'a CStr> {
    let var = cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var)?;
    let name = match (*entry).rtekind {
        pg_sys::RTEKind::RTE_RELATION => pg_sys::get_attname((*entry).relid, (*var).varattno, true),
        _ => (*nth::<pg_sys::String>((*(*entry).eref).colnames, usize::try_from((*var).varattno - 1).ok()?)?).sval,
    };
    (!name.is_null()).then(|| CStr::from_ptr(name))
}
