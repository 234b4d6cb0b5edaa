//! Row security and security barriers in a statement that goes whole: the policies become conditions like all others.
//!
//! On one server a condition of the user's sees no row that a policy hides, unless it can tell nothing about it. In the
//! text for the shard no such order stands. What always holds: a statement goes whole only if its order does not matter,
//! because every condition in it, and whatever a condition's column may turn out to be, is leakproof. Refuses, for a lower
//! step: policies with subqueries, several of them on one table that are not leakproof, and those of tables below outer joins.

use pgrx::pg_sys;

use super::merge::shallow;
use super::whole::Obstacle;
use crate::pg::query::tree::{cast, items, subqueries, tag};

pub const SECURITY: Obstacle = "Row security or a security barrier applies.";
const LEAKY: Obstacle = "Row security or a security barrier applies, and an expression might tell what it sees.";

/// Checks whether what guards the statement's tables may be put among its conditions.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn check(query: *mut pg_sys::Query) -> Result<(), Obstacle> {
    match is_guarded(query) {
        false => Ok(()),
        true => level(query, true),
    }
}

unsafe fn is_guarded(query: *mut pg_sys::Query) -> bool {
    let guarded = |entry: *mut pg_sys::RangeTblEntry| (*entry).security_barrier || !(*entry).securityQuals.is_null();
    items::<pg_sys::RangeTblEntry>((*query).rtable).any(guarded)
        || subqueries(query).into_iter().any(|inner| is_guarded(inner))
}

unsafe fn level(query: *mut pg_sys::Query, is_top: bool) -> Result<(), Obstacle> {
    if (*query).commandType == pg_sys::CmdType::CMD_MERGE {
        return Err(SECURITY);
    }
    let mut inner_joined = Vec::new();
    let mut leaks = pg_sys::contain_leaked_vars((*query).havingQual);
    // The column of a subquery may become its expression in a condition outside.
    let exprs = || items::<pg_sys::TargetEntry>((*query).targetList).map(|target| (*target).expr.cast());
    leaks |= !is_top && exprs().any(|expr| pg_sys::contain_leaked_vars(expr));
    visit((*query).jointree.cast(), true, &mut inner_joined, &mut leaks);
    for (at, entry) in items::<pg_sys::RangeTblEntry>((*query).rtable).enumerate() {
        let policies = (*entry).securityQuals;
        if policies.is_null() {
            continue;
        }
        let number = at as i32 + 1;
        let is_in_place = inner_joined.contains(&number) || (*query).resultRelation == number;
        // Those of several layers hide rows from each other.
        let plain = (*policies).length == 1 || !pg_sys::contain_leaked_vars(policies.cast());
        if !is_in_place || !plain || pg_sys::checkExprHasSubLink(policies.cast()) {
            return Err(SECURITY);
        }
    }
    if leaks {
        return Err(LEAKY);
    }
    subqueries(query).into_iter().try_for_each(|inner| level(inner, false))
}

/// Looks through a join tree: the entries that are reached by inner joins alone, and whether a condition leaks.
unsafe fn visit(node: *mut pg_sys::Node, is_inner: bool, found: &mut Vec<i32>, leaks: &mut bool) {
    match tag(node) {
        pg_sys::NodeTag::T_FromExpr => {
            let from = node.cast::<pg_sys::FromExpr>();
            *leaks |= pg_sys::contain_leaked_vars((*from).quals);
            items::<pg_sys::Node>((*from).fromlist).for_each(|item| visit(item, is_inner, found, leaks));
        }
        pg_sys::NodeTag::T_JoinExpr => {
            let join = node.cast::<pg_sys::JoinExpr>();
            *leaks |= pg_sys::contain_leaked_vars((*join).quals);
            let inner = is_inner && (*join).jointype == pg_sys::JoinType::JOIN_INNER;
            // The side of which every row is kept may be restricted before or after the join.
            let kept = inner || (is_inner && (*join).jointype == pg_sys::JoinType::JOIN_LEFT);
            visit((*join).larg, kept, found, leaks);
            visit((*join).rarg, inner, found, leaks);
        }
        _ if is_inner => {
            found.extend(cast::<pg_sys::RangeTblRef>(node, pg_sys::NodeTag::T_RangeTblRef).map(|at| (*at).rtindex))
        }
        _ => {}
    }
}

/// `query` with the policies of its tables among its conditions; itself if there are none.
///
/// # Safety
/// `query` must have passed [`check`].
pub unsafe fn with_policies(query: *mut pg_sys::Query) -> *mut pg_sys::Query {
    let is_plain = |entry: *mut pg_sys::RangeTblEntry| (*entry).securityQuals.is_null();
    if items::<pg_sys::RangeTblEntry>((*query).rtable).all(is_plain) {
        return query;
    }
    let copy = shallow(query);
    let from = shallow((*query).jointree);
    let mut entries = std::ptr::null_mut();
    for entry in items::<pg_sys::RangeTblEntry>((*query).rtable) {
        let own = shallow(entry);
        for policy in items::<pg_sys::Node>((*own).securityQuals) {
            (*from).quals = pg_sys::make_and_qual((*from).quals, policy);
        }
        (*own).securityQuals = std::ptr::null_mut();
        entries = pg_sys::lappend(entries, own.cast());
    }
    ((*copy).rtable, (*copy).jointree) = (entries, from);
    copy
}
