//! The plan of a routed statement: one CustomScan `ShardRoute`.
//!
//! Made by planning a stand-in: a SELECT of NULLs of the result's types goes down the planner hooks, so that every hook
//! sees a statement with the right id and text, and comes back as a finished plan of this server's version, in which the
//! node that yields the row is then exchanged. What always holds: locks and privileges are those of every table and view
//! that the statement names; the plan is made anew when one of them changes.

use std::ffi::CString;

use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::layout::one_line;

use super::names::qualify;
use super::run;
use super::ship::Shipment;
use super::whole::{Key, Obstacle, NOT_SHIPPABLE, OUTPUT};
use crate::pg::catalog::Known;
use crate::pg::query::tree::{cast, cells, items, nth, rte, subqueries, tag, walk_level};
use crate::pg::transfer::settings::{PlainOutput, Settings};
use crate::pg::transfer::FIRST_VARIABLE;

pub const NODE: &std::ffi::CStr = c"ShardRoute";

/// Postgres' table of the node's functions; never written.
struct Methods(pg_sys::CustomScanMethods);
// SAFETY: constants.
unsafe impl Sync for Methods {}

static METHODS: Methods =
    Methods(pg_sys::CustomScanMethods { CustomName: NODE.as_ptr(), CreateCustomScanState: Some(run::create_state) });

/// Makes the node known. Once per process.
pub fn register() {
    // SAFETY: a constant, which Postgres keeps.
    unsafe { pg_sys::RegisterCustomScanMethods(&METHODS.0) }
}

/// The key whose shard runs the statement, as the node finds it.
pub enum OneKey {
    /// Its canonical text.
    Known(Box<[u8]>),
    /// The last expression computes it.
    Late,
    /// There is one shard only.
    Any,
}

/// What the node must know, besides the expressions.
pub struct Private {
    pub sql: Box<[u8]>,
    pub key: OneKey,
    /// A logical table of the statement, for its keyspace.
    pub table: pg_sys::Oid,
    pub written: Vec<pg_sys::Oid>,
    /// As whom to log in; 0: the current user.
    pub user: pg_sys::Oid,
    /// No key: no rows, without asking.
    pub is_empty_without_key: bool,
    pub locks_rows: bool,
    /// A replica may answer.
    pub reads_only: bool,
}

/// What is planned.
pub struct Routed<'a> {
    pub query: *mut pg_sys::Query,
    pub shipment: &'a Shipment,
    pub key: &'a Key,
    pub table: pg_sys::Oid,
    pub user: pg_sys::Oid,
}

/// Types whose values hold dates or times and come as text: they would be read under another DateStyle than written.
const DATED: [pg_sys::Oid; 17] = [
    pg_sys::TIMESTAMPARRAYOID,
    pg_sys::DATEARRAYOID,
    pg_sys::TIMEARRAYOID,
    pg_sys::TIMESTAMPTZARRAYOID,
    pg_sys::INTERVALARRAYOID,
    pg_sys::TIMETZARRAYOID,
    pg_sys::TSRANGEOID,
    pg_sys::TSRANGEARRAYOID,
    pg_sys::TSTZRANGEOID,
    pg_sys::TSTZRANGEARRAYOID,
    pg_sys::DATERANGEOID,
    pg_sys::DATERANGEARRAYOID,
    pg_sys::TSMULTIRANGEOID,
    pg_sys::TSTZMULTIRANGEOID,
    pg_sys::DATEMULTIRANGEOID,
    pg_sys::RECORDOID,
    pg_sys::RECORDARRAYOID,
];

/// The columns of the statement's result.
unsafe fn outputs(query: *mut pg_sys::Query) -> Vec<*mut pg_sys::TargetEntry> {
    let list = match (*query).commandType {
        pg_sys::CmdType::CMD_SELECT => (*query).targetList,
        _ => (*query).returningList,
    };
    items::<pg_sys::TargetEntry>(list).filter(|output| !(**output).resjunk).collect()
}

/// Whether every value of the result comes as it is, whatever the session's settings.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn check_outputs(query: *mut pg_sys::Query, known: &Known) -> Result<(), Obstacle> {
    outputs(query).into_iter().try_for_each(|output| match pg_sys::exprType((*output).expr.cast()) {
        kind if !known.values(kind) => Err(NOT_SHIPPABLE),
        kind if DATED.contains(&kind) || is_dated_underneath(kind) => Err(OUTPUT),
        _ => Ok(()),
    })
}

