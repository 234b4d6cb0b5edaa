//! The settings that say from where reads are answered.

use std::cell::RefCell;
use std::ffi::{c_char, c_void, CStr, CString};
use std::rc::Rc;
use std::time::Duration;

use pgrx::prelude::*;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};
use shardmap_core::reads::choice::Preference;
use shardmap_core::reads::token::{Cluster, ReadToken, TokenError};

use crate::pg::error::Refusal;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum ReadPreference {
    #[name = c"primary"]
    Primary,
    #[name = c"prefer_replica"]
    PreferReplica,
    #[name = c"replica"]
    Replica,
    #[name = c"nearest"]
    Nearest,
}

impl From<ReadPreference> for Preference {
    fn from(setting: ReadPreference) -> Self {
        match setting {
            ReadPreference::Primary => Self::Primary,
            ReadPreference::PreferReplica => Self::PreferReplica,
            ReadPreference::Replica => Self::Replica,
            ReadPreference::Nearest => Self::Nearest,
        }
    }
}

/// What a read must not miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum Consistency {
    /// Nothing.
    #[name = c"eventual"]
    Eventual,
    /// What the session has written and seen, and the token.
    #[name = c"session"]
    Session,
    /// The token.
    #[name = c"token"]
    Token,
}

pub static READ_PREFERENCE: GucSetting<ReadPreference> = GucSetting::<ReadPreference>::new(ReadPreference::Primary);
pub static CONSISTENCY: GucSetting<Consistency> = GucSetting::<Consistency>::new(Consistency::Session);
pub static STICKY_READS: GucSetting<bool> = GucSetting::<bool>::new(true);
static MAX_LAG: GucSetting<i32> = GucSetting::<i32>::new(-1);
static CATCHUP_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(50);
static PRIMARY_AFTER_WRITE: GucSetting<i32> = GucSetting::<i32>::new(0);
static ZONE: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);
static READ_TOKEN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);

/// How far behind a replica may be.
pub fn max_lag() -> Option<Duration> {
    u64::try_from(MAX_LAG.get()).ok().map(Duration::from_millis)
}

/// How long a replica is waited for.
pub fn catchup_timeout() -> Duration {
    Duration::from_millis(u64::try_from(CATCHUP_TIMEOUT.get()).unwrap_or(0))
}

/// How long reads follow a write to the primary.
pub fn primary_after_write() -> Duration {
    Duration::from_millis(u64::try_from(PRIMARY_AFTER_WRITE.get()).unwrap_or(0))
}

