//! The settings `shardmap.*` that steer routing in a session.

use std::ffi::{c_char, c_void, CStr, CString};

use pgrx::prelude::*;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};
use shardmap_core::fingerprint::fingerprints;
use shardmap_core::two_phase::Policy;

use crate::pg::{moves, reads};

/// What happens to a statement that has to ask every shard. Ordered: the later is the stricter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, PostgresGucEnum)]
pub enum FanoutPolicy {
    /// It runs; it is only counted.
    #[name = c"allow"]
    Allow,
    /// It runs and the client gets a NOTICE.
    #[name = c"notice"]
    Notice,
    /// It runs and the client gets a WARNING, which goes to the server log too.
    #[name = c"warning"]
    Warning,
    /// It is refused before any shard is asked.
    #[name = c"error"]
    Error,
}

impl FanoutPolicy {
    /// Reads a policy as the catalog spells it.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "allow" => Some(Self::Allow),
            "notice" => Some(Self::Notice),
            "warning" => Some(Self::Warning),
            "error" => Some(Self::Error),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

pub static ENABLE_ROUTING: GucSetting<bool> = GucSetting::<bool>::new(true);
pub static ENABLE_ROUTER: GucSetting<bool> = GucSetting::<bool>::new(true);
pub static FANOUT_POLICY: GucSetting<FanoutPolicy> = GucSetting::<FanoutPolicy>::new(FanoutPolicy::Notice);

/// Fingerprints of statements whose fan-out is meant, as a list.
static ALLOWED_FANOUTS: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);

/// Whether the session's settings allow the fan-out of the statement with this fingerprint.
pub fn allows_fanout(fingerprint: u64) -> bool {
    let list = ALLOWED_FANOUTS.get();
    list.as_deref().and_then(parse).is_some_and(|allowed| allowed.contains(&fingerprint))
}

fn parse(list: &CStr) -> Option<Vec<u64>> {
    fingerprints(list.to_str().ok()?)
}

/// # Safety
/// Called by Postgres with a new value.
#[pg_guard]
unsafe extern "C-unwind" fn check_fingerprints(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    if (*value).is_null() || parse(CStr::from_ptr(*value)).is_some() {
        return true;
    }
    pg_sys::GUC_check_errdetail_string = pg_sys::pstrdup(
        c"It is a list of fingerprints as shardmap.fanout_queries shows them, between commas.".as_ptr(),
    );
    false
}

/// How many statements each connection to a shard keeps prepared there.
pub static MAX_PREPARED: GucSetting<i32> = GucSetting::<i32>::new(256);

/// How a transaction commits that one shard alone cannot make atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum MultiShardCommit {
    #[name = c"two_phase"]
    TwoPhase,
    #[name = c"refuse"]
    Refuse,
    #[name = c"one_phase"]
    OnePhase,
}

impl From<MultiShardCommit> for Policy {
    fn from(setting: MultiShardCommit) -> Self {
        match setting {
            MultiShardCommit::TwoPhase => Self::TwoPhase,
            MultiShardCommit::Refuse => Self::Refuse,
            MultiShardCommit::OnePhase => Self::OnePhase,
        }
    }
}

pub static MULTI_SHARD_COMMIT: GucSetting<MultiShardCommit> =
    GucSetting::<MultiShardCommit>::new(MultiShardCommit::TwoPhase);
/// Where a commit is to break, for tests.
pub static CRASH_POINT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);
/// Seconds between two looks for transactions that were left prepared.
pub static RESOLVE_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(10);

/// Milliseconds before a wait for a shard is looked at.
pub static DEADLOCK_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(1000);