/// Whether a type that is not built in is a domain over one whose text depends on settings, or an array of such.
unsafe fn is_dated_underneath(kind: pg_sys::Oid) -> bool {
    if kind.to_u32() < FIRST_VARIABLE {
        return false;
    }
    let element = pg_sys::get_element_type(kind);
    let base = pg_sys::getBaseType(if element == pg_sys::InvalidOid { kind } else { element });
    base.to_u32() < FIRST_VARIABLE && Settings::of(base) != Settings::default()
}

/// Plans it. `hand_on` plans a query by the hooks below ours. `None`: they made something else of it.
///
/// # Safety
/// The query must be valid, about to be planned, and have passed the checks of this module's siblings.
pub unsafe fn plan(
    routed: &Routed,
    hand_on: impl FnOnce(*mut pg_sys::Query) -> *mut pg_sys::PlannedStmt,
) -> Option<*mut pg_sys::PlannedStmt> {
    let private = private(routed);
    stand_in_plan(routed.query, &METHODS.0, hand_on, |scan, planned| {
        for input in &routed.shipment.inputs {
            (*scan).custom_exprs = pg_sys::lappend((*scan).custom_exprs, ready(*input, planned).cast());
        }
        if let Key::Late(key) = routed.key {
            (*scan).custom_exprs = pg_sys::lappend((*scan).custom_exprs, ready(*key, planned).cast());
        }
        (*scan).custom_private = private;
    })
}

/// A plan for `query` whose only node is a CustomScan of `methods`, which `complete` completes.
///
/// # Safety
/// As [`plan`].
pub unsafe fn stand_in_plan(
    query: *mut pg_sys::Query,
    methods: *const pg_sys::CustomScanMethods,
    hand_on: impl FnOnce(*mut pg_sys::Query) -> *mut pg_sys::PlannedStmt,
    complete: impl FnOnce(*mut pg_sys::CustomScan, *mut pg_sys::PlannedStmt),
) -> Option<*mut pg_sys::PlannedStmt> {
    let outputs = outputs(query);
    let planned = hand_on(stand_in(query, &outputs));
    let place = result_node(planned)?;
    let scan = node(query, methods, &outputs);
    complete(scan, planned);
    *place = scan.cast();
    (*planned).commandType = (*query).commandType;
    (*planned).hasReturning = !(*query).returningList.is_null();
    (*planned).hasModifyingCTE = (*query).hasModifyingCTE;
    (*planned).canSetTag = (*query).canSetTag;
    let mut tables = Tables {
        rtable: std::ptr::null_mut(),
        #[cfg(not(feature = "pg15"))]
        privileges: std::ptr::null_mut(),
        relations: Vec::new(),
    };
    tables.add(query);
    (*planned).rtable = tables.rtable;
    tables.set_privileges(planned);
    for relation in tables.relations {
        (*planned).relationOids = pg_sys::list_append_unique_oid((*planned).relationOids, relation);
    }
    Some(planned)
}

unsafe fn null_of(output: *mut pg_sys::TargetEntry) -> *mut pg_sys::Expr {
    let expr = (*output).expr.cast();
    pg_sys::makeNullConst(pg_sys::exprType(expr), pg_sys::exprTypmod(expr), pg_sys::exprCollation(expr)).cast()
}

/// A query that yields NULLs of the same types and is taken for `query`.
unsafe fn stand_in(query: *mut pg_sys::Query, outputs: &[*mut pg_sys::TargetEntry]) -> *mut pg_sys::Query {
    let own = pgrx::PgBox::<pg_sys::Query>::alloc_node(pg_sys::NodeTag::T_Query).into_pg();
    (*own).commandType = pg_sys::CmdType::CMD_SELECT;
    (*own).querySource = (*query).querySource;
    (*own).queryId = (*query).queryId;
    (*own).canSetTag = true;
    (*own).hasRowSecurity = has_row_security(query);
    (*own).stmt_location = (*query).stmt_location;
    (*own).stmt_len = (*query).stmt_len;
    (*own).jointree = pg_sys::makeFromExpr(std::ptr::null_mut(), std::ptr::null_mut());
    for (at, output) in outputs.iter().enumerate() {
        let entry = pg_sys::makeTargetEntry(null_of(*output), at as i16 + 1, (**output).resname, false);
        (*own).targetList = pg_sys::lappend((*own).targetList, entry.cast());
    }
    own
}

