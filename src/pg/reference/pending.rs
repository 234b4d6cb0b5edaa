//! Changes of reference tables on their way to all shards.
//!
//! Decides how many go together: changes of one kind to one table, in their order, until the statement ends, there are
//! [`MANY`] of them, or a row comes a second time. What always holds: they are sent before anything else is sent on one of
//! the connections, before a savepoint or the transaction ends, and at the nesting level at which they happened; all
//! shards are told before the first is waited for; each must confirm as many rows as it was sent.
//!
//! Here a row is visible as soon as its transaction has committed; on a shard it may still be prepared then, and a DELETE
//! would not see it, nor wait. So if a shard misses rows that are to be deleted or get another key, they are put there as they
//! were, which waits for whoever has written rows with their keys, and what was to be done is done again.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::rc::{Rc, Weak};

use pgrx::pg_sys;
use pgrx::PgSqlErrorCode;

use super::layout::{c_statement, qualified, Layout, Texts};
use crate::pg::catalog::{self, Catalog, ReferenceTable};
use crate::pg::fdw::shard::{connect, statement};
use crate::pg::fdw::users;
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::{guard, Failure, Result, SqlState};
use crate::pg::remote::occupant::Occupant;
use crate::pg::remote::portal::{Portal, Request};
use crate::pg::remote::wire::encode::{Params, Values};
use crate::pg::remote::{transaction, Connection};
use crate::pg::savepoint;

/// Rows sent in one statement, at most.
const MANY: usize = 1000;
/// And bytes.
const LARGE: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// The row is as it is here now.
    Put,
    /// Its primary key changes.
    Move,
    Delete,
}

/// What has happened to a row.
pub struct Change {
    /// The key by which the copies know it.
    pub key: Texts,
    /// As it is now, but for `Delete`.
    pub row: Option<Texts>,
    /// As it was, but for `Put`.
    pub old: Option<Texts>,
}

/// Changes that were not sent.
struct Pending {
    table: pg_sys::Oid,
    name: String,
    layout: Rc<Layout>,
    kind: Kind,
    user: pg_sys::Oid,
    level: i32,
    connections: Vec<Connection>,
    held: RefCell<Held>,
    holds: Cell<bool>,
}

#[derive(Default)]
struct Held {
    /// The statement's, and then those of the rows as they were.
    arrays: Vec<Vec<u8>>,
    keys: HashSet<Texts>,
    bytes: usize,
}

/// Layouts, for as long as the catalog in which they were looked up is the current one.
type Layouts = Option<(Rc<Catalog>, HashMap<pg_sys::Oid, Rc<Layout>>)>;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Pending>>> = const { RefCell::new(None) };
    /// Of this transaction.
    static LAYOUTS: RefCell<Layouts> = const { RefCell::new(None) };
}

/// Registers the callback. Once per process.
pub fn init() {
    // SAFETY: the callback has the declared type and stays loaded for the life of the process.
    unsafe { pg_sys::RegisterXactCallback(Some(on_transaction), std::ptr::null_mut()) }
}

unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    // SAFETY: the body of a callback.
    guard(|| {
        if matches!(event, pg_sys::XactEvent::XACT_EVENT_COMMIT | pg_sys::XactEvent::XACT_EVENT_ABORT) {
            drop(CURRENT.take());
            drop(LAYOUTS.take());
        }
        Ok(())
    })
}

/// The layout of an open table.
///
/// # Safety
/// Inside a trigger of `relation`.
pub unsafe fn layout(relation: pg_sys::Relation) -> Result<Rc<Layout>> {
    let Some(current) = catalog::current() else { catalog::no_extension() };
    let known = LAYOUTS.with_borrow(|layouts| match layouts {
        Some((catalog, layouts)) if Rc::ptr_eq(catalog, &current) => layouts.get(&(*relation).rd_id).cloned(),
        _ => None,
    });
    if let Some(known) = known {
        return Ok(known);
    }
    let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopTransactionContext);
    let made = Rc::new(Layout::of(relation)?);
    pg_sys::MemoryContextSwitchTo(before);
    LAYOUTS.with_borrow_mut(|layouts| {
        if layouts.as_ref().is_none_or(|(catalog, _)| !Rc::ptr_eq(catalog, &current)) {
            *layouts = Some((current, HashMap::new()));
        }
        if let Some((_, layouts)) = layouts {
            layouts.insert((*relation).rd_id, Rc::clone(&made));
        }
    });
    Ok(made)
}

