//! What the planner hook decided about a statement, carried inside its plan to executor start and EXPLAIN.
//!
//! A plan may be cached, copied and run much later, so the note travels in the plan itself: as one more element, a list,
//! at the end of postgres_fdw's private list, where postgres_fdw (which reads that list by position) does not look. Its
//! parts: the note as a string; for a scan whose keys are known late, their expressions, and the keys known already.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::route::Step;

use crate::pg::query::read::Reference;
use crate::pg::query::tree::{cast, items, nth, rte, tag};
use crate::pg::settings::FanoutPolicy;

/// How a statement was planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    pub step: Step,
    /// Why the statement could not take the next higher step, as sentences; empty if there is none, or nothing to say.
    pub reason: String,
    /// For a fan-out: what the user can do about it, as the start of a sentence.
    pub hint: String,
    /// For a fan-out: the tables concerned.
    pub tables: String,
    /// For a fan-out: how many shards are asked.
    pub shards: u32,
    /// The strictest policy that a table concerned has of its own.
    pub policy: FanoutPolicy,
    /// Replicas may answer.
    pub reads_only: bool,
    /// Nothing in it is meant to see what others commit while it runs.
    pub one_moment: bool,
}

const MARK: &str = "pg_shardmap note";
const SEPARATOR: char = '\u{1f}';

/// The keys that a scan's rows can have, of which some are known only when the statement starts.
#[derive(Clone, Debug)]
pub struct LateKeys {
    /// Expressions over parameters and stable functions; each a key, or an array of keys.
    pub values: Vec<*mut pg_sys::Node>,
    /// Canonical texts.
    pub keys: Vec<Vec<u8>>,
}

/// A statement that is being planned.
pub struct Planned {
    pub note: Note,
    /// By the mark on the table's range table entry.
    pub late: HashMap<CString, LateKeys>,
    /// Whether scans are left out at run time.
    pub prunes_late: bool,
    /// Whether scans of several shards may run side by side.
    pub side_by_side: bool,
}

thread_local! {
    /// The statements being planned, innermost last.
    static PLANNING: RefCell<Vec<Rc<Planned>>> = const { RefCell::new(Vec::new()) };
}

/// Makes a statement the one that foreign scans are planned for until the guard is dropped.
pub struct Planning;

impl Planning {
    pub fn of(planned: Rc<Planned>) -> Self {
        PLANNING.with_borrow_mut(|stack| stack.push(planned));
        Self
    }
}

impl Drop for Planning {
    fn drop(&mut self) {
        PLANNING.with_borrow_mut(Vec::pop);
    }
}

/// Whether a statement with logical tables is being planned.
pub fn is_planning() -> bool {
    PLANNING.with_borrow(|stack| !stack.is_empty())
}

/// Whether scans of the statement being planned may run side by side.
pub fn side_by_side() -> bool {
    PLANNING.with_borrow(|stack| stack.last().is_none_or(|planned| planned.side_by_side))
}

/// Marks a table's range table entry, so that its partitions' scans know it again after the planner has copied, pulled up
/// and renumbered it: the name of a CTE, which a table's entry has no use for, is copied along. Returns the mark.
///
/// # Safety
/// The reference's query must be valid.
pub unsafe fn mark(reference: &Reference, number: usize) -> CString {
    let mark = CString::new(format!("{MARK} {number}")).unwrap_or_default();
    if let Some(entry) = rte(reference.query, reference.rti) {
        (*entry).ctename = pg_sys::pstrdup(mark.as_ptr());
    }
    mark
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
            reads_only: false,
            one_moment: false,
        }
    }

    /// The note of rows that go their own ways.
    pub fn distributed() -> Self {
        Self::of(Step::Distributed)
    }

    fn encode(&self) -> String {
        let shards = self.shards.to_string();
        let reads = if self.reads_only { "reads" } else { "" };
        let moment = if self.one_moment { "moment" } else { "" };
        [MARK, self.step.as_str(), self.policy.as_str(), &shards, &self.tables, &self.reason, &self.hint, reads, moment]
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
            reads_only: !fields.next()?.is_empty(),
            one_moment: !fields.next()?.is_empty(),
        })
    }
}

