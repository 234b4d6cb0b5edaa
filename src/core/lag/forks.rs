//! Where the timelines of a log parted, as far as that is known for certain.
//!
//! Decides what counts as certain: the primary's own history file; or a server that was seen in recovery on a timeline and then,
//! without having been restarted in between, out of recovery on the next one. That server has stood still where its recovery
//! ended, and its parent can be no other timeline: a new one's number is greater than its parent's, and a server never goes back
//! to an older one. What always holds: a fork is of one log and of the timeline that its primary writes; what is not known is left
//! out, so that nobody relies on it.

use crate::reads::position::Fork;
use crate::replica::{Lsn, SystemIdentifier, Timeline};

/// Most forks that are kept, the newest.
const MOST: usize = 6;
/// Words that forks take.
pub const WORDS: usize = 2 + 2 * MOST;

/// The forks of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forks {
    /// Whose log.
    pub system: SystemIdentifier,
    /// In the order of the timelines that began.
    list: Vec<Fork>,
}

impl Forks {
    /// None are known yet.
    #[must_use]
    pub fn new(system: SystemIdentifier) -> Self {
        Self { system, list: Vec::new() }
    }

    /// The forks known.
    #[must_use]
    pub fn list(&self) -> &[Fork] {
        &self.list
    }

    /// Adds a fork, in the place of what was known of its timeline; returns whether that is news.
    pub fn add(&mut self, fork: Fork) -> bool {
        if fork.from >= fork.to || self.list.contains(&fork) {
            return false;
        }
        self.list.retain(|known| known.to != fork.to);
        self.list.push(fork);
        self.list.sort_by_key(|fork| fork.to);
        self.list.drain(..self.list.len().saturating_sub(MOST));
        self.list.contains(&fork)
    }

    /// Returns the words for them.
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let pairs = self.list.iter().flat_map(|fork| [u64::from(fork.from.0) << 32 | u64::from(fork.to.0), fork.at.0]);
        let all = [1 | (self.list.len() as u64) << 8, self.system.0].into_iter().chain(pairs);
        words.iter_mut().zip(all).for_each(|(word, value)| *word = value);
        words
    }

    /// Returns what the words stand for; `None` if they are not of forks.
    #[must_use]
    pub fn of_words(words: &[u64; WORDS]) -> Option<Self> {
        let [head, system, pairs @ ..] = words;
        let count = usize::try_from(head >> 8).ok().filter(|count| head & 1 == 1 && *count <= MOST)?;
        let fork = |pair: &[u64]| match pair {
            [timelines, at] => {
                Some(Fork { from: Timeline((timelines >> 32) as u32), to: Timeline(*timelines as u32), at: Lsn(*at) })
            }
            _ => None,
        };
        let list = pairs.chunks_exact(2).take(count).map(fork).collect::<Option<_>>()?;
        Some(Self { system: SystemIdentifier(*system), list })
    }
}

/// The forks that led to a timeline, by its history file; none if that is not one.
///
/// Source: Postgres' timeline.c: a line for each parent with its number and the place where it was left; comments after `#`.
#[must_use]
pub fn of_history_file(text: &str, timeline: Timeline) -> Vec<Fork> {
    let parent = |line: &str| {
        let mut fields = line.split_whitespace();
        Some((Timeline(fields.next()?.parse().ok()?), Lsn::parse(fields.next()?)?))
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let Some(parents) = lines.map(parent).collect::<Option<Vec<_>>>() else { return Vec::new() };
    let children = parents.iter().skip(1).map(|parent| parent.0).chain([timeline]);
    let forks: Vec<_> =
        parents.iter().zip(children).map(|((from, at), to)| Fork { from: *from, to, at: *at }).collect();
    match forks.iter().all(|fork| fork.from < fork.to) {
        true => forks,
        false => Vec::new(),
    }
}

/// A server that was in recovery when it last answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovering {
    /// Whose log it replayed.
    pub system: SystemIdentifier,
    /// A timeline that it was on; it may have gone on to a later one since.
    pub timeline: Timeline,
}

impl Recovering {
    /// The fork that it has made, if it now writes `timeline` and its recovery ended at `ended`. It must be known not to have been
    /// restarted in between.
    #[must_use]
    pub fn promoted(self, system: SystemIdentifier, timeline: Timeline, ended: Lsn) -> Option<Fork> {
        // One that was left out may be its parent.
        let is_next = self.system == system && self.timeline.0.checked_add(1) == Some(timeline.0);
        is_next.then_some(Fork { from: self.timeline, to: timeline, at: ended })
    }
}
