//! What servers are asked, and how their answers are read.
//!
//! Decides which of four questions a user of the shard may ask: all that is needed is open to everybody by default, but for
//! the state of the WAL receiver (pg_monitor), its connection setting (pg_read_all_settings), and the history of the timeline
//! (EXECUTE on `pg_read_file`, a superuser's). What always holds: what may not be seen is unknown, not an error; one question
//! serves primaries and replicas, since one becomes the other.

use std::ffi::CStr;

use shardmap_core::lag::forks::of_history_file;
use shardmap_core::lag::judge::Answer;
use shardmap_core::reads::position::Fork;
use shardmap_core::replica::{Lsn, Receiver, SystemIdentifier, Timeline};

use crate::pg::remote::line::{Questions, Row};

/// What the user may see.
const FIRST: &CStr = c"SELECT pg_catalog.pg_has_role('pg_read_all_settings', 'USAGE'), \
    pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE') \
    AND pg_catalog.has_function_privilege('pg_catalog.pg_control_checkpoint()', 'EXECUTE') \
    AND pg_catalog.has_function_privilege('pg_catalog.pg_control_recovery()', 'EXECUTE'), \
    pg_catalog.has_function_privilege('pg_catalog.pg_read_file(text, bigint, bigint, boolean)', 'EXECUTE')";

macro_rules! question {
    ($system:literal, $timelines:literal, $from:literal, $conninfo:literal, $history:literal) => {
        concat!(
            "SELECT r.r, CASE WHEN r.r THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END, \
             CASE WHEN r.r THEN pg_catalog.pg_last_wal_receive_lsn() END, \
             CASE WHEN r.r THEN pg_catalog.pg_is_wal_replay_paused() END, \
             CASE WHEN NOT r.r THEN pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_flush_lsn()), 1, 8) END, \
             w.pid, w.status, w.received_tli, ",
            $system, ", ", $timelines, ", ", $conninfo, ", ", $history,
            ", CASE WHEN NOT r.r THEN pg_catalog.pg_last_wal_replay_lsn() END, \
             pg_catalog.extract('epoch', pg_catalog.pg_postmaster_start_time()), \
             (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())",
            " FROM (SELECT pg_catalog.pg_is_in_recovery() AS r OFFSET 0) r LEFT JOIN pg_catalog.pg_stat_wal_receiver w ON true",
            $from, "\0"
        )
    };
}

/// A question of one who may see the control file.
macro_rules! control_question {
    ($conninfo:literal, $history:literal) => {
        question!(
            "s.system_identifier",
            "CASE WHEN v.min_recovery_end_timeline OPERATOR(pg_catalog.>) c.timeline_id THEN v.min_recovery_end_timeline ELSE c.timeline_id END",
            ", pg_catalog.pg_control_system() s, pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() v",
            $conninfo,
            $history
        )
    };
}

const FROM_CONTROL: &str = control_question!("NULL", "NULL");
const WITH_SETTINGS: &str = control_question!("pg_catalog.current_setting('primary_conninfo')", "NULL");
/// `missing_ok` is the last argument in every version; a first timeline has no file.
const WITH_HISTORY: &str = control_question!(
    "pg_catalog.current_setting('primary_conninfo')",
    "CASE WHEN NOT r.r THEN pg_catalog.pg_read_file('pg_wal/' OPERATOR(pg_catalog.||) pg_catalog.substr(\
        pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_flush_lsn()), 1, 8) OPERATOR(pg_catalog.||) '.history', 0, 65536, true) END"
);
const PLAIN: &str = question!("NULL", "NULL", "", "NULL", "NULL");

fn text(question: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(question.as_bytes()).unwrap_or(FIRST)
}

/// The questions of a sampler.
pub fn questions() -> Questions {
    Questions {
        first: FIRST,
        then: |row| match (is_true(row, 1), is_true(row, 0), is_true(row, 2)) {
            (false, ..) => text(PLAIN),
            (true, false, _) => text(FROM_CONTROL),
            (true, true, false) => text(WITH_SETTINGS),
            (true, true, true) => text(WITH_HISTORY),
        },
    }
}

fn value(row: &Row, at: usize) -> Option<&str> {
    row.get(at)?.as_deref()
}

fn is_true(row: &Row, at: usize) -> bool {
    value(row, at) == Some("t")
}

/// What a server said of itself.
pub struct Said {
    pub answer: Answer,
    /// Where the recovery ended of a server that is out of it; `None`: there was none since it was started.
    pub recovery_ended: Option<Lsn>,
    /// When it was started, which tells servers apart.
    pub started: Option<String>,
    /// The number of the database, which is the same in all copies of it.
    pub database: Option<u32>,
    /// The forks that led to a primary's timeline, as far as the user may see them.
    pub forks: Vec<Fork>,
}

/// Reads an answer; `None`: it is none.
pub fn read(row: &Row) -> Option<Said> {
    let in_recovery = value(row, 0)? == "t";
    let number = |at: usize| value(row, at).and_then(|text| text.parse::<u32>().ok());
    let (control, received) = (number(9), number(7));
    let receiver = match (value(row, 5), value(row, 6)) {
        (None, _) if value(row, 10) == Some("") => Receiver::NotUsed,
        (None, _) => Receiver::Stopped,
        (Some(_), None | Some("streaming")) => Receiver::Running,
        (Some(_), Some(_)) => Receiver::Stopped,
    };
    let written = value(row, 4).and_then(|hex| u32::from_str_radix(hex, 16).ok());
    let timeline = if in_recovery { received.into_iter().chain(control).max() } else { written };
    let answer = Answer {
        in_recovery,
        // A bigint, which is negative for half of all systems.
        system: value(row, 8).and_then(|text| text.parse::<i64>().ok()).map(|id| SystemIdentifier(id as u64)),
        timeline: timeline.map(Timeline),
        // What the receiver streams is current; what the control file says is as of the last restart point, but nothing newer
        // comes where nothing is received.
        timeline_is_current: !in_recovery || received.is_some() || receiver == Receiver::Stopped,
        position: value(row, 1).and_then(Lsn::parse),
        received: value(row, 2).and_then(Lsn::parse),
        receiver: in_recovery.then_some(receiver),
        paused: in_recovery.then(|| is_true(row, 3)),
    };
    Some(Said {
        answer,
        recovery_ended: value(row, 12).and_then(Lsn::parse),
        started: value(row, 13).map(str::to_owned),
        database: number(14),
        forks: answer.timeline.zip(value(row, 11)).map_or_else(Vec::new, |(to, text)| of_history_file(text, to)),
    })
}
