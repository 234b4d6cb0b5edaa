//! MERGE, rewritten for its shard: what its actions write, and its condition.
//!
//! What always holds: a volatile value is computed here only for an INSERT whose source has one row at most, so that it is
//! computed once for its row; it may then have been computed for nothing, as for a row that conflicts.

use pgrx::pg_sys;

use super::ship::Shipper;
use crate::pg::query::merge::actions;
use crate::pg::query::tree::{cast, items, nth, rte};

impl Shipper<'_> {
    /// A copy of the query, whose actions have been looked at.
    pub(super) unsafe fn merge(&mut self, query: *mut pg_sys::Query) -> *mut pg_sys::Query {
        let copy = shallow(query);
        let before = (self.lifts, self.once);
        let one_row = has_one_row(query);
        self.lifts = true;
        (*copy).mergeActionList = std::ptr::null_mut();
        for action in actions(query).collect::<Vec<_>>() {
            let own = shallow(action);
            self.once = false;
            (*own).qual = self.expression((*action).qual);
            self.once = one_row && (*action).commandType == pg_sys::CmdType::CMD_INSERT;
            (*own).targetList = self.list((*action).targetList);
            (*copy).mergeActionList = pg_sys::lappend((*copy).mergeActionList, own.cast());
        }
        self.once = false;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        {
            (*copy).mergeJoinCondition = self.expression((*query).mergeJoinCondition);
        }
        (self.lifts, self.once) = before;
        copy
    }

    unsafe fn expression(&mut self, node: *mut pg_sys::Node) -> *mut pg_sys::Node {
        match node.is_null() {
            true => node,
            false => self.node(node),
        }
    }
}

/// A copy of a node, which shares what it points to.
///
/// # Safety
/// `node` must be valid, and of type `T`.
pub(super) unsafe fn shallow<T>(node: *const T) -> *mut T {
    let copy = pg_sys::palloc(std::mem::size_of::<T>()).cast::<T>();
    copy.copy_from_nonoverlapping(node, 1);
    copy
}

/// Whether the source of a MERGE has one row at most: it is a subquery without tables, or with a VALUES of one row.
unsafe fn has_one_row(query: *mut pg_sys::Query) -> bool {
    let Some(source) = only_item(query).map(|source| (*source).subquery).filter(|source| !source.is_null()) else {
        return false;
    };
    let plain = !(*source).hasTargetSRFs && (*source).setOperations.is_null() && (*source).groupingSets.is_null();
    plain
        && match only_item(source) {
            None => (*(*source).jointree).fromlist.is_null(),
            Some(item) => {
                (*item).rtekind == pg_sys::RTEKind::RTE_VALUES && nth::<pg_sys::List>((*item).values_lists, 1).is_none()
            }
        }
}

/// The only item of a FROM.
unsafe fn only_item(query: *mut pg_sys::Query) -> Option<*mut pg_sys::RangeTblEntry> {
    let mut items = items::<pg_sys::Node>((*(*query).jointree).fromlist);
    let only = items.next().filter(|_| items.next().is_none())?;
    rte(query, (*cast::<pg_sys::RangeTblRef>(only, pg_sys::NodeTag::T_RangeTblRef)?).rtindex as u32)
}
