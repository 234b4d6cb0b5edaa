//! Whether a statement may go whole to one shard, and which key decides the shard.
//!
//! Decides by the tables and the shape of every query level; [`super::ship`] decides by the expressions. What always
//! holds: every table in the statement is a logical one, all of whose references reach the same shard, or a reference
//! table ([`super::reference`]), which that shard holds in full. Refuses, for
//! a lower step: what row security checks of rows that are written, triggers here, assignments to the key, whole rows and
//! system columns. Read next: [`super::security`] for policies.

use pgrx::pg_sys;
use shardmap_core::ids::ShardNumber;
use shardmap_core::map::Strategy;
use shardmap_core::route::{Operand, Reach};

use super::reference;
use super::security::{self, SECURITY};
use crate::pg::catalog::Catalog;
use crate::pg::keys::KeyType;
use crate::pg::query::merge::actions;
use crate::pg::query::read::{Reading, Usage};
use crate::pg::query::same_key::keeps_key;
use crate::pg::query::tree::{cast, items, nth, rte, subqueries, tag, walk_level};

/// The key whose shard runs the statement.
#[derive(Clone, Debug)]
pub enum Key {
    /// Its canonical text.
    Known(Vec<u8>),
    /// An expression over parameters and stable functions.
    Late(*mut pg_sys::Node),
    /// Any key will do: there is one shard, and it owns all keys.
    Any,
}

/// Why a statement does not go whole to one shard, as a sentence.
pub type Obstacle = &'static str;

pub const VOLATILE: Obstacle = "A function in it gives another value for each row.";
pub const NOT_SHIPPABLE: Obstacle = "A function or type in it is not known to the shard.";
pub const OTHER_TABLES: Obstacle = "There are other tables than logical ones in it.";
const MANY_SHARDS: Obstacle = "It is not about one shard.";
const LATE: Obstacle = "Keys known only when it starts might be of several shards.";
pub const OUTPUT: Obstacle = "A result's text would depend on the session's DateStyle.";
const TRIGGERS: Obstacle = "The table written has triggers here.";
pub const USERS: Obstacle = "Its tables are used as different users.";
const NAMES: Obstacle = "A shard's table has another name than the logical table.";
const WHOLE_ROW: Obstacle = "Whole rows or system columns are named.";
const KEY_ASSIGNED: Obstacle = "It assigns to the key.";
pub const OFF: Obstacle = "Routing is turned off.";
pub const SHAPE: Obstacle = "It has a part that is not sent to shards.";

/// The key that all of the statement is about.
///
/// # Safety
/// `reading` must have been read from `query`; `reaches` be the decisions about its references.
pub unsafe fn key(
    catalog: &Catalog,
    query: *mut pg_sys::Query,
    reading: &Reading,
    reaches: &[Option<Reach>],
) -> Result<Key, Obstacle> {
    let key = match has_one_shard(reading) {
        true => Key::Any,
        false => one_key(reading, reaches)?,
    };
    security::check(query)?;
    level(catalog, &reading.tables[0].table.keyspace.name, query)?;
    if !reading.tables.iter().all(|reference| reference.table.mirror().same_names) {
        return Err(NAMES);
    }
    Ok(key)
}

/// Whether all rows are on one shard, whatever their keys: of those that are read, or written one by one.
fn has_one_shard(reading: &Reading) -> bool {
    let keyspace = &reading.tables[0].table.keyspace;
    // Ranges need not cover every key.
    keyspace.map.len() == 1
        && !matches!(keyspace.map.strategy(), Strategy::Range(_))
        && reading.tables.iter().all(|reference| {
            reference.table.keyspace.name == keyspace.name
                && matches!(reference.usage, Usage::Read | Usage::Insert(_) | Usage::Merge)
        })
}

