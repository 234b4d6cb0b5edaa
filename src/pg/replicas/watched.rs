//! One server that is watched: its line, its last observation, and a replica's statistics.
//!
//! What always holds: what is published is either an answer judged, or says why there is none; a server that is slow is not asked again before it
//! has answered or was given up.

use std::time::{Duration, Instant};

use pgrx::prelude::*;
use shardmap_core::lag::forks::Recovering;
use shardmap_core::lag::judge::Asked;
use shardmap_core::reads::position::Fork;
use shardmap_core::replica::{Observation, Standing, SystemIdentifier, Unknown};

use super::question::{self, Said};
use super::roster::Server;
use crate::pg::clock::moment as now;
use crate::pg::encoding;
use crate::pg::remote::line::Line;
use crate::pg::remote::Failure;

/// A question that is on its way so long is given up, with its connection.
const HANG: Duration = Duration::from_secs(10);

/// A connection to a server that is not what it should be is made anew after this time, and after twice as long each time again.
const REDIAL: Duration = Duration::from_secs(1);
const LAST_REDIAL: Duration = Duration::from_secs(30);

/// How long the first connection may take before the server counts as not reachable.
const FIRST: Duration = Duration::from_secs(5);

pub struct Watched {
    pub server: Server,
    line: Line,
    /// What came since the last look.
    came: Option<Asked>,
    /// Since when it is neither heard of nor known to be lost.
    silent_since: Option<Instant>,
    pub last: Observation,
    /// Why it was last not heard of, for the log.
    trouble: Option<String>,
    /// It was in recovery when it last answered, on this session.
    recovering: Option<(u64, Recovering)>,
    /// The last fork that it has made, and of which log; and when it had been started then.
    pub made: Option<(Fork, SystemIdentifier, Option<String>)>,
    /// The forks that led to where it is.
    pub told: Vec<Fork>,
    /// When it was started.
    pub started: Option<String>,
    /// The number of its database.
    pub database: Option<u32>,
    /// When it was last connected to anew on purpose, and the pause before the next time.
    redialed: Option<(Instant, Duration)>,
}

impl Watched {
    pub fn new(server: Server) -> Self {
        let line = Line::new(server.targets.clone(), question::questions());
        let last = Observation::unknown(now(), Unknown::NotAsked);
        Self {
            server,
            line,
            came: None,
            silent_since: None,
            last,
            trouble: None,
            recovering: None,
            made: None,
            told: Vec::new(),
            started: None,
            database: None,
            redialed: None,
        }
    }

    /// Whether this is the same server, reached in the same ways.
    pub fn serves(&self, server: &Server) -> bool {
        self.server.oid == server.oid && self.server.name == server.name && self.line.serves(&server.targets)
    }

    /// Asks, unless the last question is still on its way.
    pub fn ask(&mut self) {
        if self.line.waiting_since().is_some_and(|since| since.elapsed() >= HANG) {
            self.line.hang_up();
            self.silent(Unknown::NoAnswer, None);
            return;
        }
        self.silent_since.get_or_insert_with(Instant::now);
        let asked = self.line.ask();
        self.take(asked.map(|()| None));
    }

    /// Goes on without waiting.
    pub fn step(&mut self) {
        let stepped = self.line.step();
        self.take(stepped);
    }

    fn take(&mut self, outcome: Result<Option<(crate::pg::remote::line::Row, Instant)>, Failure>) {
        match outcome {
            Ok(None) => {}
            Ok(Some((row, since))) => {
                let came = now();
                let sent = came.minus(since.elapsed());
                self.silent_since = None;
                match question::read(&row) {
                    Some(said) => {
                        self.came = Some(Asked { sent, came, heard: Ok(said.answer) });
                        self.note_forks(said);
                    }
                    None => self.silent(Unknown::Refused, None),
                }
            }
            Err(failure) => {
                let class = failure.code.text();
                let is_lost = class.starts_with("08") || class.starts_with("57");
                let why = if is_lost { Unknown::Unreachable } else { Unknown::Refused };
                self.silent(why, Some(encoding::message(failure.to_text())));
            }
        }
    }

    fn note_forks(&mut self, said: Said) {
        let Said { answer, recovery_ended, started, database, forks } = said;
        let known = answer.system.zip(answer.timeline);
        let session = self.line.session();
        if let Some((system, timeline)) = known.filter(|_| !answer.in_recovery) {
            let before = self.recovering.take().filter(|(own, _)| Some(*own) == session);
            let made = before.zip(recovery_ended).and_then(|((_, was), at)| was.promoted(system, timeline, at));
            self.made = made.map(|fork| (fork, system, started.clone())).or(self.made.take());
        }
        if answer.in_recovery {
            self.recovering =
                session.zip(known).map(|(session, (system, timeline))| (session, Recovering { system, timeline }));
        }
        (self.told, self.started, self.database) = (forks, started, database);
    }

    /// Connects anew with the next question, since another server may be the one that is wanted, unless it has just done so.
    pub fn redial(&mut self) {
        let pause = match self.redialed {
            Some((when, pause)) if when.elapsed() < pause => return,
            Some((_, pause)) => (2 * pause).min(LAST_REDIAL),
            None => REDIAL,
        };
        self.redialed = Some((Instant::now(), pause));
        self.line.hang_up();
    }

    /// The server is the one that is wanted.
    pub fn is_right(&mut self) {
        self.redialed = None;
    }

    fn silent(&mut self, why: Unknown, trouble: Option<String>) {
        let now = now();
        (self.silent_since, self.trouble) = (None, trouble);
        self.came = Some(Asked { sent: now, came: now, heard: Err(why) });
    }

    pub fn line(&self) -> &Line {
        &self.line
    }

    /// What came, or that nothing has come for too long; `None`: wait.
    pub fn heard(&mut self, patience: Duration) -> Option<Asked> {
        let is_new = self.last.standing == Standing::Unknown(Unknown::NotAsked);
        let patience = if is_new { patience.max(FIRST) } else { patience };
        let late = || {
            let since = self.silent_since?;
            let why = if self.line.is_connected() { Unknown::NoAnswer } else { Unknown::Unreachable };
            let now = now();
            (since.elapsed() >= patience).then_some(Asked { sent: now, came: now, heard: Err(why) })
        };
        self.came.take().or_else(late)
    }

    /// Takes an observation, and says in the log if the server stands otherwise than before.
    pub fn observe(&mut self, observation: Observation) {
        let kind = |standing: Standing| match standing {
            Standing::Primary => "answers as a primary".to_owned(),
            Standing::Replica { .. } => "answers as a replica".to_owned(),
            Standing::Unknown(why) => format!("state is unknown: {}", why.text()),
            Standing::Invalid(why) => format!("is not to be read from: {}", why.text()),
        };
        let (before, after) = (kind(self.last.standing), kind(observation.standing));
        if before != after {
            let name = encoding::message(self.server.name.clone());
            let trouble = self.trouble.take().map(|text| format!("\n{text}")).unwrap_or_default();
            log!("server \"{name}\" {after}{trouble}");
        }
        self.last = observation;
    }
}
