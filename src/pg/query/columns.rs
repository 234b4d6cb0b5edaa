//! Which column an expression is, and by which rules two sides of an equality compare.

use std::collections::HashMap;

use pgrx::pg_sys;
use shardmap_core::key::KeyKind;
use shardmap_core::route::Column;

use super::tree::{cast, items, nth, rte, tag};
use crate::pg::keys::KeyType;

/// A column with the kind of its values, and the kind as which an operator sees them.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    pub column: Column,
    pub kind: KeyKind,
    /// Whether it is the column itself, without a cast.
    pub bare: bool,
}

/// Numbers the columns of a statement.
#[derive(Default)]
pub struct Columns {
    numbers: HashMap<(usize, u32, i16), Column>,
}

impl Columns {
    /// The number of attribute `attribute` of range table entry `rti` in `query`.
    pub fn number(&mut self, query: *const pg_sys::Query, rti: u32, attribute: i16) -> Column {
        let next = Column(self.numbers.len() as u32);
        *self.numbers.entry((query as usize, rti, attribute)).or_insert(next)
    }

    /// The column that `var` names, seen from the innermost of `levels`; through the alias columns of joins.
    ///
    /// # Safety
    /// `levels` must be the valid queries around `var`, outermost first.
    pub unsafe fn of_var(&mut self, var: *const pg_sys::Var, levels: &[*mut pg_sys::Query]) -> Option<Column> {
        let depth = levels.len().checked_sub(1 + (*var).varlevelsup as usize)?;
        let levels = &levels[..=depth];
        let query = levels[depth];
        let rti = u32::try_from((*var).varno).ok()?;
        let entry = rte(query, rti)?;
        if (*var).varattno <= 0 {
            return None;
        }
        if (*entry).rtekind == pg_sys::RTEKind::RTE_JOIN {
            let alias = nth::<pg_sys::Node>((*entry).joinaliasvars, (*var).varattno as usize - 1)?;
            return self.of_var(cast(strip(alias), pg_sys::NodeTag::T_Var)?, levels);
        }
        #[cfg(feature = "pg18")]
        if (*entry).rtekind == pg_sys::RTEKind::RTE_GROUP {
            let grouped = nth::<pg_sys::Node>((*entry).groupexprs, (*var).varattno as usize - 1)?;
            return self.of_var(cast(strip(grouped), pg_sys::NodeTag::T_Var)?, levels);
        }
        Some(self.number(query, rti, (*var).varattno))
    }

    /// The column behind `node`, if it is one, possibly cast in a way that keeps equality.
    ///
    /// # Safety
    /// As [`Columns::of_var`].
    pub unsafe fn side(&mut self, node: *mut pg_sys::Node, levels: &[*mut pg_sys::Query]) -> Option<Side> {
        let seen_as = KeyType::of(pg_sys::exprType(node))?.kind;
        let bare = strip(node);
        let var = cast::<pg_sys::Var>(bare, pg_sys::NodeTag::T_Var)?;
        let own = KeyType::of((*var).vartype)?.kind;
        if !keeps_equality(own, seen_as, bare != node) {
            return None;
        }
        Some(Side { column: self.of_var(var, levels)?, kind: seen_as, bare: bare == node })
    }
}

/// Whether values of kind `own`, seen as `seen_as`, are equal exactly if their canonical texts are.
fn keeps_equality(own: KeyKind, seen_as: KeyKind, is_cast: bool) -> bool {
    use KeyKind::{Bpchar, Date, Integer, Numeric, Text, Timestamp};
    match (own, seen_as) {
        (Integer, Numeric) | (Date, Timestamp) | (Bpchar, Text) => is_cast,
        _ => own == seen_as,
    }
}

/// Whether an equality operator between values seen as `a` and `b` holds exactly if their canonical texts are equal.
pub fn comparable(a: KeyKind, b: KeyKind) -> bool {
    use KeyKind::{Date, Timestamp};
    a == b || matches!((a, b), (Date, Timestamp) | (Timestamp, Date))
}

/// `node` without the casts under which values that are equal stay equal, and different stay different.
///
/// # Safety
/// `node` must be NULL or a valid expression.
pub unsafe fn strip(mut node: *mut pg_sys::Node) -> *mut pg_sys::Node {
    loop {
        node = match tag(node) {
            pg_sys::NodeTag::T_RelabelType => (*node.cast::<pg_sys::RelabelType>()).arg.cast(),
            pg_sys::NodeTag::T_FuncExpr => match lossless_argument(node.cast()) {
                Some(argument) => argument,
                None => return node,
            },
            _ => return node,
        };
    }
}

/// The argument of a cast function that keeps values apart.
unsafe fn lossless_argument(call: *const pg_sys::FuncExpr) -> Option<*mut pg_sys::Node> {
    const LOSSLESS: [u32; 8] = [
        pg_sys::F_INT4_INT2,
        pg_sys::F_INT8_INT2,
        pg_sys::F_INT8_INT4,
        pg_sys::F_NUMERIC_INT2,
        pg_sys::F_NUMERIC_INT4,
        pg_sys::F_NUMERIC_INT8,
        pg_sys::F_TIMESTAMP_DATE,
        pg_sys::F_TEXT_BPCHAR,
    ];
    let known = LOSSLESS.contains(&(*call).funcid.to_u32());
    (known && items::<pg_sys::Node>((*call).args).count() == 1).then(|| nth((*call).args, 0)).flatten()
}

/// Whether `operator` is a built-in equality operator whose collation, if it has one, tells different texts apart.
pub fn is_equality(operator: pg_sys::Oid, collation: pg_sys::Oid) -> bool {
    // SAFETY: system cache look-ups.
    unsafe {
        operator.to_u32() < pg_sys::FirstNormalObjectId
            && !pg_sys::get_mergejoin_opfamilies(operator).is_null()
            && is_deterministic(collation)
    }
}

/// Whether texts that are equal in `collation` are the same bytes.
pub fn is_deterministic(collation: pg_sys::Oid) -> bool {
    // SAFETY: a system cache look-up.
    collation == pg_sys::InvalidOid || unsafe { pg_sys::get_collation_isdeterministic(collation) }
}
