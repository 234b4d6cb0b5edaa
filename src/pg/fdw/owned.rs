//! The ownership filter: a shard shows the rows that it owns, and no others, while a move has them on two shards.
//!
//! What is hidden stands in `shardmap.hidden_rows`, by logical table and shard, as SQL conditions on the key. Every scan of
//! the shard's foreign table, for whatever statement, gets their negations. They are made of immutable built-ins, so that
//! they are sent to the shard with all that is (`sql/move_parts.sql`); what postgres_fdw does not send is evaluated here.
//! They stand at the lowest level of security, as a policy does, and do not count in the planner's estimates. TRUNCATE has
//! no conditions: it is refused. Read next: `sql/moves_steps.sql`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use pgrx::pg_sys;
use pgrx::prelude::*;

use super::scan::partition;
use crate::pg::catalog::{self, Catalog, Partition};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::query::tree::{cast, items, tag, walk_expression};

/// Adds the conditions to a scan of foreign table `relid`.
///
/// # Safety
/// Called by the planner, before the relation's conditions are looked at.
pub unsafe fn hide_foreign_rows(root: *mut pg_sys::PlannerInfo, rel: *mut pg_sys::RelOptInfo, relid: pg_sys::Oid) {
    let Some(catalog) = catalog::current() else { return };
    let Some(partition) = catalog.partitions.get(&relid).filter(|partition| !partition.hidden.is_empty()) else {
        return;
    };
    for node in Conditions::of(&catalog, relid, partition) {
        let clause = pg_sys::copyObjectImpl(node.cast()).cast();
        pg_sys::ChangeVarNodes(clause, 1, (*rel).relid as i32, 0);
        let info = restriction(root, rel, clause.cast());
        (*info).norm_selec = 1.0;
        (*info).outer_selec = 1.0;
        (*rel).baserestrictinfo = pg_sys::lappend((*rel).baserestrictinfo, info.cast());
    }
    (*rel).baserestrict_min_security = 0;
}

/// Parsed conditions of foreign tables, as of one catalog. They name their relation 1.
#[derive(Default)]
struct Conditions {
    catalog: Weak<Catalog>,
    context: Option<pg_sys::MemoryContext>,
    parsed: HashMap<pg_sys::Oid, Vec<*mut pg_sys::Node>>,
}

thread_local! {
    static CONDITIONS: RefCell<Conditions> = RefCell::default();
}

impl Conditions {
    /// Those of foreign table `relid`; valid until the next call.
    unsafe fn of(catalog: &Rc<Catalog>, relid: pg_sys::Oid, partition: &Partition) -> Vec<*mut pg_sys::Node> {
        let current = |own: &mut Self| own.catalog.ptr_eq(&Rc::downgrade(catalog));
        let known = CONDITIONS.with_borrow_mut(|own| current(own).then(|| own.parsed.get(&relid).cloned()).flatten());
        if let Some(known) = known {
            return known;
        }
        // Parsing can raise an error: nothing is borrowed meanwhile.
        let parsed: Vec<_> = partition.hidden.iter().map(|condition| others(relid, partition.key, condition)).collect();
        CONDITIONS.with_borrow_mut(|own| {
            let context = *own.context.get_or_insert_with(|| {
                pg_sys::AllocSetContextCreateInternal(
                    pg_sys::CacheMemoryContext,
                    c"shardmap hidden rows".as_ptr(),
                    pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                    pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                    pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
                )
            });
            if !current(own) {
                own.catalog = Rc::downgrade(catalog);
                own.parsed.clear();
                pg_sys::MemoryContextReset(context);
            }
            let before = pg_sys::MemoryContextSwitchTo(context);
            let kept: Vec<*mut pg_sys::Node> =
                parsed.iter().map(|node| pg_sys::copyObjectImpl((*node).cast()).cast()).collect();
            pg_sys::MemoryContextSwitchTo(before);
            own.parsed.insert(relid, kept);
        });
        parsed
    }
}

