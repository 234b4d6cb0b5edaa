//! Deadlocks over several shards: a session that has waited for shards for long looks whether it waits for itself.
//!
//! Decides when to look ([`Watch`]) and what to make of it. A look asks the shards that the session waits for who waits for
//! whom there, then those where the ones in its way wait, and this server for waits on local locks; who is in a circle is
//! decided in `shardmap_core::deadlock`. What always holds: only the session itself gives up, at a point where it could
//! have been cancelled; a look never uses a connection that is in use, ends as soon as the shard answers or an
//! interrupt comes, and after [`LIMIT`]; what cannot be asked counts as not waiting, so that nobody is stopped by guess.
//! Does not see: locks of prepared transactions, which no session holds, and local locks of other coordinators.
//! Read next: `ask` for the questions, `waiting` for what sessions tell each other.

mod ask;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::{pg_sys, PgSqlErrorCode};
use shardmap_core::deadlock::{Circle, Graph, Party, Place, SessionId, Wait};

use super::failure::{Failure, Result};
use super::link::Link;
use super::target::Target;
use super::{pool, resolve};
use crate::pg::settings::DEADLOCK_TIMEOUT;
use ask::{Asking, Shard};
pub use waiting::Waiting;
use waiting::{waits_of, Published, Whereabouts};

/// The longest that a look takes.
const LIMIT: Duration = Duration::from_secs(5);
/// When a session that does not look tells others where it waits.
const TOLD: Duration = Duration::from_secs(1);
/// The time between two looks at a circle that is for another to open.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest time between two looks.
const LONGEST: Duration = Duration::from_secs(30);

/// This session, as its connections to shards are named.
pub fn own_session() -> SessionId {
    // SAFETY: reads variables of the server, which do not change in a process' life.
    let (system, start, pid) =
        unsafe { (pg_sys::GetSystemIdentifier(), pg_sys::PgStartTime as u64, pg_sys::MyProcPid) };
    // Any number does that differs between servers; this spreads the bits of both over all of it.
    let server = (system ^ start.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    SessionId { server, pid }
}

/// One wait, from its beginning until something has come.
#[derive(Default)]
pub struct Watch {
    since: Option<Instant>,
    /// Until the next look, from the beginning.
    next: Duration,
    /// The circle that was seen last, and since when.
    seen: Option<(Circle, Instant)>,
    published: Option<Published>,
}

impl Watch {
    /// How long to wait before the next look.
    pub fn limit(&mut self) -> Duration {
        match self.since {
            Some(since) => self.next.saturating_sub(since.elapsed()),
            None => {
                self.since = Some(Instant::now());
                self.next = timeout().unwrap_or(TOLD);
                self.next
            }
        }
    }

    pub fn is_due(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= self.next)
    }

    /// Looks. `Some`: this session is to give up.
    pub fn look(&mut self, links: &[&Link]) -> Option<Failure> {
        let waited = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        self.next = waited + waited.min(LONGEST);
        // SAFETY: a counter of this process: nothing may end the statement now.
        if unsafe { pg_sys::InterruptHoldoffCount } > 0 {
            return None;
        }
        let mut look = Look::new(links);
        self.published = self.published.take().or_else(|| Published::at(&look.waited_for));
        timeout()?;
        let circle = look.circle()?;
        let since = match &self.seen {
            Some((seen, since)) if *seen == circle => *since,
            _ => Instant::now(),
        };
        self.next = waited + AGAIN;
        let gives_up = circle.is_for(look.own, since.elapsed()) && look.confirms(&circle);
        let failure = gives_up.then(|| look.failure(&circle, links));
        self.seen = Some((circle, since));
        failure
    }
}

/// `None`: this session does not look.
fn timeout() -> Option<Duration> {
    let timeout = DEADLOCK_TIMEOUT.get();
    (timeout > 0).then(|| Duration::from_millis(timeout.unsigned_abs().into()))
}

/// What one look has found so far.
struct Look {
    own: SessionId,
    /// The processes on shards that are certainly this session's connections.
    own_pids: Vec<(u32, i32)>,
    waited_for: Vec<u32>,
    asking: Asking,
    shards: BTreeMap<u32, Shard>,
    graph: Graph,
}

impl Look {
    fn new(links: &[&Link]) -> Self {
        let mut shards = BTreeMap::new();
        for link in links {
            let server = link.target.id.to_u32();
            shards.entry(server).or_insert_with(|| Shard::new(server, Rc::clone(&link.target)));
        }
        Self {
            own: own_session(),
            own_pids: pool::processes(),
            waited_for: shards.keys().copied().collect(),
            asking: Asking::new(links.iter().map(|link| link.socket()).collect(), Instant::now() + LIMIT),
            shards,
            graph: Graph::default(),
        }
    }

    /// The circle that this session is in, as far as can be seen.
    fn circle(&mut self) -> Option<Circle> {
        let mut to_ask: BTreeSet<u32> = self.waited_for.iter().copied().collect();
        let (mut asked, mut visited) = (BTreeSet::new(), BTreeSet::new());
        while !to_ask.is_empty() {
            asked.extend(to_ask.iter().copied());
            let shards = self.shards.values_mut().filter(|shard| to_ask.contains(&shard.server)).collect();
            let waits = self.asking.ask(shards, ask::ALL)?;
            self.add(waits);
            to_ask.clear();
            for server in self.whereabouts(&mut visited) {
                if !asked.contains(&server) && self.know(server) {
                    to_ask.insert(server);
                }
            }
        }
        self.graph.circle(self.own)
    }

