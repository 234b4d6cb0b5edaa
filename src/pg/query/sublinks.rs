//! Subqueries in expressions: which of them the level's rows depend on, and when they are computed.

use pgrx::pg_sys;
use shardmap_core::route::{Column, Sublink};

use super::columns::{comparable, is_equality};
use super::join_tree::conjuncts_of;
use super::merge::{actions, lacks_source};
use super::read::Reader;
use super::tree::{cast, items, nth, walk_expression, walk_level};
use crate::pg::keys::KeyType;

impl Reader<'_> {
    /// Remembers the sublinks that are conjuncts of a WHERE.
    pub(super) unsafe fn note_required(&mut self, quals: *mut pg_sys::Node) {
        let mut conjuncts = Vec::new();
        conjuncts_of(quals, &mut conjuncts);
        for link in conjuncts.into_iter().filter_map(|n| cast::<pg_sys::SubLink>(n, pg_sys::NodeTag::T_SubLink)) {
            match (*link).subLinkType {
                pg_sys::SubLinkType::EXISTS_SUBLINK => {
                    self.required.insert(link as usize, None);
                }
                pg_sys::SubLinkType::ANY_SUBLINK => {
                    let outer = self.any_column((*link).testexpr);
                    self.required.insert(link as usize, outer);
                }
                _ => {}
            }
        }
    }

    /// The outer column of `outer = ANY (SELECT inner ..)`, if both are compared as they are.
    unsafe fn any_column(&mut self, test: *mut pg_sys::Node) -> Option<Column> {
        let op = cast::<pg_sys::OpExpr>(test, pg_sys::NodeTag::T_OpExpr)?;
        let param = cast::<pg_sys::Param>(nth((*op).args, 1)?, pg_sys::NodeTag::T_Param)?;
        let side = self.columns.side(nth((*op).args, 0)?, &self.levels)?;
        let inner = KeyType::of((*param).paramtype)?;
        let equal = is_equality((*op).opno, (*op).inputcollid) && comparable(side.kind, inner.kind);
        equal.then_some(side.column)
    }

    pub(super) unsafe fn sublinks(&mut self, query: *mut pg_sys::Query) -> Vec<Sublink> {
        if !(*query).hasSubLinks {
            return Vec::new();
        }
        let mut links: Vec<*mut pg_sys::SubLink> = Vec::new();
        walk_level(query, &mut |node| {
            links.extend(cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink));
            true
        });
        let after = computed_after(query);
        links.into_iter().map(|link| Sublink { after: after.contains(&link), ..self.sublink(link) }).collect()
    }

    unsafe fn sublink(&mut self, link: *mut pg_sys::SubLink) -> Sublink {
        let arms = self.arms((*link).subselect.cast());
        let noted = self.required.get(&(link as usize)).copied();
        let inner = arms.levels.first().and_then(|(_, outputs)| outputs.first().copied().flatten());
        let equal = match (noted.flatten(), inner, arms.levels.len(), arms.open.first()) {
            (Some(outer), Some(inner), 1, Some(true)) => Some((outer, inner)),
            _ => None,
        };
        let arms = arms.levels.into_iter().map(|(level, _)| level).collect();
        Sublink { arms, required: noted.is_some(), equal, after: false }
    }
}

/// The subqueries of an UPDATE or MERGE that see the new row: in RETURNING and in the checks of policies and views. And those
/// of a MERGE's actions for rows without a source, for which nothing holds that holds for the source's rows.
unsafe fn computed_after(query: *mut pg_sys::Query) -> Vec<*mut pg_sys::SubLink> {
    let mut links = Vec::new();
    if !matches!((*query).commandType, pg_sys::CmdType::CMD_UPDATE | pg_sys::CmdType::CMD_MERGE) {
        return links;
    }
    let checks = items::<pg_sys::WithCheckOption>((*query).withCheckOptions).map(|check| (*check).qual);
    let actions = actions(query).filter(|action| lacks_source(*action)).map(|action| action.cast());
    for part in checks.chain([(*query).returningList.cast()]).chain(actions) {
        walk_expression(part, &mut |node| {
            links.extend(cast::<pg_sys::SubLink>(node, pg_sys::NodeTag::T_SubLink));
            true
        });
    }
    links
}
