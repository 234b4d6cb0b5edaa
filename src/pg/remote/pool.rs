//! The connections that this backend keeps, and the two ways to use one: [`Connection::open`] and its methods.
//!
//! Decides which connection serves a shard, a user and a purpose. What always holds: all statements of one local
//! transaction for one shard and mapping use one connection; a connection whose server or mapping has changed is not used
//! after the end of its transaction; a connection found dead is replaced, once, as long as nothing was sent on it in this
//! transaction. The invalidation callback only counts; what it means is looked up at the next use.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys;

use super::answer::Answer;
use super::carried::Needs;
use super::failure::{guard, Result};
use super::idle;
use super::kept;
use super::link::Link;
use super::portal::{Portal, Request};
use super::target::{password_required, Target};
use super::transaction;
use super::wait::Patience;
use crate::pg::clock::now;
use crate::pg::encoding;

/// A target, and the generation of the catalog in which it was looked up.
type Resolved = (u64, Rc<Target>);

struct Pool {
    links: RefCell<Vec<Rc<Link>>>,
    /// By server and user.
    targets: RefCell<HashMap<(String, pg_sys::Oid), Resolved>>,
    /// The same by the server's OID.
    by_oid: RefCell<HashMap<(pg_sys::Oid, pg_sys::Oid), Resolved>>,
}