pub fn zone() -> String {
    ZONE.get().map(|zone| zone.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The cluster to which this database's tokens belong.
pub fn cluster() -> Cluster {
    // SAFETY: reads variables of the server.
    unsafe { Cluster::of(pg_sys::GetSystemIdentifier(), pg_sys::MyDatabaseId.to_u32()) }
}

thread_local! {
    /// The last token that was read: the same one comes again and again.
    static LAST: RefCell<Option<(CString, Rc<ReadToken>)>> = const { RefCell::new(None) };
}

/// The token set for reads, if there is one.
///
/// # Errors
/// 22023: it is none, or not of this database.
pub fn read_token() -> Result<Option<Rc<ReadToken>>, Refusal> {
    let Some(text) = READ_TOKEN.get().filter(|text| !text.is_empty()) else { return Ok(None) };
    let known =
        LAST.with_borrow(|last| last.as_ref().filter(|(own, _)| *own == text).map(|(_, token)| Rc::clone(token)));
    if let Some(known) = known {
        return Ok(Some(known));
    }
    let token = Rc::new(decode(&text)?);
    LAST.set(Some((text, Rc::clone(&token))));
    Ok(Some(token))
}

/// Reads a token of this database.
///
/// # Errors
/// 22023.
pub fn decode(text: &CStr) -> Result<ReadToken, Refusal> {
    ReadToken::decode(&text.to_string_lossy(), cluster()).map_err(no_token)
}

const TOKEN_HINT: &str =
    "Pass on, unchanged, what shardmap.write_token() or shardmap.session_token() gave in this database.";

/// What a user who gave a wrong token is told.
pub fn no_token(error: TokenError) -> Refusal {
    Refusal::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, "invalid read token")
        .detail(error.to_string())
        .hint(TOKEN_HINT)
}

/// # Safety
/// Called by Postgres with a new value.
#[pg_guard]
unsafe extern "C-unwind" fn check_token(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    if (*value).is_null() || **value == 0 {
        return true;
    }
    let text = CStr::from_ptr(*value).to_string_lossy();
    // Before a database is chosen nobody knows whose token it ought to be.
    let read = match pg_sys::MyDatabaseId {
        pg_sys::InvalidOid => ReadToken::decode_any(&text),
        _ => ReadToken::decode(&text, cluster()),
    };
    let Err(error) = read else { return true };
    let detail = CString::new(error.to_string()).unwrap_or_default();
    pg_sys::GUC_check_errdetail_string = pg_sys::pstrdup(detail.as_ptr());
    let hint = CString::new(TOKEN_HINT).unwrap_or_default();
    pg_sys::GUC_check_errhint_string = pg_sys::pstrdup(hint.as_ptr());
    false
}

/// Defines the settings. Once per process.
pub fn init() {
    GucRegistry::define_enum_guc(
        c"shardmap.read_preference",
        c"Says which of a shard's servers answer reads.",
        c"primary: primaries alone. prefer_replica: a replica that is fresh enough, else the primary. replica: a replica, \
          else an error. nearest: the server of the shortest way. Statements that write, lock rows or call volatile \
          functions, and transactions that have written or are SERIALIZABLE, always use primaries.",
        &READ_PREFERENCE,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"shardmap.consistency",
        c"Says what a read from a replica must not miss.",
        c"session: what this session has written or seen, and what shardmap.read_token stands for. token: what \
          shardmap.read_token stands for; behind a transaction pooler, where a session serves many clients. eventual: \
          nothing; tokens are not looked at.",
        &CONSISTENCY,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        c"shardmap.sticky_reads",
        c"Lets a session stay with the replica that answered it last.",
        c"As long as that replica is fresh enough. Off chooses anew for each statement.",
        &STICKY_READS,
        GucContext::Userset,
        GucFlags::default(),
    );
    let milliseconds = |name, short, long, setting, least, most| {
        GucRegistry::define_int_guc(name, short, long, setting, least, most, GucContext::Userset, GucFlags::UNIT_MS);
    };
    milliseconds(
        c"shardmap.max_lag",
        c"Sets how far behind a replica may be that answers reads.",
        c"Counted up to now, so that less than shardmap.lag_sample_interval leaves replicas out most of the time. -1: any lag.",
        &MAX_LAG,
        -1,
        i32::MAX,
    );
    milliseconds(
        c"shardmap.catchup_timeout",
        c"Sets how long a read waits for a replica that has not replayed what it must not miss.",
        c"Then the primary answers. 0 does not ask replicas: only what is known of them already counts.",
        &CATCHUP_TIMEOUT,
        0,
        60_000,
    );
    milliseconds(
        c"shardmap.primary_after_write",
        c"Sets how long a session's reads of a shard go to its primary after the session has written there.",
        c"0: not at all; shardmap.consistency alone decides.",
        &PRIMARY_AFTER_WRITE,
        0,
        3_600_000,
    );
    GucRegistry::define_string_guc(
        c"shardmap.zone",
        c"Says where this server stands: replicas of the same zone are preferred.",
        c"Compared with the zones given to shardmap.add_replica(). Empty: nowhere.",
        &ZONE,
        GucContext::Userset,
        GucFlags::default(),
    );
    // SAFETY: the hook is guarded.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"shardmap.read_token",
            c"Holds what reads must not miss: a token of shardmap.write_token() or shardmap.session_token().",
            c"Set it with SET LOCAL for the transaction that serves a request. Empty: nothing.",
            &READ_TOKEN,
            GucContext::Userset,
            GucFlags::default(),
            Some(check_token),
            None,
            None,
        );
    }
}