/// Whether row security was looked at on any level, so that another user's plan may be another one.
unsafe fn has_row_security(query: *mut pg_sys::Query) -> bool {
    (*query).hasRowSecurity || subqueries(query).into_iter().any(|inner| has_row_security(inner))
}

/// Where the node hangs that yields the stand-in's row: below a Material, if the statement is a cursor that scrolls.
unsafe fn result_node(planned: *mut pg_sys::PlannedStmt) -> Option<*mut *mut pg_sys::Plan> {
    let mut place = std::ptr::addr_of_mut!((*planned).planTree);
    while !(*place).is_null() {
        match tag(*place) {
            pg_sys::NodeTag::T_Result => return Some(place),
            _ => place = std::ptr::addr_of_mut!((**place).lefttree),
        }
    }
    None
}

unsafe fn node(
    query: *mut pg_sys::Query,
    methods: *const pg_sys::CustomScanMethods,
    outputs: &[*mut pg_sys::TargetEntry],
) -> *mut pg_sys::CustomScan {
    let scan = pgrx::PgBox::<pg_sys::CustomScan>::alloc_node(pg_sys::NodeTag::T_CustomScan).into_pg();
    (*scan).methods = methods;
    let plan = std::ptr::addr_of_mut!((*scan).scan.plan);
    // One round trip. A generic plan costs as much, so that it is chosen.
    (*plan).total_cost = 1.0;
    (*plan).plan_rows = 1.0;
    for (at, output) in outputs.iter().enumerate() {
        let number = at as i16 + 1;
        let shown = shown(query, *output);
        let row = pg_sys::makeTargetEntry(shown, number, (**output).resname, false);
        (*scan).custom_scan_tlist = pg_sys::lappend((*scan).custom_scan_tlist, row.cast());
        let expr = (**output).expr.cast();
        let (kind, typmod) = (pg_sys::exprType(expr), pg_sys::exprTypmod(expr));
        let var = pg_sys::makeVar(pg_sys::INDEX_VAR as _, number, kind, typmod, pg_sys::exprCollation(expr), 0);
        let entry = pg_sys::makeTargetEntry(var.cast(), number, (**output).resname, false);
        (*entry).resorigtbl = (**output).resorigtbl;
        (*entry).resorigcol = (**output).resorigcol;
        (*plan).targetlist = pg_sys::lappend((*plan).targetlist, entry.cast());
    }
    scan
}

/// An expression made ready to be computed: with named and default arguments in their places.
unsafe fn ready(expr: *mut pg_sys::Node, planned: *mut pg_sys::PlannedStmt) -> *mut pg_sys::Expr {
    let (mut relations, mut others) = (std::ptr::null_mut(), std::ptr::null_mut());
    let expr = pg_sys::copyObjectImpl(expr.cast()).cast();
    let ready = pg_sys::expression_planner_with_deps(expr, &mut relations, &mut others);
    (*planned).relationOids = pg_sys::list_concat((*planned).relationOids, relations);
    (*planned).invalItems = pg_sys::list_concat((*planned).invalItems, others);
    ready
}

