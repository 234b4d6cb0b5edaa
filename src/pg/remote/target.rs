//! Where a shard is and who asks: the foreign server and the user mapping, as options for libpq.
//!
//! Decides which options count (those that libpq knows, as in postgres_fdw) and the session settings that a connection
//! starts with. What always holds: a value means the same text on every connection (ISO dates, full precision of
//! floats); a replica is reached with the user mappings of its shard, unless it has its own. Refuses servers of other wrappers, users without a mapping, and passwordless connections of ordinary users:
//! they would use the rights of the server's own operating-system user.

use std::ffi::{CStr, CString};
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::{PgList, PgSqlErrorCode};

use super::carried;
use super::deadlock;
use super::failure::{self, Failure, Result};
use super::libpq;
use super::pooler::{self, Pooler};
use crate::pg::encoding;
use crate::pg::replicas::registry;
use crate::pg::settings::CONNECT_TIMEOUT;

/// The wrapper whose servers are shards.
const WRAPPER: &CStr = c"shardmap_fdw";
/// Options of a server: where other shards find it, if that is not where it is found from here.
pub const PEER_HOST: &CStr = c"peer_host";
pub const PEER_PORT: &CStr = c"peer_port";
/// Options of libpq unless the server or the mapping has them: a shard that is gone without a farewell is noticed after two
/// minutes, instead of the operating system's two hours.
const DEFAULTS: [(&CStr, &CStr); 3] =
    [(c"keepalives_idle", c"60"), (c"keepalives_interval", c"10"), (c"keepalives_count", c"6")];
/// Settings that decide how values look as text. The same as postgres_fdw's.
const OUTPUT_SETTINGS: [(&str, &str); 4] = [
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("extra_float_digits", "3"),
    ("standard_conforming_strings", "on"),
];

/// A shard as one user reaches it.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The foreign server.
    pub id: pg_sys::Oid,
    /// The shard's name, which is the server's.
    pub server: String,
    /// Shard or replica, as messages name it.
    pub place: String,
    /// The user mapping. Users who share one (PUBLIC's) share connections.
    pub mapping: pg_sys::Oid,
    /// The user must prove who he is by a password of the mapping.
    pub needs_password: bool,
    /// What stands before the shard.
    pub pooler: Pooler,
    options: Vec<(String, CString)>,
    /// In place of options of these names, for other shards.
    peer: Vec<(&'static str, CString)>,
}

