//! The planner hook: a statement's way down the ladder.
//!
//! 0. No logical table in it: handed on untouched, at the cost of looking through its range table.
//! 1. A statement that is about one shard as a whole runs there as a whole (`router`).
//! 2. Every reference that reaches one shard has that shard's foreign table put in its place.
//! 3. What reaches some shards, or shards known only at run time, is left to Postgres' own pruning, which follows our map.
//! 4. What reaches everywhere is left to the partitions, and flagged when it starts (`flag`).
//!
//! What always holds: with `shardmap.enable_routing` off the same statement gives the same answer through the partitions.
//! Refuses: a conflict target or DO UPDATE, and MERGE, that no one shard can do as a whole (postgres_fdw cannot run them).

use std::collections::{BTreeSet, HashMap};
use std::ffi::c_char;
use std::rc::Rc;
use std::sync::OnceLock;

use pgrx::pg_sys;
use pgrx::pg_sys::ffi::pg_guard_ffi_boundary;
use pgrx::prelude::*;
use shardmap_core::fingerprint::{copies_table, statement};
use shardmap_core::ids::ShardNumber;
use shardmap_core::route::{decide, Late, Operand, Reach, Reason, Spread, Step};

use crate::pg::barrier;
use crate::pg::catalog::{self, Keyspace, LogicalTable};
use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::fdw::modify::key_change;
use crate::pg::fdw::note::{mark, LateKeys, Note, Planned, Planning};
use crate::pg::flag;
use crate::pg::query::inline::{inline, is_candidate};
use crate::pg::query::late::send_as_value;
use crate::pg::query::read::{read, Reading, Reference, Usage};
use crate::pg::query::same_key;
use crate::pg::query::substitute::{drop_idle_ties, is_plain_do_nothing, spell_out_bpchar, substitute};
use crate::pg::query::sums;
use crate::pg::query::tree::{cast, items, subqueries, tag, walk_expression, walk_level};
use crate::pg::router::plan::Routed;
use crate::pg::router::ship::ship;
use crate::pg::router::{self, whole};
use crate::pg::settings::{FanoutPolicy, ENABLE_ROUTER, ENABLE_ROUTING};
use crate::pg::stats;

static PREVIOUS: OnceLock<pg_sys::planner_hook_type> = OnceLock::new();

/// Installs the hook. Once per process.
pub fn init() {
    // SAFETY: hooks are changed in _PG_init only, in a single thread.
    unsafe {
        let _ = PREVIOUS.set(pg_sys::planner_hook);
        pg_sys::planner_hook = Some(plan);
    }
}

/// # Safety
/// Called by Postgres with a rewritten query.
#[pg_guard]
unsafe extern "C-unwind" fn plan(
    query: *mut pg_sys::Query,
    sql: *const c_char,
    options: i32,
    params: pg_sys::ParamListInfo,
) -> *mut pg_sys::PlannedStmt {
    if !has_candidate(query) {
        return hand_on(query, sql, options, params);
    }
    let Some(catalog) = catalog::current().filter(|catalog| !catalog.tables.is_empty()) else {
        return hand_on(query, sql, options, params);
    };
    refuse_empty_copy(&catalog, query, sql);
    take_whole(&catalog, query);
    let inlined = inline(query, params);
    let finish = |planned| {
        inlined.iter().for_each(|inlined| inlined.note_in(planned));
        planned
    };
    let reading = read(&catalog, query, params);
    if reading.tables.is_empty() {
        return finish(hand_on(query, sql, options, params));
    }
    reading.tables.iter().for_each(|reference| refuse_incomplete(&reference.table));
    let reaches = reaches(&reading);
    same_key::keep(&reading, &reaches);
    let alone = options & !(pg_sys::CURSOR_OPT_PARALLEL_OK as i32);
    let obstacle = match whole(&catalog, query, &reading, &reaches, |stand_in| hand_on(stand_in, sql, alone, params)) {
        Ok(planned) => return finish(planned),
        Err(obstacle) => obstacle,
    };
    let reads_first = match unsupported(&reading, obstacle).map_or_else(|| barrier::is_needed(query, &reading), Err) {
        Ok(reads_first) => reads_first,
        Err(refusal) if params.is_null() && has_parameters(query) => {
            let planned = router::refused::plan(query, &refusal, |stand_in| hand_on(stand_in, sql, alone, params));
            return finish(planned.unwrap_or_else(|| flag::refuse(refusal)));
        }
        Err(refusal) => flag::refuse(refusal),
    };
    spell_out_bpchar(query);
    drop_idle_ties(query);
    let mut plan = route(&reading, reaches, obstacle);
    plan.note.reads_only = router::plan::reads_only(query);
    plan.note.one_moment = router::plan::sees_one_moment(query);
    if matches!(plan.note.step, Step::Narrowed | Step::FanOut) {
        sums::split(&catalog, query);
    }
    // Shards are left out at run time scan by scan; a join or aggregate of all partitions would start them all.
    let _partitionwise = (!plan.prunes_late).then(Partitionwise::on);
    let _planning = Planning::of(Rc::new(plan));
    let planned = hand_on(query, sql, options, params);
    if reads_first {
        barrier::put(planned);
    }
    finish(planned)
}