/// What EXPLAIN shows for a column: the column, if it is a table's; else only its type.
unsafe fn shown(query: *mut pg_sys::Query, output: *mut pg_sys::TargetEntry) -> *mut pg_sys::Expr {
    if let Some(var) = cast::<pg_sys::Var>((*output).expr.cast(), pg_sys::NodeTag::T_Var) {
        let entry = rte(query, (*var).varno as u32);
        if entry.is_some_and(|entry| (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION) {
            let copy = pg_sys::copyObjectImpl(var.cast()).cast::<pg_sys::Var>();
            #[cfg(not(feature = "pg15"))]
            {
                (*copy).varnullingrels = std::ptr::null_mut();
            }
            return copy.cast();
        }
    }
    null_of(output)
}

unsafe fn private(routed: &Routed) -> *mut pg_sys::List {
    let sql = {
        // Names of other schemas than pg_catalog are qualified, and constants written in the ISO style.
        let _plain = PlainOutput::begin(Settings::ALL);
        let query = pg_sys::copyObjectImpl(routed.shipment.query.cast()).cast();
        qualify(query);
        let text = std::ffi::CStr::from_ptr(pg_sys::pg_get_querydef(query, false));
        CString::new(one_line(text.to_bytes())).unwrap_or_default()
    };
    let key = match routed.key {
        Key::Known(canonical) => CString::new(canonical.clone()).unwrap_or_default(),
        Key::Late(_) | Key::Any => CString::default(),
    };
    let is_late = matches!(routed.key, Key::Late(_));
    let is_any = matches!(routed.key, Key::Any);
    let mut written = std::ptr::null_mut();
    for relation in written_tables(routed.query) {
        written = pg_sys::lappend_oid(written, relation);
    }
    let flags = i32::from(is_late)
        | i32::from(is_empty_without_key(routed.query)) << 1
        | i32::from(!(*routed.query).rowMarks.is_null()) << 2
        | i32::from(is_any) << 3
        | i32::from(reads_only(routed.query)) << 4;
    let mut oids = pg_sys::lappend_oid(std::ptr::null_mut(), routed.table);
    oids = pg_sys::lappend_oid(oids, routed.user);
    let parts: [*mut std::ffi::c_void; 5] = [
        pg_sys::makeString(pg_sys::pstrdup(sql.as_ptr())).cast(),
        pg_sys::makeString(pg_sys::pstrdup(key.as_ptr())).cast(),
        pg_sys::makeInteger(flags).cast(),
        oids.cast(),
        written.cast(),
    ];
    parts.into_iter().fold(std::ptr::null_mut(), |list, part| pg_sys::lappend(list, part))
}

impl Private {
    /// # Safety
    /// `list` must be the node's `custom_private`.
    pub unsafe fn read(list: *const pg_sys::List) -> Option<Self> {
        let text = |at| {
            let text = nth::<pg_sys::String>(list, at)?;
            Some(std::ffi::CStr::from_ptr((*text).sval).to_bytes().into())
        };
        let oids = |at| -> Option<Vec<pg_sys::Oid>> {
            Some(cells(nth::<pg_sys::List>(list, at)?).map(|cell| cell.oid_value).collect())
        };
        let flags = (*nth::<pg_sys::Integer>(list, 2)?).ival;
        let fixed = oids(3)?;
        Some(Self {
            sql: text(0)?,
            key: match flags & 9 {
                0 => OneKey::Known(text(1)?),
                1 => OneKey::Late,
                _ => OneKey::Any,
            },
            table: *fixed.first()?,
            user: *fixed.get(1)?,
            written: oids(4)?,
            is_empty_without_key: flags & 2 != 0,
            locks_rows: flags & 4 != 0,
            reads_only: flags & 16 != 0,
        })
    }
}

/// The tables that the statement writes, at any level.
unsafe fn written_tables(query: *mut pg_sys::Query) -> Vec<pg_sys::Oid> {
    let mut written: Vec<pg_sys::Oid> = Vec::new();
    written.extend(rte(query, (*query).resultRelation as u32).map(|entry| (*entry).relid));
    written.extend(subqueries(query).into_iter().flat_map(|inner| written_tables(inner)));
    written
}

/// Whether the statement does nothing but read, whatever the functions in it do: none of them is volatile.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn reads_only(query: *mut pg_sys::Query) -> bool {
    only_selects(query) && !pg_sys::contain_volatile_functions(query.cast())
}

/// Whether all of the statement is to see the same rows: it only reads, and calls no volatile function of the users', which
/// may run statements that see more, or write.
///
/// # Safety
/// `query` must be valid.
pub unsafe fn sees_one_moment(query: *mut pg_sys::Query) -> bool {
    only_selects(query) && !calls_own_volatile(query)
}

unsafe fn calls_own_volatile(query: *mut pg_sys::Query) -> bool {
    let mut found = false;
    walk_level(query, &mut |node| {
        found |= pg_sys::check_functions_in_node(node, Some(is_own_volatile), std::ptr::null_mut());
        !found
    });
    found || subqueries(query).into_iter().any(|inner| calls_own_volatile(inner))
}

#[pg_guard]
unsafe extern "C-unwind" fn is_own_volatile(function: pg_sys::Oid, _context: *mut std::ffi::c_void) -> bool {
    function.to_u32() >= pg_sys::FirstNormalObjectId
        && pg_sys::func_volatile(function) as u8 == pg_sys::PROVOLATILE_VOLATILE
}

