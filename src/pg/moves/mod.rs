//! Moves: what their SQL needs of Rust. The steps are in `sql/moves_steps.sql`, the order of states in the core.
//!
//! Crash points of a move, in their order: `move_hidden`, `move_logging`, `move_batch:N` (before the N-th batch of this
//! session is committed), `move_copied`, `move_caught_up`, `move_verified`, `move_logging_back`, `move_fenced`,
//! `move_flip` (before it is committed), `move_flipped`, `move_reversed`, `move_cleaning:N`, `move_done`, `move_rollback:N`. With
//! engine logical, `move_subscribing` comes before `move_logging`; `move_unsubscribe`, `move_unsubscribing` and `move_unsubscribed`
//! are where the subscription goes, after the flip or when the move is given up.

mod hold;
pub mod launch;
mod pace;
mod settings;
mod worker;

use std::cell::RefCell;
use std::collections::HashMap;

use pgrx::prelude::*;
use shardmap_core::reshard::{Event, State};

use super::error::Refusal;
use super::remote::{crash, Result};

/// Defines settings, and sees to locks. Once per process.
pub fn init() {
    settings::init();
    hold::init();
}

thread_local! {
    /// How often each crash point was met in this session.
    static MET: RefCell<HashMap<String, usize>> = RefCell::default();
}

fn state(name: &str) -> State {
    let unknown =
        || Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, format!("no such state: \"{name}\""));
    State::parse(name).unwrap_or_else(|| unknown().raise())
}

/// Whether a move in this state can be given up, or its way back.
#[pg_extern(sql = false)]
fn can_cancel_move(name: &str, reversed: bool) -> bool {
    state(name).can_cancel(reversed) || state(name).can_turn_forward(reversed)
}

/// Whether the step of this state needs one snapshot of the source.
#[pg_extern(sql = false)]
fn move_needs_snapshot(name: &str) -> bool {
    state(name).needs_snapshot()
}

/// The state of a move after an event; an error if it does not belong to the state.
#[pg_extern(sql = false)]
fn next_move_state(state: &str, event: &str, reversed: bool) -> &'static str {
    after(state, event, reversed).0.as_str()
}

/// Whether a move is on its way back after an event; an error as above.
#[pg_extern(sql = false)]
fn is_move_reversed(state: &str, event: &str, reversed: bool) -> bool {
    after(state, event, reversed).1
}

fn after(state: &str, event: &str, reversed: bool) -> (State, bool) {
    let (Some(from), Some(event)) = (State::parse(state), Event::parse(event)) else {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
            format!("no such step: \"{event}\" of \"{state}\""),
        )
        .raise()
    };
    from.after(event, reversed).unwrap_or_else(|refused| {
        let hint = match (from, event) {
            (State::Flipped, Event::Cancel) => "shardmap.rollback_move() takes it back, until its source is cleaned.",
            _ => "See shardmap.moves for its state.",
        };
        Refusal::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, refused.to_string()).hint(hint).raise()
    })
}

/// Breaks at the crash point `name`, if `shardmap.crash_point` says so.
pub fn crash_here(name: &str) -> Result<()> {
    let time = MET.with_borrow_mut(|met| {
        let time = met.entry(name.to_owned()).or_insert(0);
        *time += 1;
        *time
    });
    crash::before_commit(name, time)
}
