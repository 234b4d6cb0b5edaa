//! A simulated cluster: whoever reads with what he has seen never reads behind it, and without it he does.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that fails here has failed

mod common;

use std::time::Duration;

use common::random::Random;
use shardmap_core::reads::choice::{choose, Admission, Candidate, Heard, Preference, Want, OBSERVATIONS_HOLD};
use shardmap_core::reads::position::{Lsn, Position, Timeline};
use shardmap_core::reads::token::{Mark, System};

const MS: Duration = Duration::from_millis(1);

fn at(lsn: u64) -> Position {
    Position { timeline: Timeline(1), lsn: Lsn(lsn) }
}

fn server(server: u32, lsn: u64, age: Duration) -> Candidate<'static> {
    let in_recovery = server > 0;
    let heard = Heard { system: System(7), position: at(lsn), in_recovery, lag: Some(MS), round_trip: Some(MS), age };
    let admission = Admission::All;
    Candidate { server, is_primary: !in_recovery, weight: 1.0, zone: "", admission, heard: Some(heard), may_ask: true }
}

/// A primary and two replicas that stop and go at random, sampled once in a while; users who write, take the primary's
/// position, and read with it later. Time is in ticks of a millisecond.
struct World {
    random: Random,
    now: u64,
    written: u64,
    replayed: [u64; 2],
    stopped: [bool; 2],
    samples: [(u64, u64); 2],
    users: Vec<u64>,
    /// Reads that found less than their user had seen, those that replicas served, and all.
    stale: usize,
    served: usize,
    reads: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            now: 0,
            written: 1,
            replayed: [1; 2],
            stopped: [false; 2],
            samples: [(0, 1); 2],
            users: vec![0; 20],
            stale: 0,
            served: 0,
            reads: 0,
        }
    }

    fn tick(&mut self, with_token: bool) {
        self.now += 1;
        for replica in 0..2 {
            if self.random.below(500) == 0 {
                self.stopped[replica] ^= true;
            }
            if !self.stopped[replica] {
                let ahead = self.written - self.replayed[replica];
                self.replayed[replica] += ahead.min(1 + self.random.below(3));
            }
            if self.now.is_multiple_of(1000) {
                self.samples[replica] = (self.now, self.replayed[replica]);
            }
        }
        let user = self.random.below(20) as usize;
        if self.random.below(10) == 0 {
            self.written += 1;
            self.users[user] = self.written;
        } else {
            self.read(user, with_token);
        }
    }

    fn read(&mut self, user: usize, with_token: bool) {
        let candidate =
            |number: u32, (when, lsn): (u64, u64)| server(number, lsn, Duration::from_millis(self.now - when));
        let servers = [server(0, 1, MS), candidate(1, self.samples[0]), candidate(2, self.samples[1])];
        let seen = self.users[user];
        let token = with_token.then(|| Mark { system: System(7), position: at(seen) });
        let want = Want {
            preference: Preference::PreferReplica,
            heard_within: OBSERVATIONS_HOLD,
            max_lag: None,
            token,
            floor: None,
            last: None,
            lost: &[],
            zone: "",
            may_ask: true,
        };
        let decision = choose(&servers, &want, &[], self.random.pair());
        self.reads += 1;
        // Past the wait, the primary.
        let caught_up = |server: usize, wanted: Position| self.replayed[server - 1] >= wanted.lsn.0;
        let server = decision.server.unwrap() as usize;
        let is_behind = server > 0 && decision.ask.is_some_and(|wanted| !caught_up(server, wanted));
        let found = if server == 0 || is_behind { self.written } else { self.replayed[server - 1] };
        self.served += usize::from(server > 0 && !is_behind);
        self.stale += usize::from(found < seen);
        self.users[user] = self.users[user].max(found);
    }
}

#[test]
fn in_a_simulated_cluster_nobody_sees_time_run_backwards() {
    for seed in 0..8 {
        let mut world = World::new(seed);
        (0..50_000).for_each(|_| world.tick(true));
        assert_eq!(world.stale, 0, "seed {seed}");
        assert!(world.served * 3 > world.reads, "seed {seed}: {} of {} served by replicas", world.served, world.reads);
        let mut world = World::new(seed);
        (0..50_000).for_each(|_| world.tick(false));
        assert!(world.stale > 0, "seed {seed}: without tokens nothing was stale, so this proves nothing");
    }
}