/// The key that every reference reaches.
unsafe fn one_key(reading: &Reading, reaches: &[Option<Reach>]) -> Result<Key, Obstacle> {
    let mut found: Option<Key> = None;
    let mut shard: Option<ShardNumber> = None;
    let keyspace = &reading.tables[0].table.keyspace;
    for (reference, reach) in reading.tables.iter().zip(reaches) {
        if reference.table.keyspace.name != keyspace.name {
            return Err(MANY_SHARDS);
        }
        let (known, late) = match (&reference.usage, reach) {
            (Usage::Insert(Some(rows)), _) => inserted(rows)?,
            (_, Some(Reach::Keys(keys))) => (keys.clone(), Vec::new()),
            (_, Some(Reach::Deferred(late))) => {
                (late.keys.iter().cloned().collect(), late.values.iter().copied().collect())
            }
            _ => return Err(MANY_SHARDS),
        };
        for key in known {
            let own = keyspace.holder(&key).ok_or(MANY_SHARDS)?;
            if *shard.get_or_insert(own) != own || !matches!(found, None | Some(Key::Known(_))) {
                return Err(MANY_SHARDS);
            }
            found = Some(Key::Known(key));
        }
        for value in late {
            let node = reading.values[value as usize];
            // A list's or a subquery's value may be of any shard.
            if node.is_null() || KeyType::of(pg_sys::exprType(node)).is_none() {
                return Err(LATE);
            }
            match found {
                None => found = Some(Key::Late(node)),
                Some(Key::Late(first)) if pg_sys::equal(first.cast(), node.cast()) => {}
                Some(_) => return Err(LATE),
            }
        }
    }
    // No key at all: nothing to ask a shard for.
    found.ok_or(MANY_SHARDS)
}

/// As whom the statement uses its tables; 0: as the current user.
///
/// # Safety
/// `reading` must have been read from `query`.
pub unsafe fn user(catalog: &Catalog, query: *mut pg_sys::Query, reading: &Reading) -> Result<pg_sys::Oid, Obstacle> {
    let mut users = reading.tables.iter().map(|reference| user_of(reference.query, reference.rti));
    let first = users.next().unwrap_or(pg_sys::InvalidOid);
    if users.any(|user| user != first) {
        return Err(USERS);
    }
    reference::check(catalog, query, first)?;
    Ok(first)
}

#[cfg(not(feature = "pg15"))]
pub(super) unsafe fn user_of(query: *mut pg_sys::Query, rti: u32) -> pg_sys::Oid {
    let info = rte(query, rti).and_then(|entry| ((*entry).perminfoindex as usize).checked_sub(1));
    let info = info.and_then(|at| nth::<pg_sys::RTEPermissionInfo>((*query).rteperminfos, at));
    info.map_or(pg_sys::InvalidOid, |info| (*info).checkAsUser)
}

#[cfg(feature = "pg15")]
pub(super) unsafe fn user_of(query: *mut pg_sys::Query, rti: u32) -> pg_sys::Oid {
    rte(query, rti).map_or(pg_sys::InvalidOid, |entry| (*entry).checkAsUser)
}

/// The keys of an INSERT's rows: known ones, and the numbers of late ones.
fn inserted(rows: &[Operand]) -> Result<(Vec<Vec<u8>>, Vec<u32>), Obstacle> {
    let (mut known, mut late) = (Vec::new(), Vec::new());
    for row in rows {
        match row {
            Operand::Known(key) => known.push(key.clone()),
            Operand::Deferred(value) => late.push(*value),
            _ => return Err(LATE),
        }
    }
    Ok((known, late))
}

/// Checks a query level and those below it.
unsafe fn level(catalog: &Catalog, keyspace: &str, query: *mut pg_sys::Query) -> Result<(), Obstacle> {
    let writes = match (*query).commandType {
        pg_sys::CmdType::CMD_SELECT => false,
        pg_sys::CmdType::CMD_INSERT
        | pg_sys::CmdType::CMD_UPDATE
        | pg_sys::CmdType::CMD_DELETE
        | pg_sys::CmdType::CMD_MERGE => true,
        _ => return Err(SHAPE),
    };
    if !(*query).withCheckOptions.is_null() {
        return Err(SECURITY);
    }
    for entry in items::<pg_sys::RangeTblEntry>((*query).rtable) {
        self::entry(catalog, keyspace, entry)?;
    }
    // An INSERT takes its rows from one subquery, and has no other.
    if (*query).commandType == pg_sys::CmdType::CMD_INSERT && source_of_rows(query).is_some() {
        let derived = |entry: &*mut pg_sys::RangeTblEntry| (**entry).rtekind == pg_sys::RTEKind::RTE_SUBQUERY;
        if items::<pg_sys::RangeTblEntry>((*query).rtable).filter(derived).count() != 1 {
            return Err(SHAPE);
        }
    }
    // Rewriting takes a record apart by a name that has no text.
    let breadth = |cte: *mut pg_sys::CommonTableExpr| {
        !(*cte).search_clause.is_null() && (*(*cte).search_clause).search_breadth_first
    };
    if items::<pg_sys::CommonTableExpr>((*query).cteList).any(breadth) {
        return Err(SHAPE);
    }
    if writes {
        target(catalog, query)?;
    }
    if names_rows(query) {
        return Err(WHOLE_ROW);
    }
    subqueries(query).into_iter().try_for_each(|inner| level(catalog, keyspace, inner))
}

