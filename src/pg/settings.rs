//! The settings `shardmap.*` that steer routing in a session.

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};

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
pub static FANOUT_POLICY: GucSetting<FanoutPolicy> = GucSetting::<FanoutPolicy>::new(FanoutPolicy::Notice);

/// Defines the settings. Once per process.
pub fn init() {
    GucRegistry::define_bool_guc(
        c"shardmap.enable_routing",
        c"Plans a statement that names one shard's key directly on that shard.",
        c"Off gives the same answers through the partitions of the logical tables, more slowly.",
        &ENABLE_ROUTING,
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
    // SAFETY: a constant string. All settings of the prefix are defined by now; a misspelt one is refused.
    unsafe { pgrx::pg_sys::MarkGUCPrefixReserved(c"shardmap".as_ptr()) }
}