/// Appends the note of the statement being planned, if there is one, to `private`; with the late keys of `entry`.
///
/// # Safety
/// `private` must be a valid list or NIL, `entry` valid or NULL, in the planner's memory context.
pub unsafe fn append(private: *mut pg_sys::List, entry: *const pg_sys::RangeTblEntry) -> *mut pg_sys::List {
    let Some(planned) = PLANNING.with_borrow(|stack| stack.last().cloned()) else { return private };
    let mut tail = pg_sys::lappend(std::ptr::null_mut(), string(planned.note.encode().into_bytes()).cast());
    if let Some(late) = late_keys(&planned, entry) {
        let values = late
            .values
            .iter()
            .fold(std::ptr::null_mut(), |list, value| pg_sys::lappend(list, pg_sys::copyObjectImpl((*value).cast())));
        let keys =
            late.keys.iter().fold(std::ptr::null_mut(), |list, key| pg_sys::lappend(list, string(key.clone()).cast()));
        tail = pg_sys::lappend(pg_sys::lappend(tail, values.cast()), keys.cast());
    }
    pg_sys::lappend(private, tail.cast())
}

unsafe fn late_keys(planned: &Planned, entry: *const pg_sys::RangeTblEntry) -> Option<&LateKeys> {
    if entry.is_null() || (*entry).ctename.is_null() {
        return None;
    }
    planned.late.get(CStr::from_ptr((*entry).ctename))
}

unsafe fn string(text: Vec<u8>) -> *mut pg_sys::String {
    let text = CString::new(text).unwrap_or_default();
    pg_sys::makeString(pg_sys::pstrdup(text.as_ptr()))
}

/// Reads the note at the end of `private`.
///
/// # Safety
/// `private` must be a valid list or NIL.
pub unsafe fn read(private: *const pg_sys::List) -> Option<Note> {
    let note = nth::<pg_sys::String>(tail(private)?, 0)?;
    Note::decode(CStr::from_ptr((*note).sval).to_str().ok()?)
}

/// Reads the late keys in the note at the end of `private`: the expressions, and the canonical texts known already.
///
/// # Safety
/// As [`read`]; what is returned lives as long as the plan.
pub unsafe fn read_late(private: *const pg_sys::List) -> Option<LateKeys> {
    let tail = tail(private)?;
    let values = nth::<pg_sys::List>(tail, 1)?;
    let keys = nth::<pg_sys::List>(tail, 2)?;
    let text = |key: *mut pg_sys::String| CStr::from_ptr((*key).sval).to_bytes().to_vec();
    Some(LateKeys { values: items(values).collect(), keys: items(keys).map(text).collect() })
}

/// `private` without its note, as postgres_fdw made it.
///
/// # Safety
/// `private` must be a valid list or NIL.
pub unsafe fn without(private: *mut pg_sys::List) -> *mut pg_sys::List {
    match tail(private) {
        Some(_) => pg_sys::list_truncate(pg_sys::list_copy(private), (*private).length - 1),
        None => private,
    }
}

/// `private` with the note of `other`, if that has one.
///
/// # Safety
/// As [`read`], for both lists.
pub unsafe fn carry_over(private: *mut pg_sys::List, other: *const pg_sys::List) -> *mut pg_sys::List {
    match tail(other) {
        Some(tail) => pg_sys::lappend(private, tail.cast_mut().cast()),
        None => private,
    }
}

/// The note's list at the end of `private`.
unsafe fn tail(private: *const pg_sys::List) -> Option<*const pg_sys::List> {
    if tag(private) != pg_sys::NodeTag::T_List {
        return None;
    }
    let last = nth::<pg_sys::Node>(private, (*private).length as usize - 1)?;
    let list = cast::<pg_sys::List>(last, pg_sys::NodeTag::T_List)?;
    let note = cast::<pg_sys::String>(nth(list, 0)?, pg_sys::NodeTag::T_String)?;
    CStr::from_ptr((*note).sval).to_bytes().starts_with(MARK.as_bytes()).then_some(list.cast_const())
}
