//! Every interleaving of a move with writers, crashes and a cancel, over a model of two rows.
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

type Rows = [Option<u8>; ROWS];
/// Takes a safeguard away.
type Harm = fn(World) -> World;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct World {
    state: State,
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
    /// Rows below were copied.
    watermark: usize,
    fenced: bool,
    /// Actions of the step under way that were taken.
    action: u8,
    /// What clients were told.
    truth: Rows,
    writes: u8,
    crashes: u8,
    cancelled: bool,
}

const START: World = World {
    state: State::Planned,
    flipped: false,
    source: [Some(0), Some(0)],
    target: [None; ROWS],
    hidden_on_source: false,
    hidden_on_target: false,
    logging: false,
    log: [false; ROWS],
    watermark: 0,
    fenced: false,
    action: 0,
    truth: [Some(0), Some(0)],
    writes: 0,
    crashes: 0,
    cancelled: false,
};

impl World {
    fn go(&mut self, event: Event) {
        self.state = self.state.after(event).expect("the mover knows the order");
        self.action = 0;
    }

    /// The mover's next action.
    fn step(mut self) -> Option<Self> {
        if self.cancelled && self.state.can_cancel() {
            self.fenced = false;
            self.go(Event::Cancel);
            return Some(self);
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
            (State::Verifying, _) if self.log == [false; ROWS] => {
                assert_eq!(self.source, self.target, "found by the comparison");
                self.go(Event::Verified);
            }
            (State::Verifying, _) => self.take_over(),
            (State::Fencing, 0) => {
                self.fenced = true;
                self.action = 1;
            }
            (State::Fencing, 1) if self.log != [false; ROWS] => self.take_over(),
            (State::Fencing, 1) => self.action = 2,
            // One local transaction.
            (State::Fencing, _) => {
                self.flipped = true;
                self.hidden_on_target = false;
                self.hidden_on_source = true;
                self.fenced = false;
                self.go(Event::Flip);
            }
            (State::Flipped, _) => self.go(Event::Released),
            (State::Cleaning, 0) => {
                self.logging = false;
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
                self.logging = false;
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

    fn apply(&mut self, then: Event) {
        match self.log == [false; ROWS] {
            true => self.go(then),
            false => self.take_over(),
        }
    }

    /// One change is written on the target; only then it is forgotten.
    fn take_over(&mut self) {
        let row = self.log.iter().position(|changed| *changed).expect("there is one");
        if self.target[row] == self.source[row] {
            self.log[row] = false;
        } else {
            self.target[row] = self.source[row];
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

    fn cancel(mut self) -> Option<Self> {
        (!std::mem::replace(&mut self.cancelled, true)).then_some(self)
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
        writes.chain([self.step(), self.crash(), self.cancel(), self.lift()]).flatten().collect()
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
        assert_eq!(self.flipped, self.state.is_flipped(), "one owner: {self:?}");
        match self.state {
            State::Done => assert_eq!((self.source, self.hidden_on_source, self.logging), ([None; ROWS], false, false)),
            State::RolledBack => {
                assert_eq!((self.target, self.hidden_on_target, self.logging), ([None; ROWS], false, false));
            }
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
}

/// With each safeguard taken away, the exploration finds the harm.
#[test]
fn the_model_notices_what_it_is_for() {
    let harms: [(&str, Harm); 3] = [
        ("the target's rows are not hidden", |world| World { hidden_on_target: false, ..world }),
        ("changes are not logged", |world| World { logging: false, ..world }),
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
    let taken = |state: State| Event::ALL.iter().filter(|event| state.after(**event).is_ok()).count();
    let table = [
        (State::Planned, 2),
        (State::Prechecked, 2),
        (State::Copying, 2),
        (State::CatchingUp, 3),
        (State::Verifying, 2),
        (State::Fencing, 3),
        (State::Flipped, 1),
        (State::Cleaning, 1),
        (State::Done, 0),
        (State::RollingBack, 1),
        (State::RolledBack, 0),
    ];
    assert_eq!(table.len(), State::ALL.len());
    for (state, want) in table {
        assert_eq!(taken(state), want, "{state}");
        assert_eq!(state.is_over(), want == 0, "{state}");
        assert_eq!(State::parse(state.as_str()), Some(state));
    }
    let refused = Refused { state: State::Flipped, event: Event::Cancel };
    assert_eq!(State::Flipped.after(Event::Cancel), Err(refused));
    assert_eq!(refused.to_string(), "a move that is flipped cannot take \"cancel\"");
    assert_eq!(State::parse("moving"), None);
    assert!(Event::ALL.iter().all(|event| Event::parse(event.as_str()) == Some(*event)));
}
