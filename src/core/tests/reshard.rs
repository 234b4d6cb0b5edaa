//! Every interleaving of a move with writers, crashes, a cancel and a way back, over a model of two rows.
//!
//! The model holds what is durable: the state, the map, both shards' rows, what is hidden, the log of changes, and how far
//! rows and changes were taken over. A step of the mover is several actions, each durable by itself, as the commits on
//! two shards and here are; a crash loses which of them were taken, and the step is taken anew. All states that can be
//! reached are visited; in each, what a reader sees is what was written.

#![allow(clippy::indexing_slicing, clippy::expect_used)] // the rows are two

use std::collections::HashSet;

use shardmap_core::reshard::{Event, Refused, State};

const ROWS: usize = 2;
/// Writes in one history.
const WRITES: u8 = 3;
/// Crashes in one history.
const CRASHES: u8 = 2;
/// Wishes in one history: to cancel, or to have back what has moved.
const WISHES: u8 = 3;

type Rows = [Option<u8>; ROWS];
/// Takes a safeguard away.
type Harm = fn(World) -> World;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Wish {
    Cancel,
    Back,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct World {
    state: State,
    /// On its way back.
    reversed: bool,
    /// The map names the target.
    flipped: bool,
    source: Rows,
    target: Rows,
    hidden_on_source: bool,
    hidden_on_target: bool,
    /// Triggers are there.
    logging: bool,
    /// Rows with changes that were not taken over.
    log: [bool; ROWS],
    /// The same on the target, for the way back.
    logging_back: bool,
    log_back: [bool; ROWS],
    /// Rows below were copied.
    watermark: usize,
    fenced: bool,
    /// Actions of the step under way that were taken.
    action: u8,
    /// What clients were told.
    truth: Rows,
    writes: u8,
    crashes: u8,
    wish: Option<Wish>,
    wishes: u8,
}

const START: World = World {
    state: State::Planned,
    reversed: false,
    flipped: false,
    source: [Some(0), Some(0)],
    target: [None; ROWS],
    hidden_on_source: false,
    hidden_on_target: false,
    logging: false,
    log: [false; ROWS],
    logging_back: false,
    log_back: [false; ROWS],
    watermark: 0,
    fenced: false,
    action: 0,
    truth: [Some(0), Some(0)],
    writes: 0,
    crashes: 0,
    wish: None,
    wishes: 0,
};

impl World {
    fn go(&mut self, event: Event) {
        (self.state, self.reversed) = self.state.after(event, self.reversed).expect("the mover knows the order");
        self.action = 0;
    }

    /// The mover's next action.
    fn step(mut self) -> Option<Self> {
        match self.wish {
            Some(Wish::Cancel) => {
                self.wish = None;
                self.fenced = false;
                self.go(Event::Cancel);
                return Some(self);
            }
            Some(Wish::Back) => {
                self.wish = None;
                self.go(Event::Reverse);
                return Some(self);
            }
            None => {}
        }
        match (self.state, self.action) {
            (State::Planned, _) => self.go(Event::Checked),
            (State::Prechecked, 0) => {
                self.hidden_on_target = true;
                self.action = 1;
            }
            (State::Prechecked, _) => {
                self.logging = true;
                self.go(Event::Prepared);
            }
            // What was copied beyond the watermark before a crash goes first.
            (State::Copying, 0) => {
                self.target[self.watermark..].fill(None);
                self.action = 1;
            }
            (State::Copying, 1) => {
                self.target[self.watermark] = self.source[self.watermark];
                // What the copy's snapshot has seen need not be applied; what comes after it must.
                self.log[self.watermark] = false;
                self.action = 2;
            }
            (State::Copying, _) => {
                self.watermark += 1;
                self.action = 0;
                if self.watermark == ROWS {
                    self.go(Event::Copied);
                }
            }
            (State::CatchingUp, _) => self.apply(Event::CaughtUp),
            (State::Verifying, _) if !self.has_changes() => {
                assert_eq!(self.source, self.target, "found by the comparison");
                self.go(Event::Verified);
            }
            (State::Verifying, _) => self.take_over(),
            (State::Fencing, 0) if !self.logging_back => self.logging_back = true,
            (State::Fencing, 0) => {
                self.fenced = true;
                self.action = 1;
            }
            (State::Fencing, 1) if self.has_changes() => self.take_over(),
            (State::Fencing, 1) => self.action = 2,
            // One local transaction.
            (State::Fencing, _) => {
                self.flipped = !self.reversed;
                self.hidden_on_target = self.reversed;
                self.hidden_on_source = !self.reversed;
                self.fenced = false;
                self.go(Event::Flip);
            }
            (State::Flipped, _) => self.go(Event::Released),
            (State::Cleaning, 0) => {
                (self.logging, self.logging_back) = (false, false);
                self.action = 1;
            }
            (State::Cleaning, row @ 1..=2) => {
                assert!(self.flipped, "the map says that the source owns the rows");
                self.source[usize::from(row) - 1] = None;
                self.action += 1;
            }
            (State::Cleaning, _) => {
                self.hidden_on_source = false;
                self.go(Event::Cleaned);
            }
            (State::RollingBack, 0) => {
                (self.logging, self.logging_back) = (false, false);
                self.action = 1;
            }
            (State::RollingBack, row @ 1..=2) => {
                assert!(!self.flipped);
                self.target[usize::from(row) - 1] = None;
                self.action += 1;
            }
            (State::RollingBack, _) => {
                self.hidden_on_target = false;
                self.go(Event::Cleaned);
            }
            (State::Done | State::RolledBack, _) => return None,
        }
        Some(self)
    }

    fn has_changes(&self) -> bool {
        [self.log, self.log_back][usize::from(self.reversed)] != [false; ROWS]
    }

    fn apply(&mut self, then: Event) {
        match self.has_changes() {
            false => self.go(then),
            true => self.take_over(),
        }
    }

    /// One change is written on the other shard; only then it is forgotten.
    fn take_over(&mut self) {
        let (from, to, log) = match self.reversed {
            false => (self.source, &mut self.target, &mut self.log),
            true => (self.target, &mut self.source, &mut self.log_back),
        };
        let row = log.iter().position(|changed| *changed).expect("there is one");
        if to[row] == from[row] {
            log[row] = false;
        } else {
            to[row] = from[row];
            // The triggers of the other side see it as well.
            match self.reversed {
                false => self.log_back[row] |= self.logging_back,
                true => self.log[row] |= self.logging,
            }
        }
    }

    /// A client's write of one row: an update, a delete, an insert.
    fn write(mut self, row: usize, value: Option<u8>) -> Option<Self> {
        if self.fenced || self.writes == WRITES {
            return None;
        }
        self.writes += 1;
        self.truth[row] = value;
        if self.flipped {
            self.target[row] = value;
            self.log_back[row] |= self.logging_back;
        } else {
            self.source[row] = value;
            self.log[row] |= self.logging;
        }
        Some(self)
    }

    /// The mover dies, and the fence with it: it is a lock.
    fn crash(mut self) -> Option<Self> {
        if self.crashes == CRASHES {
            return None;
        }
        self.crashes += 1;
        self.action = 0;
        self.fenced = false;
        Some(self)
    }

    /// A wish is refused where it comes too late.
    fn ask(mut self, wish: Wish) -> Option<Self> {
        let event = if wish == Wish::Cancel { Event::Cancel } else { Event::Reverse };
        if self.wishes == WISHES || self.wish.is_some() || self.state.after(event, self.reversed).is_err() {
            return None;
        }
        self.wishes += 1;
        self.wish = Some(wish);
        Some(self)
    }

    /// The fence's time is over.
    fn lift(mut self) -> Option<Self> {
        (self.state == State::Fencing && std::mem::replace(&mut self.fenced, false)).then(|| {
            self.go(Event::FellBehind);
            self
        })
    }

    fn next(self) -> Vec<Self> {
        let writes = (0..ROWS).flat_map(|row| [self.write(row, None), self.write(row, Some(self.writes + 1))]);
        writes
            .chain([self.step(), self.crash(), self.ask(Wish::Cancel), self.ask(Wish::Back), self.lift()])
            .flatten()
            .collect()
    }

    fn check(&self) {
        for row in 0..ROWS {
            let seen: Vec<u8> = [
                self.source[row].filter(|_| !self.hidden_on_source),
                self.target[row].filter(|_| !self.hidden_on_target),
            ]
            .into_iter()
            .flatten()
            .collect();
            assert_eq!(seen, self.truth[row].into_iter().collect::<Vec<_>>(), "row {row} of {self:?}");
        }
        assert_eq!(self.flipped, self.state.is_flipped(self.reversed), "one owner: {self:?}");
        let over = (self.hidden_on_source, self.hidden_on_target, self.logging, self.logging_back);
        match self.state {
            State::Done => assert_eq!((self.source, over), ([None; ROWS], (false, false, false, false))),
            State::RolledBack => assert_eq!((self.target, over), ([None; ROWS], (false, false, false, false))),
            _ => {}
        }
    }
}

#[test]
fn readers_see_what_was_written_in_every_interleaving() {
    let mut seen = HashSet::from([START]);
    let mut open = vec![START];
    while let Some(world) = open.pop() {
        world.check();
        open.extend(world.next().into_iter().filter(|next| seen.insert(*next)));
    }
    let ends = |end| seen.iter().filter(|world| world.state == end).count();
    assert!(ends(State::Done) > 0 && ends(State::RolledBack) > 0);
    assert!(State::ALL.iter().all(|state| ends(*state) > 0), "every state was visited");
    let back = |end| seen.iter().filter(|world| world.state == end && world.reversed).count();
    assert!(back(State::Fencing) > 0 && back(State::RolledBack) > 0, "and the way back");
    let again = |world: &&World| world.state == State::Done && world.log_back != [false; ROWS];
    assert!(seen.iter().filter(again).count() > 0, "and turned forward again");
}

/// With each safeguard taken away, the exploration finds the harm.
#[test]
fn the_model_notices_what_it_is_for() {
    let harms: [(&str, Harm); 4] = [
        ("the target's rows are not hidden", |world| World { hidden_on_target: false, ..world }),
        ("changes are not logged", |world| World { logging: false, ..world }),
        ("changes after the flip are not logged", |world| World { log_back: [false; ROWS], ..world }),
        ("writers are not held off", |world| World { fenced: false, ..world }),
    ];
    for (name, harm) in harms {
        let found = std::panic::catch_unwind(|| {
            let mut seen = HashSet::from([START]);
            let mut open = vec![START];
            while let Some(world) = open.pop() {
                world.check();
                open.extend(world.next().into_iter().map(harm).filter(|next| seen.insert(*next)));
            }
        });
        assert!(found.is_err(), "{name}");
    }
}

#[test]
fn events_belong_to_states() {
    let taken =
        |state: State, reversed| Event::ALL.iter().filter(|event| state.after(**event, reversed).is_ok()).count();
    let table = [
        (State::Planned, 2),
        (State::Prechecked, 2),
        (State::Copying, 2),
        (State::CatchingUp, 3),
        (State::Verifying, 2),
        (State::Fencing, 3),
        (State::Flipped, 2),
        (State::Cleaning, 1),
        (State::Done, 0),
        (State::RollingBack, 1),
        (State::RolledBack, 0),
    ];
    assert_eq!(table.len(), State::ALL.len());
    for (state, want) in table {
        assert_eq!(taken(state, false), want, "{state}");
        assert_eq!(state.is_over(), want == 0, "{state}");
        assert_eq!(State::parse(state.as_str()), Some(state));
    }
    let refused = Refused { state: State::Flipped, event: Event::Cancel, reversed: false };
    assert_eq!(State::Flipped.after(Event::Cancel, false), Err(refused));
    assert_eq!(refused.to_string(), "a move that is flipped cannot take \"cancel\"");
    // The way back.
    assert_eq!(State::Flipped.after(Event::Reverse, false), Ok((State::CatchingUp, true)));
    assert_eq!(State::Fencing.after(Event::Flip, true), Ok((State::RollingBack, true)));
    assert_eq!(State::Verifying.after(Event::Cancel, true), Ok((State::Flipped, false)));
    for state in [State::Fencing, State::Cleaning, State::Done, State::RollingBack] {
        assert!(state.after(Event::Reverse, false).is_err(), "{state}");
    }
    let refused = State::RollingBack.after(Event::Cancel, true).expect_err("too late");
    assert_eq!(refused.to_string(), "a move that is rolling_back, on its way back, cannot take \"cancel\"");
    assert_eq!(State::parse("moving"), None);
    assert!(Event::ALL.iter().all(|event| Event::parse(event.as_str()) == Some(*event)));
}