/// The settings that a connection's session starts with.
pub struct Session(pub Vec<(&'static str, String)>);

impl Session {
    /// For text that is read here: ISO dates, full precision of floats.
    pub fn plain(search_path: String, time_zone: String) -> Self {
        let mut settings = vec![("search_path", search_path), ("timezone", time_zone)];
        settings.extend(OUTPUT_SETTINGS.iter().map(|(name, value)| (*name, (*value).to_owned())));
        Self(settings)
    }

    /// For statements that qualify every name and mean what they mean here.
    pub fn like_ours() -> Self {
        let mut settings =
            vec![("search_path", "pg_catalog".to_owned()), ("standard_conforming_strings", "on".to_owned())];
        settings.extend(carried::values());
        Self(settings)
    }
}

impl Target {
    /// Looks up server and mapping.
    ///
    /// # Errors
    /// 42704: no such server, or no mapping for the user. 42809: the server is no shard. 2F003: the user needs a
    /// password and the mapping has none.
    pub fn resolve(server: &str, user: pg_sys::Oid) -> Result<Self> {
        libpq::load()?;
        let name = encoding::server_string(server);
        let shard = registry::shard_of(server);
        let place = failure::place(server, shard.as_deref());
        // SAFETY: catalog look-ups; what they return lives in the current memory context.
        let (id, mapping, pooler, mut options) = unsafe {
            let found = pg_sys::GetForeignServerByName(name.as_ptr(), true);
            if found.is_null() {
                return Err(unknown(server));
            }
            let wrapper = pg_sys::GetForeignDataWrapper((*found).fdwid);
            if CStr::from_ptr((*wrapper).fdwname) != WRAPPER {
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
                    format!("foreign server \"{server}\" is not a shard"),
                )
                .hint("Shards are servers of the wrapper shardmap_fdw; shardmap.add_shard() makes them."));
            }
            let Some(server_id) = credentials(&*found, shard.as_deref(), user) else {
                let user = encoding::utf8_string(pg_sys::GetUserNameFromId(user, false));
                return Err(Failure::new(
                    PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
                    format!("user \"{user}\" has no user mapping for {place}"),
                )
                .hint("CREATE USER MAPPING for this user, or for PUBLIC, on the shard's foreign server."));
            };
            let mapping = pg_sys::GetUserMapping(user, server_id);
            let mut options = definitions((*found).options);
            let pooler = options.iter().find(|(name, _)| name.as_bytes() == pooler::OPTION.to_bytes());
            let pooler = pooler.and_then(|(_, value)| Pooler::parse(value)).unwrap_or_default();
            // The mapping's come last: libpq takes the last of two equal names.
            let own = definitions((*mapping).options);
            options.retain(|(name, _)| !own.iter().any(|(own, _)| own == name));
            let passwordless = own.iter().any(|(name, value)| name == "password_required" && is_false(value));
            let has_password = own.iter().any(|(name, value)| name == "password" && !value.is_empty());
            let needs_password = !pg_sys::superuser_arg(user) && !passwordless;
            if needs_password && !has_password {
                return Err(password_required("Ordinary users must give a password in the user mapping."));
            }
            options.extend(own);
            ((*found).serverid, ((*mapping).umid, needs_password), pooler, options)
        };
        let own = |name: &CStr| options.iter().find(|(own, _)| own.as_bytes() == name.to_bytes());
        let peer = [("host", PEER_HOST), ("port", PEER_PORT)];
        let peer = peer.into_iter().filter_map(|(name, option)| own(option).map(|(_, value)| (name, value.clone())));
        let peer = peer.collect();
        let known = libpq::option_names();
        options.retain(|(name, _)| known.contains(name));
        let (mapping, needs_password) = mapping;
        Ok(Self { id, server: server.to_owned(), place, mapping, needs_password, pooler, options, peer })
    }

    /// A connection string by which another shard reaches this one. It may hold a password.
    pub fn connection_string(&self) -> Vec<u8> {
        let is_replaced =
            |name: &str| self.peer.iter().any(|(own, _)| *own == name || *own == "host" && name == "hostaddr");
        let is_ours = |name: &str| {
            ["application_name", "fallback_application_name", "client_encoding", "options"].contains(&name)
        };
        let own = self.options.iter().map(|(name, value)| (name.as_str(), value));
        let own = own.filter(|(name, _)| !is_replaced(name) && !is_ours(name));
        let mut text = Vec::new();
        for (name, value) in own.chain(self.peer.iter().map(|(name, value)| (*name, value))) {
            text.extend_from_slice(format!("{name}='").as_bytes());
            for byte in value.to_bytes() {
                if matches!(byte, b'\\' | b'\'') {
                    text.push(b'\\');
                }
                text.push(*byte);
            }
            text.extend_from_slice(b"' ");
        }
        text
    }

    /// Whether other shards are told of a place of their own.
    pub fn has_peer_address(&self) -> bool {
        !self.peer.is_empty()
    }

    /// How long connecting may take; `None`: for ever.
    pub fn connect_timeout(&self) -> Option<Duration> {
        connect_timeout(&self.options)
    }

    /// Whether a connection made for `other` serves this one as well.
    pub fn same_connection(&self, other: &Self) -> bool {
        let same = |target: &Self| (target.mapping, target.pooler);
        same(self) == same(other) && self.server == other.server && self.options == other.options
    }

    /// Whether one connection serves both.
    pub fn same_place(&self, other: &Self) -> bool {
        self.mapping == other.mapping && self.server == other.server
    }

    /// Names and values for libpq. The session's settings travel in the startup packet, which costs no round trip; not to
    /// a pooler, which has no session for them.
    pub fn parameters(&self, session: &Session) -> Vec<(CString, CString)> {
        let mut settings = String::new();
        let is_set = |name: &CStr| self.options.iter().any(|(own, _)| own.as_bytes() == name.to_bytes());
        let defaults = DEFAULTS.iter().filter(|(name, _)| !is_set(name));
        let mut parameters: Vec<_> = defaults.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut given = "pg_shardmap".into();
        for (name, value) in &self.options {
            if name == "options" {
                settings.push_str(&value.to_string_lossy());
            } else if name == "application_name" {
                given = value.to_string_lossy();
            } else if let Ok(name) = CString::new(name.as_str()) {
                parameters.push((name, value.clone()));
            }
        }
        let own = if self.pooler.keeps_session() { session.0.as_slice() } else { &[] };
        for (name, value) in own {
            settings.push_str(&format!(" -c {name}={}", escape_setting(value)));
        }
        if !settings.is_empty() {
            parameters.push((c"options".to_owned(), CString::new(settings).unwrap_or_default()));
        }
        let name = deadlock::own_session().application_name(&given);
        parameters.push((c"application_name".to_owned(), CString::new(name).unwrap_or_default()));
        // SAFETY: a static string of the server.
        let encoding = unsafe { CStr::from_ptr(pg_sys::GetDatabaseEncodingName()) };
        parameters.push((c"client_encoding".to_owned(), encoding.to_owned()));
        parameters
    }
}