/// As whom the copies on `server` are written: as the user here, or as who has written there in this transaction, for
/// what follows from his statement by a foreign key, which Postgres runs as the tables' owner.
unsafe fn user(server: pg_sys::Oid) -> pg_sys::Oid {
    let (mut user, mut context) = (pg_sys::InvalidOid, 0);
    pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
    let is_local = context & pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32 != 0;
    match users::writer(server) {
        Some(writer) if is_local => writer,
        _ => user,
    }
}

/// Adds a change, and sends those before it that cannot go with it.
///
/// # Safety
/// Inside a trigger of the table.
pub unsafe fn add(table: &ReferenceTable, layout: &Rc<Layout>, kind: Kind, change: Change) -> Result<()> {
    let Some((_, first)) = table.servers.first() else { return Ok(()) };
    let user = user(*first);
    let fits = |pending: &Rc<Pending>| {
        pending.table == table.relid
            && pending.kind == kind
            && pending.user == user
            && pending.level == savepoint::depth()
            && Rc::ptr_eq(&pending.layout, layout)
            && pending.has_room(&change)
    };
    let open = CURRENT.with_borrow(Clone::clone).filter(fits);
    let pending = match open {
        Some(pending) => pending,
        None => {
            flush()?;
            Pending::open(table, layout, kind, user)?
        }
    };
    pending.push(change);
    Ok(())
}

/// Sends what is held, and waits until every shard has confirmed it.
pub fn flush() -> Result<()> {
    CURRENT.take().map_or(Ok(()), |pending| pending.send())
}

/// Empties the copies.
///
/// # Safety
/// `relation` must be open.
pub unsafe fn truncate(table: &ReferenceTable, relation: pg_sys::Relation) -> Result<()> {
    flush()?;
    let sql = c_statement([b"TRUNCATE ONLY ".as_slice(), &qualified(relation)].concat());
    for (_, server) in &table.servers {
        let user = user(*server);
        users::admit(*server, user, true);
        connect(*server, user)?.query(&sql).map_err(not_emptied)?;
    }
    Ok(())
}

/// A shard's refusal, whose own hint would not help: only the shards know which tables refer to the copies.
fn not_emptied(failure: Failure) -> Failure {
    match failure.code == SqlState::from(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED) {
        true => failure.hint("Use DELETE, for the rows of distributed tables that refer to it first."),
        false => failure,
    }
}

impl Pending {
    unsafe fn open(table: &ReferenceTable, layout: &Rc<Layout>, kind: Kind, user: pg_sys::Oid) -> Result<Rc<Self>> {
        let mut connections = Vec::with_capacity(table.servers.len());
        for (_, server) in &table.servers {
            users::admit(*server, user, true);
            connections.push(connect(*server, user)?);
        }
        connections.iter().try_for_each(|connection| connection.link().make_ready())?;
        let (row, key) = layout.widths();
        let arrays = match kind {
            Kind::Put => row,
            Kind::Move => row + key + row,
            Kind::Delete => key + row,
        };
        let pending = Rc::new(Self {
            table: table.relid,
            name: table.name.clone(),
            layout: Rc::clone(layout),
            kind,
            user,
            level: savepoint::depth(),
            connections,
            held: RefCell::new(Held { arrays: vec![Vec::new(); arrays], ..Held::default() }),
            holds: Cell::new(true),
        });
        for connection in &pending.connections {
            let occupant: Weak<Self> = Rc::downgrade(&pending);
            connection.link().occupy(occupant);
        }
        transaction::expect();
        CURRENT.set(Some(Rc::clone(&pending)));
        Ok(pending)
    }