/// Takes ONLY for nothing: a logical table is to its users a table like any other, whose rows are its own.
unsafe fn take_whole(catalog: &catalog::Catalog, query: *mut pg_sys::Query) {
    let target = match (*query).commandType {
        pg_sys::CmdType::CMD_INSERT => (*query).resultRelation as usize,
        _ => 0,
    };
    for (at, entry) in items::<pg_sys::RangeTblEntry>((*query).rtable).enumerate() {
        if (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION
            && at + 1 != target
            && (*entry).relkind as u8 == pg_sys::RELKIND_PARTITIONED_TABLE
            && catalog.table((*entry).relid).is_some()
        {
            (*entry).inh = true;
        }
    }
    subqueries(query).into_iter().for_each(|inner| take_whole(catalog, inner));
}

unsafe fn hand_on(
    query: *mut pg_sys::Query,
    sql: *const c_char,
    options: i32,
    params: pg_sys::ParamListInfo,
) -> *mut pg_sys::PlannedStmt {
    // SAFETY: the previous hook may raise an error; the boundary turns it into a panic that pg_guard re-raises.
    match PREVIOUS.get().copied().flatten() {
        Some(previous) => pg_guard_ffi_boundary(|| previous(query, sql, options, params)),
        None => pg_sys::standard_planner(query, sql, options, params),
    }
}

/// Whether a partitioned table stands anywhere in the statement (a logical table always is one), or a function that may
/// have one in it.
unsafe fn has_candidate(query: *mut pg_sys::Query) -> bool {
    for entry in items::<pg_sys::RangeTblEntry>((*query).rtable) {
        if (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION
            && (*entry).relkind as u8 == pg_sys::RELKIND_PARTITIONED_TABLE
            || is_candidate(entry)
        {
            return true;
        }
    }
    subqueries(query).into_iter().any(|inner| has_candidate(inner))
}

/// Where a reference's rows are.
enum Place {
    One(ShardNumber),
    /// On the shards of these keys, of which some may be known only when the statement starts.
    Some(Late),
    /// Each inserted row goes its own way.
    EachRow,
    Everywhere(Reason),
}

/// The decision about each reference.
fn reaches(reading: &Reading) -> Vec<Option<Reach>> {
    let mut reaches: Vec<Option<Reach>> = vec![None; reading.tables.len()];
    for (id, reach) in decide(&reading.level) {
        reaches[id] = Some(reach);
    }
    reaches
}

/// Plans the statement to run whole on one shard, if it can.
unsafe fn whole(
    catalog: &catalog::Catalog,
    query: *mut pg_sys::Query,
    reading: &Reading,
    reaches: &[Option<Reach>],
    hand_on: impl FnOnce(*mut pg_sys::Query) -> *mut pg_sys::PlannedStmt,
) -> Result<*mut pg_sys::PlannedStmt, whole::Obstacle> {
    if !ENABLE_ROUTING.get() || !ENABLE_ROUTER.get() {
        return Err(whole::OFF);
    }
    let key = whole::key(catalog, query, reading, reaches)?;
    let known = catalog.known(&reading.tables[0].table.keyspace.name);
    router::plan::check_outputs(query, &known)?;
    let user = whole::user(catalog, query, reading)?;
    let shipment = ship(query, &known)?;
    let table = reading.tables[0].table.relid;
    let routed = Routed { query, shipment: &shipment, key: &key, table, user };
    router::plan::plan(&routed, hand_on).ok_or(whole::SHAPE)
}

/// Decides for every reference, rewrites those that reach one shard, and says what became of the statement.
unsafe fn route(reading: &Reading, reaches: Vec<Option<Reach>>, obstacle: whole::Obstacle) -> Planned {
    let mut note = Note::of(Step::Substituted);
    let mut servers = BTreeSet::new();
    let mut all_late = HashMap::new();
    let mut prunes_late = false;
    let mut spreads = Vec::new();
    for (reference, reach) in reading.tables.iter().zip(reaches) {
        let table = &reference.table;
        match place(reference, reach) {
            Place::One(shard) => {
                servers.insert((table.keyspace.name.clone(), shard));
                let substituted = match table.partitions.get(&shard) {
                    Some(child) if ENABLE_ROUTING.get() => substitute(reference, *child),
                    _ => Err(Spread::Off),
                };
                if let Err(spread) = substituted {
                    note.step = note.step.max(Step::Narrowed);
                    spreads.push(spread.sentence(&table.name, &table.key_column));
                }
            }
            Place::Some(late) => {
                note.step = note.step.max(Step::Narrowed);
                spreads.push(spread_of(&late).sentence(&table.name, &table.key_column));
                prunes_late |= !late.values.is_empty();
                let values: Vec<_> = late.values.iter().map(|value| reading.values[*value as usize]).collect();
                // A subquery's value is not ours to compute; Postgres prunes by it.
                if values.iter().all(|value| !value.is_null()) {
                    let id = mark(reference, all_late.len());
                    all_late.insert(id, LateKeys { values, keys: late.keys.into_iter().collect() });
                }
            }
            Place::EachRow => note.step = note.step.max(Step::Distributed),
            Place::Everywhere(reason) => note.fan_out(table, reason),
        }
    }
    if servers.len() > 1 {
        note.step = note.step.max(Step::Narrowed);
        let one_keyspace = servers.iter().map(|(keyspace, _)| keyspace).collect::<BTreeSet<_>>().len() == 1;
        let spread = if one_keyspace { Spread::Tables } else { Spread::Keyspaces };
        spreads.push(spread.sentence("", ""));
    }
    if note.step == Step::Narrowed {
        spreads.dedup();
        note.reason = spreads.join(" ");
    }
    if note.step == Step::Substituted {
        obstacle.clone_into(&mut note.reason);
    }
    reading.late.iter().for_each(|conjunct| send_as_value(conjunct));
    // Rows are locked shard by shard, always in the same order, lest two statements wait for each other.
    let locks = reading.tables.iter().any(|reference| {
        let query = reference.query;
        !(*query).rowMarks.is_null() || (*query).commandType != pg_sys::CmdType::CMD_SELECT
    });
    Planned { note, late: all_late, prunes_late, side_by_side: !locks && !reading.level.nests_subqueries() }
}

/// Why the shards of `late`'s keys are not one.
fn spread_of(late: &Late) -> Spread {
    match (late.values.is_empty(), late.keys.is_empty()) {
        (true, true) => Spread::Nothing,
        (true, false) => Spread::Keys,
        (false, _) => Spread::Late,
    }
}

impl Note {
    fn fan_out(&mut self, table: &LogicalTable, reason: Reason) {
        self.step = Step::FanOut;
        self.shards = self.shards.max(table.partitions.len() as u32);
        if let Some(own) = table.fanout_policy.as_deref().and_then(FanoutPolicy::parse) {
            self.policy = self.policy.max(own);
        }
        if self.tables.split(", ").any(|name| name == table.name) {
            return;
        }
        if !self.tables.is_empty() {
            self.tables.push_str(", ");
            self.reason.push(' ');
        }
        self.tables.push_str(&table.name);
        self.reason.push_str(&reason.sentence(&table.name, &table.key_column));
        if self.hint.is_empty() {
            self.hint = format!("Add an equality on \"{}\"", table.key_column);
        }
    }
}

fn place(reference: &Reference, reach: Option<Reach>) -> Place {
    let keyspace = &reference.table.keyspace;
    match (&reference.usage, reach) {
        (Usage::Insert(rows), _) => match rows.as_deref().and_then(|rows| common_owner(keyspace, rows)) {
            Some(shard) => Place::One(shard),
            None => Place::EachRow,
        },
        (_, Some(Reach::Keys(keys))) => {
            let shards: BTreeSet<ShardNumber> = keys.iter().filter_map(|key| keyspace.holder(key)).collect();
            match (shards.len(), shards.first()) {
                (1, Some(shard)) => Place::One(*shard),
                _ => Place::Some(Late { keys: keys.into_iter().collect(), ..Late::default() }),
            }
        }
        (_, Some(Reach::Deferred(late))) => Place::Some(late),
        (_, reach) => {
            let mut shards = reference.table.partitions.keys();
            match (shards.next(), shards.next(), reach) {
                (Some(only), None, _) => Place::One(*only),
                (_, _, Some(Reach::Everywhere(reason))) => Place::Everywhere(reason),
                _ => Place::Everywhere(Reason::UnknownValue),
            }
        }
    }
}

/// The shard to which all inserted rows go, if there is one.
fn common_owner(keyspace: &Keyspace, rows: &[Operand]) -> Option<ShardNumber> {
    let mut owner = None;
    for key in rows {
        let Operand::Known(key) = key else { return None };
        let own = keyspace.owner(key);
        if *owner.get_or_insert(own) != own {
            return None;
        }
    }
    owner
}

/// Refuses a table that lacks the partition of a shard: its rows would be missing from answers in silence.
fn refuse_incomplete(table: &LogicalTable) {
    let map = &table.keyspace.map;
    if table.partitions.len() >= map.len() {
        return;
    }
    let missing: Vec<_> = map
        .shards()
        .filter(|shard| !table.partitions.contains_key(&shard.number))
        .map(|shard| format!("\"{}\"", shard.name))
        .collect();
    let refusal = Refusal::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("logical table {} has no partition for shard {}", table.name, missing.join(", ")),
    )
    .detail("Its foreign server or partition was dropped or renamed; rows on that shard would be missing.")
    .hint("Make the server again under the shard's name, and the partition as a foreign table on it.");
    flag::refuse(refusal)
}

/// Refuses COPY .. TO of a logical table to which row security applies, as Postgres refuses it of other partitioned tables.
/// Postgres makes it a SELECT .. FROM ONLY the table before it looks, and writes an empty file without a word.
unsafe fn refuse_empty_copy(catalog: &catalog::Catalog, query: *mut pg_sys::Query, sql: *const c_char) {
    let Some(entry) = items::<pg_sys::RangeTblEntry>((*query).rtable).next() else { return };
    let reads_only = (*query).commandType == pg_sys::CmdType::CMD_SELECT && !(*entry).inh;
    if !reads_only || sql.is_null() || catalog.table((*entry).relid).is_none() {
        return;
    }
    let text = encoding::shape(sql);
    if !copies_table(statement(&text, (*query).stmt_location, (*query).stmt_len), stats::backslash()) {
        return;
    }
    let name = encoding::utf8_string(pg_sys::get_rel_name((*entry).relid));
    let refusal = Refusal::new(
        PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
        format!("cannot copy from partitioned table \"{name}\""),
    )
    .hint("Try the COPY (SELECT ...) TO variant.");
    flag::refuse(refusal)
}

/// What postgres_fdw would refuse less clearly, or not at all.
unsafe fn unsupported(reading: &Reading, obstacle: whole::Obstacle) -> Option<Refusal> {
    if let Some(table) = same_key::changed(reading) {
        return Some(key_change(table));
    }
    reading.tables.iter().find_map(|reference| {
        let table = &reference.table.name;
        let conflict = (*reference.query).onConflict;
        let inserts = matches!(reference.usage, Usage::Insert(_));
        if inserts && !conflict.is_null() && !is_plain_do_nothing(conflict) {
            let refusal = Refusal::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!("ON CONFLICT with a conflict target or DO UPDATE is not supported on table {table}"),
            );
            return Some(refusal.detail("Its rows are unique on their shards, not here.").hint(
                "Insert the rows of each shard by a statement of their own, from VALUES: it runs there as a whole. Or use ON \
                 CONFLICT DO NOTHING without a target.",
            ));
        }
        (reference.usage == Usage::Merge).then(|| {
            Refusal::new(
                PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                format!("MERGE into table {table} cannot run on one shard"),
            )
            .detail(obstacle)
            .hint(
                "Let ON compare the key with a value, or with a key of the source that has one, and insert that key. Or use \
                 UPDATE, DELETE and INSERT in one transaction.",
            )
        })
    })
}