/// The entry, counted from 0, of the SELECT that the rows of an INSERT come from; `None`: from no SELECT.
///
/// # Safety
/// `query` must be a valid INSERT.
pub unsafe fn source_of_rows(query: *mut pg_sys::Query) -> Option<usize> {
    let item = nth::<pg_sys::Node>((*(*query).jointree).fromlist, 0)?;
    let number = (*cast::<pg_sys::RangeTblRef>(item, pg_sys::NodeTag::T_RangeTblRef)?).rtindex as u32;
    let entry = rte(query, number)?;
    ((*entry).rtekind == pg_sys::RTEKind::RTE_SUBQUERY).then_some(number as usize - 1)
}

unsafe fn entry(catalog: &Catalog, keyspace: &str, entry: *mut pg_sys::RangeTblEntry) -> Result<(), Obstacle> {
    match (*entry).rtekind {
        pg_sys::RTEKind::RTE_RELATION => match catalog.table((*entry).relid) {
            _ if !(*entry).tablesample.is_null() => Err(SHAPE),
            Some(_) => Ok(()),
            None if reference::copied(catalog, entry, keyspace).is_some() => Ok(()),
            // The entries of a view that was expanded stay behind, for its privileges.
            None if (*entry).relkind as u8 == pg_sys::RELKIND_VIEW => Ok(()),
            None => Err(OTHER_TABLES),
        },
        // A function's body, put in its place, has lost the names of the function's columns.
        pg_sys::RTEKind::RTE_SUBQUERY if !(*entry).functions.is_null() => Err(SHAPE),
        pg_sys::RTEKind::RTE_SUBQUERY
        | pg_sys::RTEKind::RTE_JOIN
        | pg_sys::RTEKind::RTE_VALUES
        | pg_sys::RTEKind::RTE_CTE
        | pg_sys::RTEKind::RTE_FUNCTION
        | pg_sys::RTEKind::RTE_RESULT => Ok(()),
        #[cfg(feature = "pg18")]
        pg_sys::RTEKind::RTE_GROUP => Ok(()),
        _ => Err(SHAPE),
    }
}

/// Checks the table that is written.
unsafe fn target(catalog: &Catalog, query: *mut pg_sys::Query) -> Result<(), Obstacle> {
    let entry = rte(query, (*query).resultRelation as u32).ok_or(SHAPE)?;
    let table = catalog.table((*entry).relid).ok_or(OTHER_TABLES)?;
    let assigns_key = |list: *const pg_sys::List| !keeps_key(list, (*query).resultRelation as u32, table.key);
    if (*query).commandType == pg_sys::CmdType::CMD_UPDATE && assigns_key((*query).targetList) {
        return Err(KEY_ASSIGNED);
    }
    let updates = |action: *mut pg_sys::MergeAction| (*action).commandType == pg_sys::CmdType::CMD_UPDATE;
    if actions(query).any(|action| updates(action) && assigns_key((*action).targetList)) {
        return Err(KEY_ASSIGNED);
    }
    let conflict = (*query).onConflict;
    if !conflict.is_null() && assigns_key((*conflict).onConflictSet) {
        return Err(KEY_ASSIGNED);
    }
    match table.mirror().has_triggers {
        true => Err(TRIGGERS),
        false => Ok(()),
    }
}

/// Whether a level names a table's whole row or a system column. (The row that conflicts is always there as a whole.)
unsafe fn names_rows(query: *mut pg_sys::Query) -> bool {
    let conflict = (*query).onConflict;
    let excluded = if conflict.is_null() { 0 } else { (*conflict).exclRelIndex };
    let mut found = false;
    walk_level(query, &mut |node| {
        if let Some(var) = cast::<pg_sys::Var>(node, pg_sys::NodeTag::T_Var) {
            found |= (*var).varattno <= 0 && (excluded == 0 || (*var).varno != excluded);
        }
        found |= tag(node) == pg_sys::NodeTag::T_CurrentOfExpr;
        !found
    });
    found
}