    fn has_room(&self, change: &Change) -> bool {
        let held = self.held.borrow();
        // A key that is exchanged must have left its row before another gets it.
        self.holds.get()
            && self.kind != Kind::Move
            && held.keys.len() < MANY
            && held.bytes < LARGE
            && !held.keys.contains(&change.key)
    }

    fn push(&self, change: Change) {
        let held = &mut *self.held.borrow_mut();
        let key = Some(&change.key).filter(|_| self.kind != Kind::Put);
        let elements = change.row.iter().chain(key).chain(&change.old).flatten();
        for (array, element) in held.arrays.iter_mut().zip(elements) {
            array.push(if array.is_empty() { b'{' } else { b',' });
            array.extend_from_slice(element);
            held.bytes += element.len() + 1;
        }
        held.keys.insert(change.key);
    }

    fn send(&self) -> Result<()> {
        if !self.holds.replace(false) {
            return Ok(());
        }
        let Held { mut arrays, keys, .. } = self.held.take();
        self.connections.iter().for_each(|connection| drop(connection.link().vacate()));
        arrays.iter_mut().for_each(|array| array.push(b'}'));
        let (row, key) = self.layout.widths();
        let (sql, width, is_counted) = match self.kind {
            Kind::Put => (&self.layout.put, row, self.layout.counts_put()),
            Kind::Move => (&self.layout.r#move, row + key, true),
            Kind::Delete => (&self.layout.delete, key, true),
        };
        let (given, old) = arrays.split_at(width);
        let portals = self.start(&self.connections.iter().collect::<Vec<_>>(), sql, given)?;
        let rows = keys.len() as u64;
        let mut missing = Vec::new();
        for (portal, connection) in portals.iter().zip(&self.connections) {
            let affected = affected(portal)?;
            if is_counted && affected != rows {
                if self.kind == Kind::Put {
                    return Err(differs(&self.name, connection.shard(), rows, affected));
                }
                missing.push(connection);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        self.start(&missing, &self.layout.put, old)?.iter().try_for_each(|portal| affected(portal).map(drop))?;
        for (portal, connection) in self.start(&missing, sql, given)?.iter().zip(&missing) {
            let affected = affected(portal)?;
            if affected != rows {
                return Err(differs(&self.name, connection.shard(), rows, affected));
            }
        }
        Ok(())
    }

    /// Sends a statement, and does not wait for its outcome.
    fn start(&self, connections: &[&Connection], sql: &[u8], arrays: &[Vec<u8>]) -> Result<Vec<Rc<Portal>>> {
        let types = vec![pg_sys::TEXTARRAYOID; arrays.len()];
        let statement = statement(sql.into(), types, Box::default(), Box::default());
        let start = |connection: &&Connection| {
            let mut params = Params::default();
            arrays.iter().for_each(|array| params.push_text(Some(array)));
            connection.start(Request {
                statement: Rc::clone(&statement),
                params,
                chunk: 0,
                begin: true,
                writes: true,
                needs: Needs::Plain,
                commits: false,
            })
        };
        transaction::at_level(self.level, || connections.iter().map(start).collect())
    }
}

/// Waits for a statement's end.
fn affected(portal: &Rc<Portal>) -> Result<u64> {
    let mut row = Vec::new();
    while portal.next(&mut row)? {}
    Ok(portal.affected())
}

fn differs(table: &str, shard: &str, rows: u64, affected: u64) -> Failure {
    Failure::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!("shard \"{shard}\" has changed {affected} rows of its copy of {table} where {rows} were changed here"),
    )
    .detail("The copy does not have the rows that the table has here, or has triggers or rules of its own.")
    .hint("Compare them with shardmap.verify_reference(), and make the copy anew with shardmap.refresh_reference().")
    .at_shard(shard)
}

impl Occupant for Pending {
    fn set_aside(self: Rc<Self>) -> Result<()> {
        self.send()
    }

    fn forsake(&self) {
        self.holds.set(false);
        if let Ok(mut held) = self.held.try_borrow_mut() {
            *held = Held::default();
        }
    }

    fn unsent_level(&self) -> i32 {
        if self.holds.get() {
            self.level
        } else {
            0
        }
    }
}
