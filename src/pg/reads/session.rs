//! What this session has written and seen on each shard, so that its reads never go back in time.
//!
//! Positions are asked for late: after a write or a read only the server is noted, and where that server is by the time
//! that somebody wants to know stands for what was written or seen there. As long as one replica answers, nobody asks.
//! What always holds: a note is dropped by DISCARD ALL, and else not before its position is known; positions only grow. A replica that was
//! restarted may be behind what it has shown, so a note on one is worth something on the same connection only. A read that
//! fails, or a write that is rolled back, may leave a note behind, which makes a later read wait for more than it must.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Instant;

use pgrx::pg_sys::Oid;
use shardmap_core::reads::token::{Mark, ReadToken, ShardPrint};

use crate::pg::remote::Connection;

/// A server whose present position stands for what was written or seen there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Note {
    pub server: Oid,
    /// The connection, on a replica; [`PRIMARY`]: the primary, which a restart does not set back.
    pub link: u64,
}

pub const PRIMARY: u64 = 0;
/// A connection through a pooler, which would hide that its server was restarted.
const POOLED: u64 = u64::MAX;

impl Note {
    /// Of what is read on this connection.
    pub fn of(shard: Oid, server: Oid, connection: &Connection) -> Self {
        let link = connection.link();
        let link = match server == shard {
            true => PRIMARY,
            false if link.target.pooler.keeps_session() => link.number,
            false => POOLED,
        };
        Self { server, link }
    }

    /// Whether it is about this connection, and where that is now stands for it.
    pub fn is_on(&self, connection: &Connection) -> bool {
        self.link == connection.link().number
    }
}

/// What is known of a shard's log: a position, and notes for the rest.
#[derive(Clone, Debug, Default)]
pub struct Track {
    pub mark: Option<Mark>,
    pub pending: Vec<Note>,
}

impl Track {
    fn note(&mut self, note: Note) {
        if !self.pending.contains(&note) {
            self.pending.push(note);
        }
    }

    pub fn raise(&mut self, mark: Mark) {
        self.mark = Some(self.mark.map_or(mark, |own| own.merge(mark)));
    }
}

/// The session's past on one shard.
#[derive(Clone, Debug, Default)]
pub struct Past {
    pub written: Track,
    pub seen: Track,
    pub wrote_at: Option<Instant>,
    /// The server that answered the last read.
    pub last: Option<Oid>,
}

thread_local! {
    /// By the shard's foreign server.
    static PASTS: RefCell<HashMap<Oid, Past>> = RefCell::default();
    static OBSERVED: RefCell<Option<ReadToken>> = const { RefCell::new(None) };
    /// The servers that the running transaction has read from.
    static PINS: RefCell<HashMap<Oid, Oid>> = RefCell::default();
}

/// Notes that the session writes on a shard, just before that may be committed.
pub fn note_write(shard: Oid) {
    with(shard, |past| {
        past.written.note(Note { server: shard, link: PRIMARY });
        past.wrote_at = Some(Instant::now());
    });
}

/// Notes that `server` answers a read of a shard, on this connection.
pub fn note_read(shard: Oid, server: Oid, connection: &Connection) {
    with(shard, |past| {
        past.seen.note(Note::of(shard, server, connection));
        past.last = Some(server);
    });
    PINS.with_borrow_mut(|pins| pins.insert(shard, server));
}

/// Notes a token that the user of the session holds.
pub fn observe(token: &ReadToken) {
    OBSERVED.with_borrow_mut(|observed| match observed {
        Some(observed) => observed.merge(token),
        None => *observed = Some(token.clone()),
    });
}

/// The tokens observed, as one.
pub fn observed() -> Option<ReadToken> {
    OBSERVED.with_borrow(Clone::clone)
}

/// What the tokens observed stand for on a shard.
pub fn observed_mark(shard: impl FnOnce() -> ShardPrint) -> Option<Mark> {
    OBSERVED.with_borrow(|observed| observed.as_ref().and_then(|observed| observed.mark(shard())))
}

/// The server from which the running transaction has read of a shard.
pub fn pinned(shard: Oid) -> Option<Oid> {
    PINS.with_borrow(|pins| pins.get(&shard).copied())
}

/// The server from which the transaction has read of a shard is lost, and nothing was read.
pub fn unpin(shard: Oid) {
    PINS.with_borrow_mut(|pins| pins.remove(&shard));
}

/// The transaction is over.
pub fn forget_pins() {
    PINS.with_borrow_mut(HashMap::clear);
}

/// The session is another user's from now on.
pub fn forget() {
    PASTS.with_borrow_mut(HashMap::clear);
    OBSERVED.set(None);
}

/// Changes what is known of a shard.
pub fn with<T>(shard: Oid, change: impl FnOnce(&mut Past) -> T) -> T {
    PASTS.with_borrow_mut(|pasts| change(pasts.entry(shard).or_default()))
}

/// Looks at what is known of a shard; `None`: nothing.
pub fn look<T>(shard: Oid, look: impl FnOnce(&Past) -> T) -> Option<T> {
    PASTS.with_borrow(|pasts| pasts.get(&shard).map(look))
}

/// A copy of what is known of a shard.
pub fn past(shard: Oid) -> Past {
    PASTS.with_borrow(|pasts| pasts.get(&shard).cloned()).unwrap_or_default()
}

/// The shards of which something is known.
pub fn shards() -> Vec<Oid> {
    PASTS.with_borrow(|pasts| pasts.keys().copied().collect())
}