    /// Adds the waits on this server of all that are in the way, and says on which shards they may wait.
    fn whereabouts(&mut self, visited: &mut BTreeSet<SessionId>) -> BTreeSet<u32> {
        let mut servers = BTreeSet::new();
        loop {
            let is_new = |party: Party| match party {
                Party::Session(session) if session != self.own && !visited.contains(&session) => Some(session),
                _ => None,
            };
            let reached = self.graph.reached(Party::Session(self.own));
            let Some(session) = reached.into_iter().find_map(is_new) else { return servers };
            visited.insert(session);
            let is_here = session.server == self.own.server;
            if is_here {
                ask::local(session).into_iter().for_each(|wait| self.graph.add(wait));
            }
            match if is_here { waits_of(session.pid) } else { Whereabouts::Unknown } {
                Whereabouts::Nowhere => {}
                Whereabouts::Shard(server) => drop(servers.insert(server)),
                Whereabouts::Unknown => servers.extend(resolve::servers().into_iter().map(|(oid, _)| oid.to_u32())),
            }
        }
    }

    /// Whether the shard can be asked.
    fn know(&mut self, server: u32) -> bool {
        if self.shards.contains_key(&server) {
            return true;
        }
        let known = resolve::servers().into_iter().find(|(oid, _)| oid.to_u32() == server);
        // SAFETY: reads a variable of the session.
        let user = unsafe { pg_sys::GetUserId() };
        let target = known.and_then(|(_, name)| Target::resolve(&name, user).ok());
        let shard = target.map(|target| Shard::new(server, Rc::new(target)));
        shard.map(|shard| self.shards.insert(server, shard)).is_some()
    }

    /// A session that waits for itself does so on another connection; what a connection that was lost left on a shard is
    /// not its own any more, and ends by itself.
    fn add(&mut self, waits: Vec<Wait>) {
        for wait in waits {
            let holder = match wait.place {
                Place::Shard(server) => (server, wait.holder_pid),
                Place::Here => (0, 0),
            };
            if wait.waiter != wait.holder || self.own_pids.contains(&holder) {
                self.graph.add(wait);
            }
        }
    }

    /// Whether all waits of the circle are there at a second look.
    fn confirms(&mut self, circle: &Circle) -> bool {
        let on = |shard: &Shard| {
            let is_there = |wait: &&Wait| wait.place == Place::Shard(shard.server);
            circle.path.iter().filter(is_there).map(|wait| wait.pid).collect::<Vec<_>>()
        };
        let pids: BTreeSet<i32> = self.shards.values().flat_map(on).collect();
        let shards = self.shards.values_mut().filter(|shard| !on(shard).is_empty()).collect();
        let Some(waits) = self.asking.ask(shards, &ask::some(&pids)) else { return false };
        self.graph = Graph::default();
        self.add(waits);
        for wait in circle.path.iter().filter(|wait| wait.place == Place::Here) {
            if let Party::Session(session) = wait.waiter {
                ask::local(session).into_iter().for_each(|wait| self.graph.add(wait));
            }
        }
        self.graph.confirms(&circle.path)
    }

    fn failure(&self, circle: &Circle, links: &[&Link]) -> Failure {
        let detail = circle.path.iter().map(|wait| self.described(wait)).collect::<Vec<_>>().join("\n");
        let failure = Failure::new(PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED, "deadlock detected")
            .detail(detail)
            .hint(
            "Repeat the transaction. Transactions that touch the same rows in the same order do not block each other.",
        );
        let waits_at = |wait: &&Wait| wait.waiter == Party::Session(self.own);
        let place = circle.path.iter().find(waits_at).map(|wait| wait.place);
        let at = links.iter().find(|link| place == Some(Place::Shard(link.target.id.to_u32())));
        match at.or(links.first()) {
            Some(link) => failure.at(&link.target.place),
            None => failure,
        }
    }

    fn described(&self, wait: &Wait) -> String {
        let (who, whom) = (self.name(wait.waiter), self.name(wait.holder));
        match wait.place {
            Place::Here => format!("Process {who} waits on the coordinator for process {whom}."),
            Place::Shard(_) => {
                let shard = self.shard_name(wait.place);
                let (own, other) = (wait.pid, wait.holder_pid);
                format!("Process {who} waits on shard \"{shard}\", as process {own} there, for process {whom}, there {other}.")
            }
        }
    }

    fn name(&self, party: Party) -> String {
        match party {
            Party::Session(session) if session.server == self.own.server => session.pid.to_string(),
            Party::Session(session) => format!("{} of another coordinator", session.pid),
            Party::Stranger(place, pid) => format!("{pid} of shard \"{}\"", self.shard_name(place)),
        }
    }

    fn shard_name(&self, place: Place) -> &str {
        match place {
            Place::Shard(server) => self.shards.get(&server).map_or("", Shard::name),
            Place::Here => "",
        }
    }
}

/// Waits until one of the links has something to be read; looks for deadlocks meanwhile.
pub fn wait_for_any(links: &[Rc<Link>]) -> Result<()> {
    use super::wait::{Interest, WaitSet, Woken};
    let mut watch = Watch::default();
    let sockets: Vec<_> = links.iter().map(|link| (link.socket(), Interest::Read)).collect();
    if sockets.is_empty() || sockets.iter().any(|(socket, _)| *socket < 0) {
        return Ok(());
    }
    let set = WaitSet::new(&sockets);
    loop {
        pgrx::check_for_interrupts!();
        if set.wait(Some(watch.limit())) == Woken::Socket {
            return Ok(());
        }
        if watch.is_due() {
            let links: Vec<&Link> = links.iter().map(|link| &**link).collect();
            watch.look(&links).map_or(Ok(()), Err)?;
        }
    }
}