/// Whether parameters of the client's stand in the statement.
unsafe fn has_parameters(query: *mut pg_sys::Query) -> bool {
    let mut found = false;
    walk_level(query, &mut |node| {
        let param = cast::<pg_sys::Param>(node, pg_sys::NodeTag::T_Param);
        found |= param.is_some_and(|param| (*param).paramkind == pg_sys::ParamKind::PARAM_EXTERN);
        !found
    });
    let in_rows = items::<pg_sys::RangeTblEntry>((*query).rtable).any(|entry| {
        let mut found = false;
        walk_expression((*entry).values_lists.cast(), &mut |node| {
            found |= tag(node) == pg_sys::NodeTag::T_Param;
            !found
        });
        found
    });
    found || in_rows || subqueries(query).into_iter().any(|inner| has_parameters(inner))
}

/// Partitionwise joins and aggregates, on while a statement with logical tables is planned: colocated tables join on
/// their shards.
struct Partitionwise {
    join: bool,
    aggregate: bool,
}

impl Partitionwise {
    fn on() -> Self {
        // SAFETY: settings of this process, read by the planner only.
        unsafe {
            let before =
                Self { join: pg_sys::enable_partitionwise_join, aggregate: pg_sys::enable_partitionwise_aggregate };
            pg_sys::enable_partitionwise_join = true;
            pg_sys::enable_partitionwise_aggregate = true;
            before
        }
    }
}

impl Drop for Partitionwise {
    fn drop(&mut self) {
        // SAFETY: as in `on`.
        unsafe {
            pg_sys::enable_partitionwise_join = self.join;
            pg_sys::enable_partitionwise_aggregate = self.aggregate;
        }
    }
}
