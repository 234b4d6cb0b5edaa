//! Which statements a connection has prepared on its shard, and under what names.
//!
//! Decides what is worth a name: a statement that comes for the second time, so that one-off texts leave nothing behind;
//! and which one goes when there are too many: the least recently used. What always holds: a name is used for one
//! statement only.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use pgrx::pg_sys;

/// A statement for shards, and how its results are to come.
#[derive(Debug, PartialEq, Eq)]
pub struct Statement {
    pub sql: Box<[u8]>,
    /// The parameters' types; 0: the shard decides.
    pub types: Box<[pg_sys::Oid]>,
    /// The results' formats: 0 text, 1 binary.
    pub formats: Box<[i16]>,
    /// The types that the results must have on the shard, because they come in binary; 0: any.
    pub wanted: Box<[pg_sys::Oid]>,
}

impl Hash for Statement {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.sql.hash(state);
        self.types.len().hash(state);
    }
}

impl Statement {
    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// How many statements that were seen once are remembered.
const REMEMBERED: usize = 4096;

struct Entry {
    name: u64,
    used: u64,
}

#[derive(Default)]
pub struct Prepared {
    entries: HashMap<Rc<Statement>, Entry>,
    seen: HashSet<u64>,
    names: u64,
    clock: u64,
}

/// How to refer to a statement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reference {
    /// Parse it without a name.
    Once,
    /// Parse it under this name; first close the other one, if there is one.
    New(u64, Option<u64>),
    /// It is there under this name.
    Known(u64),
}

impl Prepared {
    /// `limit`: how many statements may have names; 0: none.
    pub fn refer(&mut self, statement: &Rc<Statement>, limit: usize) -> Reference {
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(statement) {
            entry.used = self.clock;
            return Reference::Known(entry.name);
        }
        if limit == 0 {
            return Reference::Once;
        }
        if self.seen.len() >= REMEMBERED {
            self.seen.clear();
        }
        if self.seen.insert(statement.digest()) {
            return Reference::Once;
        }
        let evicted = (self.entries.len() >= limit).then(|| self.evict()).flatten();
        self.names += 1;
        self.entries.insert(Rc::clone(statement), Entry { name: self.names, used: self.clock });
        Reference::New(self.names, evicted)
    }

    fn evict(&mut self) -> Option<u64> {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| Rc::clone(key))?;
        self.entries.remove(&oldest).map(|entry| entry.name)
    }

    /// Forgets a statement that is not, or no longer, as it was prepared.
    pub fn forget(&mut self, statement: &Rc<Statement>) {
        self.entries.remove(statement);
    }
}

/// The name on the shard.
pub fn name(number: u64) -> Vec<u8> {
    format!("shardmap{number}").into_bytes()
}
