//! A shard that is watched: its primary, its replicas, and what follows from their answers.
//!
//! Decides when the primary is to be looked for anew, and which forks of its log are known. What always holds: replicas are judged by
//! the history of the primary that answers, and by that alone; a fork that a replica has made counts once the primary is that very
//! process.

use std::time::{Duration, Instant};

use pgrx::prelude::*;
use shardmap_core::lag::forks::Forks;
use shardmap_core::lag::history::{History, Kept};
use shardmap_core::lag::judge::{self, Asked};
use shardmap_core::lag::summary::{news, Summary};
use shardmap_core::lag::tracker::{Sample, Tracker};
use shardmap_core::reads::position::Fork;
use shardmap_core::replica::{Invalid, Observation, Standing, SystemIdentifier, Timeline};

use super::roster::{Replica, Shard};
use super::sampler::{in_transaction, Yield};
use super::watched::Watched;
use super::{keep, shared};
use crate::pg::clock::moment as now;

/// A primary that was seen so long ago is where it was.
const FRESH: Duration = Duration::from_secs(3);
/// Between two places of a primary that are kept.
const KEEP: Duration = Duration::from_secs(60);

/// A shard, watched.
pub struct Group {
    pub primary: Watched,
    history: Option<History>,
    forks: Option<Forks>,
    /// What an earlier sampler has kept of the primary.
    kept: Vec<Kept>,
    kept_forks: Vec<(SystemIdentifier, Fork)>,
    /// When a place of the primary was last kept.
    kept_at: Option<Instant>,
    pub replicas: Vec<Follower>,
}

/// A replica, watched.
pub struct Follower {
    pub watched: Watched,
    drained: bool,
    tracker: Tracker,
    published: Option<Summary>,
    /// How often in a row it was ahead of its primary.
    ahead: u32,
    /// The session in which it turned out to follow another server.
    of_other_log: Option<u64>,
}

/// How often in a row a replica must be found ahead of its primary: a clock that was set may make it seem so once.
const AHEAD: u32 = 2;

impl Group {
    /// A shard as it is now, with what is known of it.
    pub fn new(old: Option<Self>, shard: Shard) -> Self {
        let Shard { primary, replicas } = shard;
        let mut followers = Vec::new();
        let mut group = match old {
            Some(mut group) => {
                followers = std::mem::take(&mut group.replicas);
                if !group.primary.serves(&primary) {
                    // Another primary may be another history altogether.
                    (group.primary, group.history) = (Watched::new(primary), None);
                    group.kept.clear();
                }
                group
            }
            None => Self::of_kept(Watched::new(primary)),
        };
        let replicas = replicas.into_iter().map(|replica| {
            let known = followers.iter().position(|follower| follower.watched.server.oid == replica.server.oid);
            Follower::new(known.map(|at| followers.swap_remove(at)), replica)
        });
        group.replicas = replicas.collect();
        group
    }

    fn of_kept(primary: Watched) -> Self {
        let name = primary.server.name.as_str();
        let read =
            in_transaction("reading where primaries were", || Ok((keep::places(name, now())?, keep::forks(name)?)));
        let (kept, kept_forks) = read.and_then(spi::Result::ok).unwrap_or_default();
        Self { primary, history: None, forks: None, kept, kept_forks, kept_at: None, replicas: Vec::new() }
    }

    /// Judges what has come, and publishes.
    pub fn look(&mut self, interval: Duration, found: &mut Yield) {
        let patience = interval.max(Duration::from_secs(1));
        if let Some(asked) = self.primary.heard(patience) {
            self.remember(&asked);
            self.replicas.iter_mut().for_each(|follower| follower.compare(&asked));
            let observation = judge::primary(&asked, &mut self.history);
            self.primary.observe(observation);
            self.keep(found);
        }
        let history = self.history.as_ref();
        let primary_seen = history.is_some_and(|history| now().since(history.last_seen()) <= FRESH);
        for follower in &mut self.replicas {
            if let Some(asked) = follower.watched.heard(patience) {
                let judged = judge::replica(&asked, history, FRESH);
                let judged = judge::of_database(judged, follower.watched.database, self.primary.database);
                let observation = follower.of_its_log(judged);
                let sample = Sample::of(&observation, primary_seen);
                let over = follower.tracker.record(asked.came, sample, interval);
                found.minutes.extend(over.map(|minute| (follower.watched.server.name.clone(), minute)));
                follower.watched.observe(observation);
            }
            follower.publish(&self.primary.server.name, found);
        }
        publish(&self.primary, None);
        if self.learn() {
            found.forks.extend(self.forks.clone().map(|forks| (self.primary.server.name.clone(), forks)));
        }
        if let Some(forks) = &self.forks {
            shared::publish_forks(self.primary.server.oid, forks);
        }
        self.look_for_primary();
    }

    /// Begins with what was kept, at the first answer of the primary.
    fn remember(&mut self, asked: &Asked) {
        let Ok(answer) = asked.heard else { return };
        if self.history.is_none() && !answer.in_recovery {
            let kept = std::mem::take(&mut self.kept);
            self.history = answer.timeline.and_then(|timeline| History::restored(&kept, answer.system, timeline));
        }
    }

