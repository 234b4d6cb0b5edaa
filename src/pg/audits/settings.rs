//! Settings of scheduled audits.

use std::ffi::CString;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

/// A year, in seconds.
const YEAR: i32 = 366 * 86_400;

static INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(0);
static FULL_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Read by SQL.
static ROLE: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// The shorter of the two intervals that are set; `None`: no audits are made.
pub fn interval() -> Option<Duration> {
    let set = [INTERVAL.get(), FULL_INTERVAL.get()].into_iter().filter(|seconds| *seconds > 0).min();
    set.map(|seconds| Duration::from_secs(seconds.unsigned_abs().into()))
}

/// Defines them.
pub fn init() {
    GucRegistry::define_int_guc(
        c"shardmap.audit_interval",
        c"Sets the time after which a background worker audits each keyspace again.",
        c"0 audits only when shardmap.audit() is called. Such an audit reads a sample of the rows of each shard.",
        &INTERVAL,
        0,
        YEAR,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"shardmap.audit_full_interval",
        c"Sets the time after which such an audit reads all rows.",
        c"0 never reads them all. Only a full audit closes what was found about rows.",
        &FULL_INTERVAL,
        0,
        YEAR,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_string_guc(
        c"shardmap.audit_role",
        c"Sets the role that the background worker makes audits as.",
        c"It must be a member of shardmap_admin and have a user mapping for each shard. Empty: the owner of the extension.",
        &ROLE,
        GucContext::Sighup,
        GucFlags::SUPERUSER_ONLY,
    );
}