fn init_commit() {
    GucRegistry::define_enum_guc(
        c"shardmap.multi_shard_commit",
        c"Says how a transaction commits that wrote to several shards, or to a shard and here.",
        c"two_phase: all or nothing, whatever fails; shards need max_prepared_transactions. refuse: not at all. \
          one_phase: one after the other; a failure in between leaves some committed.",
        &MULTI_SHARD_COMMIT,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"shardmap.resolve_interval",
        c"Sets the time between two looks for transactions that a failure left prepared on shards.",
        c"0 looks only when shardmap.resolve_transactions() is called.",
        &RESOLVE_INTERVAL,
        0,
        3600,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"shardmap.deadlock_timeout",
        c"Sets the time to wait for a shard before checking for deadlocks over several shards.",
        c"Of sessions that wait for each other in a circle one gets an error. 0 never checks.",
        &DEADLOCK_TIMEOUT,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_string_guc(
        c"shardmap.crash_point",
        c"Kills the session at a named step of a commit, for tests of what follows.",
        c"See src/pg/remote/crash.rs for the names.",
        &CRASH_POINT,
        GucContext::Suset,
        GucFlags::NO_SHOW_ALL,
    );
}

/// Connections of all sessions to one shard; 0: no limit.
pub static MAX_CONNECTIONS_PER_SHARD: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Milliseconds.
pub static CONNECTION_WAIT: GucSetting<i32> = GucSetting::<i32>::new(10_000);
/// Milliseconds; 0: they are kept.
pub static IDLE_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(600_000);
/// Seconds.
pub static CONNECT_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(10);
/// Shards that one statement has under way at once; 0: all.
pub static MAX_FANOUT_WIDTH: GucSetting<i32> = GucSetting::<i32>::new(64);

/// How many shards a statement may have at work.
pub fn fanout_width() -> usize {
    match MAX_FANOUT_WIDTH.get() {
        ..=0 => usize::MAX,
        width => width.unsigned_abs() as usize,
    }
}

fn init_connections() {
    GucRegistry::define_int_guc(
        c"shardmap.max_connections_per_shard",
        c"Limits the connections that all sessions of this server together hold to one shard.",
        c"0 sets no limit. At the limit a session waits for a free one, for shardmap.connection_wait at most. \
          Has no effect unless pg_shardmap is in shared_preload_libraries.",
        &MAX_CONNECTIONS_PER_SHARD,
        0,
        262_143,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"shardmap.connection_wait",
        c"Sets the longest time that a session waits for a connection to a shard when all are taken.",
        c"Then the statement fails, with SQLSTATE 53300. 0 does not wait.",
        &CONNECTION_WAIT,
        0,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"shardmap.idle_timeout",
        c"Closes a session's connection to a shard that it has not used for this long.",
        c"Also while the client is idle, outside of transactions. 0 keeps connections as long as the session lasts.",
        &IDLE_TIMEOUT,
        0,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"shardmap.connect_timeout",
        c"Sets the longest time that connecting to one address of a shard may take.",
        c"The option connect_timeout of the shard's foreign server goes first. 0 waits as long as the network does.",
        &CONNECT_TIMEOUT,
        0,
        3600,
        GucContext::Userset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"shardmap.max_fanout_width",
        c"Sets the number of shards that a statement has at work at the same time.",
        c"More are asked one by one as others end. Holds for each scan of a logical table, and for \
          shardmap.run_on_shards(). 0 asks all at once.",
        &MAX_FANOUT_WIDTH,
        0,
        65_535,
        GucContext::Userset,
        GucFlags::default(),
    );
}

/// Defines the settings. Once per process.
pub fn init() {
    init_commit();
    init_connections();
    reads::settings::init();
    moves::init();
    GucRegistry::define_bool_guc(
        c"shardmap.enable_routing",
        c"Plans a statement that names one shard's key directly on that shard.",
        c"Off gives the same answers through the partitions of the logical tables, more slowly.",
        &ENABLE_ROUTING,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        c"shardmap.enable_router",
        c"Sends a statement that is about one shard as a whole to that shard.",
        c"Off plans it here on the shard's tables: the same answers, more slowly.",
        &ENABLE_ROUTER,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"shardmap.fanout_policy",
        c"Says what happens to a statement that has to ask every shard.",
        c"allow, notice, warning or error. A logical table's own policy applies too; the stricter of the two wins.",
        &FANOUT_POLICY,
        GucContext::Userset,
        GucFlags::default(),
    );
    // SAFETY: the hook is guarded.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"shardmap.allowed_fanouts",
            c"Allows statements to ask every shard, by their fingerprints, whatever the policy.",
            c"A list of numbers as in shardmap.fanout_queries. Does what the comment /* shardmap: allow fan-out */ does.",
            &ALLOWED_FANOUTS,
            GucContext::Userset,
            GucFlags::from_bits_retain(pg_sys::GUC_LIST_INPUT as i32),
            Some(check_fingerprints),
            None,
            None,
        );
    }
    GucRegistry::define_int_guc(
        c"shardmap.max_prepared",
        c"Says how many statements each connection to a shard keeps prepared there.",
        c"The least recently used is closed for a new one. 0 prepares none, as needed behind a pooler that does not keep \
          prepared statements.",
        &MAX_PREPARED,
        0,
        10_000,
        GucContext::Userset,
        GucFlags::default(),
    );
    // SAFETY: a constant string. All settings of the prefix are defined by now; a misspelt one is refused.
    unsafe { pg_sys::MarkGUCPrefixReserved(c"shardmap".as_ptr()) }
}