thread_local! {
    // Never dropped: at the process's end the operating system closes the sockets, and Postgres is half gone.
    static POOL: ManuallyDrop<Pool> = ManuallyDrop::new(Pool { links: RefCell::default(), targets: RefCell::default(), by_oid: RefCell::default() });
    /// Counts the changes of foreign servers and user mappings that this backend has heard of.
    static GENERATION: Cell<u64> = const { Cell::new(1) };
    /// This transaction has used a link, or nothing may be touched any more.
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// Registers the invalidation callbacks.
pub fn init() {
    let caches = [pg_sys::SysCacheIdentifier::FOREIGNSERVEROID, pg_sys::SysCacheIdentifier::USERMAPPINGOID];
    for cache in caches {
        // SAFETY: the callback has the declared type and stays loaded for the life of the process.
        unsafe { pg_sys::CacheRegisterSyscacheCallback(cache as i32, Some(on_change), pg_sys::Datum::from(0)) }
    }
}

unsafe extern "C-unwind" fn on_change(_: pg_sys::Datum, _: i32, _: u32) {
    // SAFETY: the body of a callback.
    guard(|| {
        GENERATION.set(GENERATION.get() + 1);
        Ok(())
    })
}

/// Changes whenever a foreign server or user mapping may have.
pub fn generation() -> u64 {
    GENERATION.get()
}

/// The links with an open transaction, in the order of their first use.
pub fn taking_part() -> Vec<Rc<Link>> {
    let taking_part = |pool: &Pool| pool.links.borrow().iter().filter(|link| link.in_transaction()).cloned().collect();
    let mut links: Vec<Rc<Link>> = POOL.with(|pool| taking_part(pool));
    links.sort_unstable_by_key(|link| link.remote.turn.get());
    links
}

/// Whether the transaction may have written on a shard.
pub fn any_wrote() -> bool {
    let wrote = |link: &Rc<Link>| link.in_transaction() && link.remote.wrote.get();
    POOL.with(|pool| pool.links.borrow().iter().any(wrote))
}

/// The links in the middle of a conversation.
pub fn active() -> Vec<Rc<Link>> {
    POOL.with(|pool| pool.links.borrow().iter().filter(|link| link.is_active()).cloned().collect())
}

/// The processes behind all links, with their foreign servers.
pub fn processes() -> Vec<(u32, i32)> {
    let process = |link: &Rc<Link>| (link.target.id.to_u32(), link.conn().backend_pid());
    POOL.with(|pool| pool.links.borrow().iter().map(process).collect())
}

/// Drops the rows that were to be sent, of statements at this nesting level and above.
pub fn forget_unsent(level: i32) {
    let links = POOL.with(|pool| pool.links.borrow().clone());
    for link in links {
        if link.occupant().is_some_and(|occupant| occupant.unsent_level() >= level) && !link.is_active() {
            link.vacate().iter().for_each(|occupant| occupant.forsake());
        }
    }
}

/// Drops the links that are closed and take no part in the transaction.
pub fn forget_closed() {
    let kept = |link: &Rc<Link>| link.is_open() || link.in_transaction();
    // Taken out first, so that nothing is borrowed while links are dropped.
    let dropped: Vec<_> = POOL.with(|pool| {
        let mut links = pool.links.borrow_mut();
        let (keep, drop) = links.drain(..).partition(kept);
        *links = keep;
        drop
    });
    drop(dropped);
}

/// Closes the links whose sessions an administrator's own statements may have changed. Outside of any transaction block.
pub fn forget_lent() {
    let lent = |link: &&Rc<Link>| link.lent.get() && !link.in_transaction();
    let links: Vec<_> = POOL.with(|pool| pool.links.borrow().iter().filter(lent).cloned().collect());
    links.iter().for_each(|link| link.close());
    forget_closed();
}

/// How long to wait for the answer to a clean-up command before its connection is closed for others' sake.
const SETTLE_LIMIT: Duration = Duration::from_millis(200);

/// Closes links that this transaction has not used, if they go to `server`, or others wait for them, or `any`. Whether that
/// may have made room for a link to `server`.
pub fn make_room(server: pg_sys::Oid, any: bool) -> bool {
    if kept::close((!any).then_some(server)) {
        return true;
    }
    let spare = |link: &Rc<Link>| link.is_open() && !link.touched.get() && !link.in_transaction() && !link.is_active();
    let links: Vec<_> = POOL.with(|pool| pool.links.borrow().iter().filter(|link| spare(link)).cloned().collect());
    let mut made = false;
    for link in links {
        let helps = any || link.target.id == server;
        if helps || link.conn().is_wanted() {
            link.settle_quietly(Instant::now() + SETTLE_LIMIT);
            link.close();
            made |= helps;
        }
    }
    forget_closed();
    made
}

/// The transaction is over. Lets go what others wait for. Neither fails nor raises an error.
pub fn rest() {
    if !IN_USE.get() {
        // An error has stopped all timers.
        return idle::arm_again();
    }
    let now = now();
    let mut wanted = false;
    POOL.with(|pool| {
        for link in pool.links.borrow().iter().filter(|link| !link.in_transaction()) {
            if link.touched.replace(false) {
                link.used.set(now);
                link.tell_statistics();
            }
            wanted |= link.conn().is_wanted();
        }
    });
    if wanted {
        make_room(pg_sys::InvalidOid, false);
    }
    IN_USE.set(false);
    idle::arm();
}

/// Whether no link has been used since the last transaction's end. Then it is safe to look at them in a signal's handler.
pub fn is_resting() -> bool {
    !IN_USE.get()
}

fn idle_time(link: &Link) -> Duration {
    Duration::from_micros(u64::try_from(now() - link.used.get()).unwrap_or(0))
}

/// The time for which the link that has rested longest was not used; `None`: there is none. Also in a signal's handler,
/// which must not panic.
pub fn longest_idle() -> Option<Duration> {
    POOL.with(|pool| {
        let links = pool.links.try_borrow().ok()?;
        links.iter().filter(|link| link.is_here()).map(|link| idle_time(link)).max()
    })
}

/// Takes leave of the shards whose links others wait for, or have not been used for `timeout`. In a signal's handler.
pub fn hang_up(timeout: Option<Duration>) {
    POOL.with(|pool| {
        let Ok(links) = pool.links.try_borrow() else { return };
        for link in links.iter().filter(|link| link.is_here() && !link.in_transaction()) {
            if link.conn().is_wanted() || timeout.is_some_and(|timeout| idle_time(link) >= timeout) {
                link.hang_up();
            }
        }
    });
}

/// The process ends.
pub fn close_all() {
    IN_USE.set(true);
    let links = POOL.with(|pool| pool.links.try_borrow().map(|links| links.clone()).unwrap_or_default());
    links.iter().for_each(|link| link.close());
}

/// Server and mapping, looked up again only after either kind of object has changed.
fn target(server: &str, user: pg_sys::Oid) -> Result<Rc<Target>> {
    let key = (server.to_owned(), user);
    let known = POOL.with(|pool| pool.targets.borrow().get(&key).cloned());
    if let Some((generation, target)) = known {
        if generation == GENERATION.get() {
            return Ok(target);
        }
    }
    let generation = GENERATION.get();
    let target = Rc::new(Target::resolve(server, user)?);
    POOL.with(|pool| pool.targets.borrow_mut().insert(key, (generation, Rc::clone(&target))));
    Ok(target)
}

/// As [`target`], by the server's OID.
pub(super) fn target_of(server: pg_sys::Oid, user: pg_sys::Oid) -> Result<Rc<Target>> {
    let generation = GENERATION.get();
    let known = POOL.with(|pool| match pool.by_oid.borrow().get(&(server, user)) {
        Some((own, target)) if *own == generation => Some(Rc::clone(target)),
        _ => None,
    });
    if let Some(known) = known {
        return Ok(known);
    }
    // SAFETY: inside a transaction; raises an error if there is no such server.
    let name = unsafe { encoding::utf8_string((*pg_sys::GetForeignServer(server)).servername) };
    let target = target(&name, user)?;
    POOL.with(|pool| pool.by_oid.borrow_mut().insert((server, user), (generation, Rc::clone(&target))));
    Ok(target)
}

/// Whether there is a link to the target for the local transaction, whatever its state.
pub(super) fn has_link(target: &Target) -> bool {
    let serves = |link: &Rc<Link>| link.transactional && link.target.same_place(target);
    POOL.with(|pool| pool.links.borrow().iter().any(serves))
}

/// Takes up a link that was made ahead of its use. Until then others may have its place.
pub(super) fn keep(link: Link) {
    IN_USE.set(true);
    link.touched.set(false);
    link.used.set(now());
    POOL.with(|pool| pool.links.borrow_mut().push(Rc::new(link)));
}

/// A link that serves the target.
fn link(target: &Rc<Target>, transactional: bool) -> Result<Rc<Link>> {
    IN_USE.set(true);
    let generation = GENERATION.get();
    let found = POOL.with(|pool| {
        let serves = |link: &&Rc<Link>| link.transactional == transactional && link.target.same_place(target);
        pool.links.borrow().iter().find(serves).cloned()
    });
    if let Some(found) = found {
        let current = found.generation.get() == generation || found.target.same_connection(target);
        // What the last transaction left to be read is none of this one's business.
        if !found.in_transaction() && found.settle().is_err() {
            found.close();
        }
        if found.in_transaction() || (current && found.is_fit()) {
            if current {
                found.generation.set(generation);
            }
            found.touched.set(true);
            return Ok(found);
        }
        found.close();
        forget_closed();
    }
    let made = Rc::new(Link::connect(Rc::clone(target), transactional, generation)?);
    POOL.with(|pool| pool.links.borrow_mut().push(Rc::clone(&made)));
    Ok(made)
}

/// One shard, for one user and purpose.
pub struct Connection {
    link: Rc<Link>,
}

impl Connection {
    /// Connects to the shard `server` as `user` is mapped there, or takes the connection that is there already.
    ///
    /// `transactional`: what is done takes part in the local transaction. Else each statement commits by itself, on a
    /// second connection, and does not see what the transaction has done.
    ///
    /// # Errors
    /// Those of [`Target::resolve`] and [`Link::connect`]; 25P02 if this transaction has lost its connection.
    pub fn open(server: &str, user: pg_sys::Oid, transactional: bool) -> Result<Self> {
        Self::to(&target(server, user)?, transactional)
    }

    /// As [`Connection::open`], by the server's OID, for what takes part in the local transaction.
    pub fn open_server(server: pg_sys::Oid, user: pg_sys::Oid) -> Result<Self> {
        Self::to(&target_of(server, user)?, true)
    }

    fn to(target: &Rc<Target>, transactional: bool) -> Result<Self> {
        let link = link(target, transactional)?;
        if target.needs_password && !link.conn().used_password() {
            let failure = password_required("The shard let this user in without asking for the password.");
            return Err(failure.at(&target.place));
        }
        Ok(Self { link })
    }

    pub fn shard(&self) -> &str {
        &self.link.target.server
    }

    /// As [`Connection::query`], for an administrator's own text, which may leave something behind in the shard's session.
    ///
    /// # Errors
    /// Those of [`Connection::query`].
    pub fn lend(&self, sql: &CStr) -> Result<Answer> {
        self.link.lent.set(true);
        self.query(sql)
    }

    /// For what is more than one statement.
    pub fn link(&self) -> &Rc<Link> {
        &self.link
    }

    /// Sends a statement and does not wait for its rows.
    ///
    /// # Errors
    /// 25P02 if this transaction has lost its connection; 08006 if the connection is lost.
    pub fn start(&self, request: Request) -> Result<Rc<Portal>> {
        Portal::open(&self.link, request)
    }

    /// Brings the shard's transaction to where ours is, for a statement that may write.
    pub(super) fn enter(&self) -> Result<()> {
        self.link.make_ready()?;
        // It may be DDL.
        self.link.remote.tables.borrow_mut().clear();
        let mut commands = Vec::new();
        if self.link.transactional {
            commands = transaction::enter(&self.link)?;
            self.link.remote.wrote.set(true);
        }
        // The rows come as text. Settings for what commits by itself, and may be no part of a transaction, need a session.
        if self.link.transactional || self.link.target.pooler.keeps_session() {
            commands.extend(self.link.carry(Needs::Plain));
        }
        match commands.is_empty() {
            true => Ok(()),
            false => self.link.run(&commands.join(&b"; "[..]), &mut Patience::Interruptible).map(|_| ()),
        }
    }

    /// As [`Connection::enter`], for a statement that writes nothing.
    pub(super) fn enter_to_read(&self) -> Result<()> {
        self.reading(|| self.enter())
    }

    /// Does what counts as a write, and is none.
    fn reading<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let wrote = self.link.in_transaction() && self.link.remote.wrote.get();
        let outcome = act();
        self.link.remote.wrote.set(wrote);
        outcome
    }

    /// As [`Connection::query`], for statements that write nothing: at the transaction's end nobody waits for this shard.
    pub fn read(&self, sql: &CStr) -> Result<Answer> {
        self.reading(|| self.query(sql))
    }

    /// Runs one or more statements, and returns the last one's result: rows as text, and the command tag.
    ///
    /// # Errors
    /// The shard's own; 2D000 if the text begins or ends a transaction; 08006 or 08007 if the connection is lost.
    pub fn query(&self, sql: &CStr) -> Result<Answer> {
        self.enter()?;
        let outcome = self.link.run(sql.to_bytes(), &mut Patience::Interruptible);
        let after = transaction::check_after(&self.link);
        let answer = outcome?;
        after?;
        Ok(answer)
    }
}
