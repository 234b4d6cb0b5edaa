//! What the planner hook decided about a statement, carried inside its plan to executor start and EXPLAIN.
//!
//! A plan may be cached, copied and run much later, so the note travels in the plan itself: as one more string at the
//! end of postgres_fdw's private list, where postgres_fdw (which reads that list by position) does not look.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::route::Step;

use crate::pg::settings::FanoutPolicy;

/// How a statement was planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    pub step: Step,
    /// For a fan-out: why the statement could not be narrowed, as a sentence; empty otherwise.
    pub reason: String,
    /// For a fan-out: what the user can do about it.
    pub hint: String,
    /// For a fan-out: the tables concerned.
    pub tables: String,
    /// For a fan-out: how many shards are asked.
    pub shards: u32,
    /// The strictest policy that a table concerned has of its own.
    pub policy: FanoutPolicy,
}

const MARK: &str = "pg_shardmap note";
const SEPARATOR: char = '\u{1f}';

thread_local! {
    /// The statements being planned, innermost last.
    static PLANNING: RefCell<Vec<Rc<Note>>> = const { RefCell::new(Vec::new()) };
}

/// Makes `note` the note of every foreign scan planned until the guard is dropped.
pub struct Planning;

impl Planning {
    pub fn of(note: Rc<Note>) -> Self {
        PLANNING.with_borrow_mut(|stack| stack.push(note));
        Self
    }
}

impl Drop for Planning {
    fn drop(&mut self) {
        PLANNING.with_borrow_mut(Vec::pop);
    }
}

impl Note {
    /// The note of a statement of which nothing is known but its step.
    pub fn of(step: Step) -> Self {
        Self {
            step,
            reason: String::new(),
            hint: String::new(),
            tables: String::new(),
            shards: 0,
            policy: FanoutPolicy::Allow,
        }
    }

    /// The note of rows that go their own ways.
    pub fn distributed() -> Self {
        Self::of(Step::Distributed)
    }

    fn encode(&self) -> String {
        let shards = self.shards.to_string();
        [MARK, self.step.as_str(), self.policy.as_str(), &shards, &self.tables, &self.reason, &self.hint]
            .join(&SEPARATOR.to_string())
    }

    fn decode(text: &str) -> Option<Self> {
        let mut fields = text.split(SEPARATOR);
        if fields.next()? != MARK {
            return None;
        }
        Some(Self {
            step: Step::parse(fields.next()?)?,
            policy: FanoutPolicy::parse(fields.next()?)?,
            shards: fields.next()?.parse().ok()?,
            tables: fields.next()?.to_owned(),
            reason: fields.next()?.to_owned(),
            hint: fields.next()?.to_owned(),
        })
    }
}

/// Appends the note of the statement being planned, if there is one, to `private`.
///
/// # Safety
/// `private` must be a valid list or NIL, in the planner's memory context.
pub unsafe fn append(private: *mut pg_sys::List) -> *mut pg_sys::List {
    let Some(note) = PLANNING.with_borrow(|stack| stack.last().cloned()) else { return private };
    let Ok(text) = CString::new(note.encode()) else { return private };
    let string = pg_sys::makeString(pg_sys::pstrdup(text.as_ptr()));
    pg_sys::lappend(private, string.cast())
}

/// Reads the note at the end of `private`.
///
/// # Safety
/// `private` must be a valid list or NIL.
pub unsafe fn read(private: *const pg_sys::List) -> Option<Note> {
    let last = last_string(private)?;
    Note::decode(last.to_str().ok()?)
}

/// `private` without its note, as postgres_fdw made it.
///
/// # Safety
/// `private` must be a valid list or NIL.
pub unsafe fn without(private: *mut pg_sys::List) -> *mut pg_sys::List {
    match last_string(private) {
        Some(text) if text.to_bytes().starts_with(MARK.as_bytes()) => {
            pg_sys::list_truncate(pg_sys::list_copy(private), (*private).length - 1)
        }
        _ => private,
    }
}

unsafe fn last_string<'a>(list: *const pg_sys::List) -> Option<&'a CStr> {
    if list.is_null() || (*list).type_ != pg_sys::NodeTag::T_List || (*list).length == 0 {
        return None;
    }
    let node = (*(*list).elements.add((*list).length as usize - 1)).ptr_value.cast::<pg_sys::Node>();
    if node.is_null() || (*node).type_ != pg_sys::NodeTag::T_String {
        return None;
    }
    Some(CStr::from_ptr((*node.cast::<pg_sys::String>()).sval))
}