/// `NOT condition`, of which `key` is column `number` of relation 1.
unsafe fn others(relid: pg_sys::Oid, number: pg_sys::AttrNumber, condition: &str) -> *mut pg_sys::Node {
    let sql = encoding::server_string(&format!("SELECT NOT ({condition})"));
    let statements = pg_sys::raw_parser(sql.as_ptr(), pg_sys::RawParseMode::RAW_PARSE_DEFAULT);
    let select = items::<pg_sys::RawStmt>(statements).next().map(|raw| (*raw).stmt.cast::<pg_sys::SelectStmt>());
    let target = select.and_then(|select| items::<pg_sys::ResTarget>((*select).targetList).next());
    let Some(target) = target else { pgrx::error!("condition on hidden rows is empty") };
    let (mut kind, mut typmod, mut collation) = (pg_sys::InvalidOid, -1, pg_sys::InvalidOid);
    pg_sys::get_atttypetypmodcoll(relid, number, &mut kind, &mut typmod, &mut collation);
    let parse = pg_sys::make_parsestate(std::ptr::null_mut());
    (*parse).p_pre_columnref_hook = Some(key_column);
    (*parse).p_ref_hook_state = pg_sys::makeVar(1, number, kind, typmod, collation, 0).cast();
    let clause = pg_sys::transformExpr(parse, (*target).val, pg_sys::ParseExprKind::EXPR_KIND_WHERE);
    pg_sys::assign_expr_collations(parse, clause);
    pg_sys::free_parsestate(parse);
    let clause = pg_sys::eval_const_expressions(std::ptr::null_mut(), clause);
    walk_expression(clause, &mut |node| {
        forget_collation(node);
        true
    });
    clause
}

/// The one column that a condition names.
#[pg_guard]
unsafe extern "C-unwind" fn key_column(
    parse: *mut pg_sys::ParseState,
    _name: *mut pg_sys::ColumnRef,
) -> *mut pg_sys::Node {
    pg_sys::copyObjectImpl((*parse).p_ref_hook_state).cast()
}

/// Takes the collation from what does not use one: postgres_fdw sends no expression whose collation is not a column's. None
/// of the functions in these conditions uses one, and of the operators only `=` and `<>`.
unsafe fn forget_collation(node: *mut pg_sys::Node) {
    /// pg_operator's OIDs of `~<~` and `~>=~` on text, the same in every version.
    const BYTE_ORDER: [u32; 2] = [2314, 2317];
    if let Some(call) = cast::<pg_sys::FuncExpr>(node, pg_sys::NodeTag::T_FuncExpr) {
        (*call).inputcollid = pg_sys::InvalidOid;
    } else if tag(node) == pg_sys::NodeTag::T_OpExpr {
        let comparison = node.cast::<pg_sys::OpExpr>();
        if BYTE_ORDER.contains(&(*comparison).opno.to_u32()) {
            (*comparison).inputcollid = pg_sys::InvalidOid;
        }
    }
}

/// A condition of the relation alone, at the lowest level of security.
unsafe fn restriction(
    root: *mut pg_sys::PlannerInfo,
    rel: *mut pg_sys::RelOptInfo,
    clause: *mut pg_sys::Expr,
) -> *mut pg_sys::RestrictInfo {
    let (relids, none) = ((*rel).relids, std::ptr::null_mut());
    #[cfg(feature = "pg15")]
    return pg_sys::make_restrictinfo(root, clause, true, false, false, 0, relids, none, none);
    #[cfg(not(feature = "pg15"))]
    return pg_sys::make_restrictinfo(root, clause, true, false, false, false, 0, relids, none, none);
}

/// Refuses to truncate foreign tables of which some rows are hidden.
pub fn check_truncate(relids: impl Iterator<Item = pg_sys::Oid>) {
    if let Some(partition) = relids.filter_map(partition).find(|partition| partition.table.is_moving) {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("cannot truncate table {} while rows of it are moved", partition.table.name),
        )
        .hint("Use DELETE, or wait for the moves in shardmap.moves to end.")
        .raise()
    }
}