unsafe fn only_selects(query: *mut pg_sys::Query) -> bool {
    (*query).commandType == pg_sys::CmdType::CMD_SELECT
        && (*query).rowMarks.is_null()
        && subqueries(query).into_iter().all(|inner| only_selects(inner))
}

/// Whether the statement has no row unless its tables have one: a plain join without aggregates.
unsafe fn is_empty_without_key(query: *mut pg_sys::Query) -> bool {
    !matches!((*query).commandType, pg_sys::CmdType::CMD_INSERT | pg_sys::CmdType::CMD_MERGE)
        && (!(*query).hasAggs || !(*query).groupClause.is_null())
        && !(*query).hasModifyingCTE
        && (*query).groupingSets.is_null()
        && (*query).havingQual.is_null()
        && (*query).setOperations.is_null()
        && !(*(*query).jointree).fromlist.is_null()
        && items::<pg_sys::Node>((*(*query).jointree).fromlist).all(|item| joins_tables(query, item))
}

/// Whether `item` of a FROM is a logical table, or joins such tables and nothing else: a reference table has rows anyway.
unsafe fn joins_tables(query: *mut pg_sys::Query, item: *mut pg_sys::Node) -> bool {
    if let Some(join) = cast::<pg_sys::JoinExpr>(item, pg_sys::NodeTag::T_JoinExpr) {
        return joins_tables(query, (*join).larg) && joins_tables(query, (*join).rarg);
    }
    cast::<pg_sys::RangeTblRef>(item, pg_sys::NodeTag::T_RangeTblRef)
        .and_then(|item| rte(query, (*item).rtindex as u32))
        .is_some_and(|entry| (*entry).relkind as u8 == pg_sys::RELKIND_PARTITIONED_TABLE)
}

/// The range tables of all levels, one after the other.
struct Tables {
    rtable: *mut pg_sys::List,
    #[cfg(not(feature = "pg15"))]
    privileges: *mut pg_sys::List,
    relations: Vec<pg_sys::Oid>,
}

impl Tables {
    unsafe fn add(&mut self, query: *mut pg_sys::Query) {
        for entry in items::<pg_sys::RangeTblEntry>((*query).rtable) {
            let copy = pg_sys::palloc(std::mem::size_of::<pg_sys::RangeTblEntry>()).cast::<pg_sys::RangeTblEntry>();
            copy.copy_from_nonoverlapping(entry, 1);
            // Source: setrefs.c, add_rte_to_flat_rtable: the executor needs none of it.
            (*copy).tablesample = std::ptr::null_mut();
            (*copy).subquery = std::ptr::null_mut();
            (*copy).joinaliasvars = std::ptr::null_mut();
            (*copy).functions = std::ptr::null_mut();
            (*copy).tablefunc = std::ptr::null_mut();
            (*copy).values_lists = std::ptr::null_mut();
            (*copy).securityQuals = std::ptr::null_mut();
            self.add_privileges(query, copy);
            if (*copy).relid != pg_sys::InvalidOid {
                self.relations.push((*copy).relid);
            }
            self.rtable = pg_sys::lappend(self.rtable, copy.cast());
        }
        subqueries(query).into_iter().for_each(|inner| self.add(inner));
    }

    #[cfg(not(feature = "pg15"))]
    unsafe fn add_privileges(&mut self, query: *mut pg_sys::Query, entry: *mut pg_sys::RangeTblEntry) {
        let Some(at) = ((*entry).perminfoindex as usize).checked_sub(1) else { return };
        if let Some(info) = nth::<pg_sys::RTEPermissionInfo>((*query).rteperminfos, at) {
            self.privileges = pg_sys::lappend(self.privileges, pg_sys::copyObjectImpl(info.cast()).cast());
            (*entry).perminfoindex = (*self.privileges).length as _;
        }
    }

    #[cfg(feature = "pg15")]
    unsafe fn add_privileges(&mut self, _query: *mut pg_sys::Query, _entry: *mut pg_sys::RangeTblEntry) {}

    #[cfg(not(feature = "pg15"))]
    unsafe fn set_privileges(&self, planned: *mut pg_sys::PlannedStmt) {
        (*planned).permInfos = self.privileges;
    }

    #[cfg(feature = "pg15")]
    unsafe fn set_privileges(&self, _planned: *mut pg_sys::PlannedStmt) {}
}
