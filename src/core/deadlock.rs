//! Circles of sessions that wait for each other on several shards, where no server sees more than a part of the circle.
//!
//! Decides whether a session that waits is in such a circle, and which session of it gives up. What always holds: every
//! session of a circle that sees the same waits names the same one, the one whose wait on a shard began last, so that one
//! and no more gives up; and a circle counts only if all its waits are found a second time. A wait found twice with the same
//! beginning has lasted in between; so all of them stood at the moment between the two looks, and a circle that has stood
//! once does not open by itself.
//! Refuses to choose who waits on no shard: such a session cannot find out. Read next: `src/pg/remote/deadlock`.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// A session of a coordinator, as its connections to shards are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// A number of the coordinator's server, since its start.
    pub server: u64,
    /// The session's process there.
    pub pid: i32,
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}.{}", self.server, self.pid)
    }
}

/// Postgres keeps so many bytes of an application_name.
const NAME_BYTES: usize = 63;

impl SessionId {
    /// The application_name of its connections: `given`, as much of it as there is room for, and the session.
    #[must_use]
    pub fn application_name(self, given: &str) -> String {
        let own = self.to_string();
        let room = NAME_BYTES.saturating_sub(own.len() + 1);
        let end = given.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= room).last();
        format!("{} {own}", given.get(..end.unwrap_or(0)).unwrap_or_default())
    }

    /// The session that an application_name names, whatever a pooler has put behind it.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        name.split(' ').rev().find_map(|word| {
            let (server, pid) = word.split_once('.')?;
            let id = Self { server: u64::from_str_radix(server, 16).ok()?, pid: pid.parse().ok()? };
            (id.to_string() == word).then_some(id)
        })
    }
}

/// Where a wait is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// On the coordinator.
    Here,
    /// On a shard, by its foreign server's OID.
    Shard(u32),
}

/// Who waits, or is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Party {
    /// A session of a coordinator, whichever of its connections it is.
    Session(SessionId),
    /// A process that belongs to no coordinator.
    Stranger(Place, i32),
}

/// One party waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wait {
    /// Where.
    pub place: Place,
    /// Who waits.
    pub waiter: Party,
    /// Its process there.
    pub pid: i32,
    /// When this wait began there, in Postgres' microseconds: with the process it says which wait it is.
    pub since: i64,
    /// Who is waited for.
    pub holder: Party,
    /// Its process there.
    pub holder_pid: i32,
}

/// All waits that are known.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    waits: BTreeSet<Wait>,
}

/// How long each of a circle leaves it to those before.
pub const TURN: Duration = Duration::from_secs(5);

/// The waits that hold each other up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circle {
    /// From the session that looks back to itself.
    pub path: Vec<Wait>,
    /// Who may give up, in the order in which they should.
    pub candidates: Vec<SessionId>,
}

impl Circle {
    /// Whether it is for `own` to give up, which has seen this circle for so long: the first of the candidates at once,
    /// the next only when those before had time to, and seem to be unable.
    #[must_use]
    pub fn is_for(&self, own: SessionId, seen: Duration) -> bool {
        let rank = self.candidates.iter().position(|each| *each == own);
        rank.and_then(|rank| u32::try_from(rank).ok()).is_some_and(|rank| TURN.saturating_mul(rank) <= seen)
    }
}

impl Graph {
    /// Adds a wait.
    pub fn add(&mut self, wait: Wait) {
        self.waits.insert(wait);
    }

    /// Whether all of `waits` stand here too.
    #[must_use]
    pub fn confirms(&self, waits: &[Wait]) -> bool {
        waits.iter().all(|wait| self.waits.contains(wait))
    }

    /// All that `from` waits for, directly or not.
    #[must_use]
    pub fn reached(&self, from: Party) -> BTreeSet<Party> {
        self.spread(from, |wait| (wait.waiter, wait.holder))
    }

    fn spread(&self, from: Party, step: impl Fn(&Wait) -> (Party, Party)) -> BTreeSet<Party> {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(party) = open.pop() {
            for (_, next) in self.waits.iter().map(&step).filter(|(start, _)| *start == party) {
                if seen.insert(next) {
                    open.push(next);
                }
            }
        }
        seen
    }

    /// The circle that `own` is in.
    ///
    /// It is made of all waits between parties that wait for `own` and are waited for by it: so each of them finds the same
    /// candidates, though circles may share parties.
    #[must_use]
    pub fn circle(&self, own: SessionId) -> Option<Circle> {
        let start = Party::Session(own);
        let mut parties = self.reached(start);
        if !parties.contains(&start) {
            return None;
        }
        let behind = self.spread(start, |wait| (wait.holder, wait.waiter));
        parties.retain(|party| behind.contains(party));
        let inside = |wait: &&Wait| parties.contains(&wait.waiter) && parties.contains(&wait.holder);
        let mut latest: Vec<(i64, SessionId)> = Vec::new();
        for wait in self.waits.iter().filter(inside) {
            if let (Party::Session(session), Place::Shard(_)) = (wait.waiter, wait.place) {
                match latest.iter_mut().find(|(_, known)| *known == session) {
                    Some((since, _)) => *since = wait.since.max(*since),
                    None => latest.push((wait.since, session)),
                }
            }
        }
        latest.sort_unstable_by(|one, other| other.cmp(one));
        let candidates = latest.into_iter().map(|(_, session)| session).collect();
        Some(Circle { path: self.path(start), candidates })
    }

    /// A shortest way from `start` back to it. Empty if there is none.
    fn path(&self, start: Party) -> Vec<Wait> {
        // Ways of one length, then those one longer: (the last wait, and where the way before it is in `ways`).
        let mut ways: Vec<(Wait, Option<usize>)> = Vec::new();
        let mut seen = BTreeSet::new();
        let mut at: Option<usize> = None;
        loop {
            let end = match at {
                None => start,
                Some(at) => match ways.get(at) {
                    Some((wait, _)) => wait.holder,
                    None => return Vec::new(),
                },
            };
            for wait in self.waits.iter().filter(|wait| wait.waiter == end) {
                if wait.holder == start {
                    return Self::way(&ways, *wait, at);
                }
                if seen.insert(wait.holder) {
                    ways.push((*wait, at));
                }
            }
            at = Some(at.map_or(0, |at| at + 1));
        }
    }

    fn way(ways: &[(Wait, Option<usize>)], last: Wait, mut at: Option<usize>) -> Vec<Wait> {
        let mut path = vec![last];
        while let Some((wait, before)) = at.and_then(|at| ways.get(at)) {
            path.push(*wait);
            at = *before;
        }
        path.reverse();
        path
    }
}