    /// Keeps a place of the primary, once in a while.
    fn keep(&mut self, found: &mut Yield) {
        if self.kept_at.is_none_or(|at| at.elapsed() >= KEEP) {
            let place = self.history.as_ref().and_then(History::kept);
            self.kept_at = place.map(|_| Instant::now());
            found.places.extend(place.map(|place| (self.primary.server.name.clone(), place)));
        }
    }

    /// Notes the forks of the primary's log; whether there are new ones.
    fn learn(&mut self) -> bool {
        let last = &self.primary.last;
        let Some((system, timeline)) = last.system.zip(last.timeline).filter(|_| last.standing == Standing::Primary)
        else {
            return false;
        };
        let mut forks = self.forks.take().filter(|forks| forks.system == system).unwrap_or_else(|| {
            let mut forks = Forks::new(system);
            let own = self.kept_forks.iter().filter(|(of, _)| *of == system);
            own.for_each(|(_, fork)| {
                forks.add(*fork);
            });
            forks
        });
        let is_it = |watched: &Watched, started: &Option<String>| {
            started.is_some() && *started == self.primary.started && watched.last.timeline == Some(timeline)
        };
        let all = self.replicas.iter().map(|follower| &follower.watched).chain([&self.primary]);
        let made = all.filter_map(|watched| {
            let (fork, of, started) = watched.made.as_ref()?;
            (*of == system && fork.to == timeline && is_it(watched, started)).then_some(*fork)
        });
        let is_new: Vec<bool> = made.chain(self.primary.told.iter().copied()).map(|fork| forks.add(fork)).collect();
        self.forks = Some(forks);
        is_new.contains(&true)
    }

    /// Connects anew where the primary's server is none, or a former one: a list of hosts may lead to another one by now.
    fn look_for_primary(&mut self) {
        let last = &self.primary.last;
        let newest = self.newest(last.system);
        let is_former = last.timeline.is_some_and(|timeline| newest.is_some_and(|newest| newest > timeline));
        match last.standing {
            Standing::Unknown(_) => {}
            Standing::Primary if !is_former => self.primary.is_right(),
            _ => self.primary.redial(),
        }
    }

    /// The newest timeline of the log that a replica was just heard of on.
    fn newest(&self, system: Option<SystemIdentifier>) -> Option<Timeline> {
        let followers = self.replicas.iter().map(|follower| &follower.watched.last);
        followers.filter(|last| system.is_some() && last.system == system).filter_map(|last| last.timeline).max()
    }
}

impl Follower {
    fn new(known: Option<Self>, replica: Replica) -> Self {
        let past = || {
            let name = replica.server.name.as_str();
            let read = in_transaction("reading earlier minutes", || keep::read(name, now()));
            read.and_then(Result::ok).unwrap_or_default()
        };
        let mut follower = match known {
            Some(mut known) => {
                if known.tracker.objective() != replica.objective.as_ref() {
                    known.tracker.set_objective(replica.objective);
                    let mut minutes = past();
                    minutes.push(known.tracker.minute().clone());
                    known.tracker.restore_budget(&minutes);
                }
                known
            }
            None => {
                let mut tracker = Tracker::new(now(), replica.objective);
                tracker.restore(&past());
                let watched = Watched::new(replica.server);
                return Self {
                    watched,
                    drained: replica.drained,
                    tracker,
                    published: None,
                    ahead: 0,
                    of_other_log: None,
                };
            }
        };
        follower.drained = replica.drained;
        if !follower.watched.serves(&replica.server) {
            follower.watched = Watched::new(replica.server);
        }
        follower
    }

    /// Compares it with where its primary is later.
    fn compare(&mut self, primary: &Asked) {
        match judge::is_ahead(&self.watched.last, primary) {
            true => self.ahead += 1,
            false => self.ahead = 0,
        }
        if self.ahead >= AHEAD {
            self.of_other_log = self.watched.line().session();
        }
    }

    /// A replica as judged, unless it was found to follow another server since it was connected to.
    fn of_its_log(&self, judged: Observation) -> Observation {
        let is_other = self.of_other_log.is_some() && self.of_other_log == self.watched.line().session();
        match judged.standing {
            Standing::Replica { .. } | Standing::Unknown(_) if is_other => {
                Observation { standing: Standing::Invalid(Invalid::OtherLog), behind: None, ..judged }
            }
            _ => judged,
        }
    }

    fn publish(&mut self, shard: &str, found: &mut Yield) {
        let summary = self.tracker.summary(now(), self.drained);
        self.watched.last.rotation = summary.state.rotation;
        publish(&self.watched, Some(&summary));
        let name = &self.watched.server.name;
        found.payloads.extend(news(shard, name, self.published.as_ref(), &summary));
        self.published = Some(summary);
    }
}

fn publish(watched: &Watched, summary: Option<&Summary>) {
    if !shared::publish(watched.server.oid, &watched.last, summary) {
        debug1!("no room to publish what is known of server \"{}\"", watched.server.name);
    }
}