/// Blanks and backslashes in the startup packet's options are escaped by a backslash.
fn escape_setting(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len() + 8);
    for c in value.chars() {
        if c.is_ascii_whitespace() || c == '\\' {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

fn unknown(server: &str) -> Failure {
    Failure::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("shard \"{server}\" does not exist"))
        .hint("The view shardmap.shards lists the shards.")
}

/// The refusal of an ordinary user's connection without a password.
pub fn password_required(detail: &str) -> Failure {
    Failure::new(PgSqlErrorCode::ERRCODE_S_R_E_PROHIBITED_SQL_STATEMENT_ATTEMPTED, "password is required")
        .detail(detail)
        .hint("Set a password in the user mapping and let the shard ask for it, or let a superuser set password_required=false in the mapping.")
}

/// As Postgres reads a boolean option.
fn is_false(value: &CStr) -> bool {
    ["false", "off", "no", "0", "f", "n"].iter().any(|word| value.to_bytes().eq_ignore_ascii_case(word.as_bytes()))
}

/// Source: libpq: seconds; zero, negative or no number waits for ever, 1 is taken as 2; it counts for each host.
fn connect_timeout(options: &[(String, CString)]) -> Option<Duration> {
    let value =
        |wanted| options.iter().rev().find(|(name, _)| name == wanted).map(|(_, value)| value.to_string_lossy());
    let hosts = value("hostaddr").or_else(|| value("host")).map_or(1, |hosts| hosts.split(',').count() as u32);
    let one = match value("connect_timeout") {
        None => CONNECT_TIMEOUT.get(),
        Some(text) => text.trim().parse::<i32>().unwrap_or(0),
    };
    (one > 0).then(|| Duration::from_secs(one.max(2) as u64) * hosts)
}

/// The server whose mapping for the user counts: a replica has the users of its shard, and needs no mappings of its own.
///
/// # Safety
/// In a transaction.
unsafe fn credentials(found: &pg_sys::ForeignServer, shard: Option<&str>, user: pg_sys::Oid) -> Option<pg_sys::Oid> {
    let is_mapped = |server: pg_sys::Oid| has_mapping(user, server) || has_mapping(pg_sys::InvalidOid, server);
    if is_mapped(found.serverid) {
        return Some(found.serverid);
    }
    let shard = encoding::server_string(shard?);
    let shard = pg_sys::GetForeignServerByName(shard.as_ptr(), true).as_ref()?;
    // Else the owner of one server would get to see what is sent to the other.
    (shard.owner == found.owner && is_mapped(shard.serverid)).then_some(shard.serverid)
}

/// # Safety
/// In a transaction.
unsafe fn has_mapping(user: pg_sys::Oid, server: pg_sys::Oid) -> bool {
    let cache = pg_sys::SysCacheIdentifier::USERMAPPINGUSERSERVER as i32;
    pg_sys::SearchSysCacheExists(cache, user.into(), server.into(), 0.into(), 0.into())
}

/// # Safety
/// `list` is a list of DefElem as the catalog functions return it.
unsafe fn definitions(list: *mut pg_sys::List) -> Vec<(String, CString)> {
    let list = PgList::<pg_sys::DefElem>::from_pg(list);
    let pair = |element: *mut pg_sys::DefElem| {
        let name = CStr::from_ptr((*element).defname).to_string_lossy().into_owned();
        (name, CStr::from_ptr(pg_sys::defGetString(element)).to_owned())
    };
    list.iter_ptr().map(pair).collect()
}
