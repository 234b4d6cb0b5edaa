//! SQL functions on the map: who owns a key, publishing a change, and the hash functions of partitioned tables.
//!
//! What always holds: a key's owner here, in partition pruning and in tuple routing is the same, for all go through
//! [`Keyspace::owner`]. Read next: `sql/routing.sql` for the SQL side, `catalog` for the cache.

use std::rc::Rc;

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::prelude::*;
use shardmap_core::error::RouteError;
use shardmap_core::ids::{ShardNumber, Token};

use crate::pg::catalog::{self, Catalog, Keyspace};
use crate::pg::encoding;
use crate::pg::error::{sqlstate, Refusal};
use crate::pg::keys::{KeyType, Varlena};

/// What Postgres adds to a partition key's only hash value before it takes the remainder (`hash_combine64` with the
/// seed of an empty row); the same in every version.
const HASH_COMBINE: u64 = 0x49a0_f4dd_15e5_a8e3;

impl From<RouteError> for Refusal {
    fn from(error: RouteError) -> Self {
        Self::new(sqlstate(error.sqlstate()), error.to_string()).hint(error.hint())
    }
}

impl Keyspace {
    /// The shard that owns `canonical`; raises the core's refusal if none does.
    pub fn owner(&self, canonical: &[u8]) -> ShardNumber {
        self.map.owner(canonical).unwrap_or_else(|error| Refusal::from(error).raise())
    }

    /// The shard on which rows with the key `canonical` are to be found; `None` if no row can have that key, which is
    /// no error for a reader: a fraction compared with keys that are integers.
    pub fn holder(&self, canonical: &[u8]) -> Option<ShardNumber> {
        match self.map.owner(canonical) {
            Err(RouteError::NotAnInteger { .. }) => None,
            Err(error) => Refusal::from(error).raise(),
            Ok(shard) => Some(shard),
        }
    }
}

fn no_extension() -> ! {
    Refusal::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "extension \"pg_shardmap\" is not installed in this database",
    )
    .hint("CREATE EXTENSION pg_shardmap CASCADE.")
    .raise()
}

/// The keyspace of that name, or an error that says which there are.
pub fn keyspace(catalog: &Catalog, name: &str) -> Rc<Keyspace> {
    catalog.keyspaces.get(name).cloned().unwrap_or_else(|| {
        let mut names: Vec<_> = catalog.keyspaces.keys().map(|n| format!("\"{n}\"")).collect();
        names.sort_unstable();
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("keyspace \"{name}\" does not exist"))
            .detail(format!("Keyspaces of this database: {}.", names.join(", ")))
            .hint("Create it with shardmap.create_keyspace().")
            .raise()
    })
}

/// The key type of `oid`, or the refusal of a type that cannot be a key.
pub fn key_type(oid: pg_sys::Oid) -> KeyType {
    KeyType::of(oid).unwrap_or_else(|| {
        // SAFETY: format_type_be returns a palloc'd string for any OID.
        let name = unsafe { encoding::utf8_string(pg_sys::format_type_be(oid)) };
        Refusal::new(PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED, format!("type {name} cannot be a shard key"))
            .detail("Equal values of the type may have different texts, or the type is not known to the shards.")
            .hint("Use an integer, text, varchar, char, uuid, numeric, date, timestamp, timestamptz or bytea column.")
            .raise()
    })
}

/// A NULL-safe view of a C function's arguments.
struct Arguments(pg_sys::FunctionCallInfo);

impl Arguments {
    /// Argument `at`, or `None` if it is NULL.
    ///
    /// # Safety
    /// The function must have been called with more than `at` arguments.
    unsafe fn get(&self, at: usize) -> Option<pg_sys::Datum> {
        let args = (*self.0).args.as_slice((*self.0).nargs as usize);
        (!args[at].isnull).then_some(args[at].value)
    }

    /// # Safety
    /// The function must have been called through an FmgrInfo, argument `at` must have a known type.
    unsafe fn type_of(&self, at: i32) -> pg_sys::Oid {
        pg_sys::get_fn_expr_argtype((*self.0).flinfo, at)
    }

    unsafe fn null(&self) -> pg_sys::Datum {
        (*self.0).isnull = true;
        pg_sys::Datum::from(0)
    }

    /// Calls `then` with the keyspace named by argument 1 and the canonical text of argument 0, whose type is
    /// `known` or else the one the call was made with. NULL in either gives NULL.
    ///
    /// # Safety
    /// Called from a function declared with (key, keyspace text).
    unsafe fn routed(
        &self,
        known: Option<KeyType>,
        then: impl FnOnce(&Keyspace, &[u8]) -> pg_sys::Datum,
    ) -> pg_sys::Datum {
        let (Some(key), Some(name)) = (self.get(0), self.get(1)) else { return self.null() };
        let catalog = catalog::current().unwrap_or_else(|| no_extension());
        let name = Varlena::of(name);
        let name = encoding::utf8(name.bytes());
        let found = match catalog.keyspaces.get(&*name) {
            Some(found) => Rc::clone(found),
            None => keyspace(&catalog, &name),
        };
        let key_type = known.unwrap_or_else(|| key_type(self.type_of(0)));
        key_type.with_canonical(key, |canonical| then(&found, canonical))
    }
}

/// A text in UTF-8 as Postgres' own.
///
/// # Safety
/// Inside a memory context whose results outlive the function call.
unsafe fn text(value: &[u8]) -> pg_sys::Datum {
    let value = encoding::server_bytes(value);
    pg_sys::Datum::from(pg_sys::cstring_to_text_with_len(value.as_ptr().cast(), value.len() as i32))
}

/// Declares a function in C's calling convention, with the record by which Postgres knows it.
macro_rules! c_function {
    ($(#[$doc:meta])* $name:ident, $info:ident, $body:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Called by Postgres' function manager with the arguments that sql/routing.sql declares.
        #[no_mangle]
        #[pg_guard]
        pub unsafe extern "C-unwind" fn $name(fcinfo: pg_sys::FunctionCallInfo) -> pg_sys::Datum {
            let body: unsafe fn(Arguments) -> pg_sys::Datum = $body;
            body(Arguments(fcinfo))
        }

        #[no_mangle]
        #[doc(hidden)]
        pub extern "C" fn $info() -> &'static pg_sys::Pg_finfo_record {
            const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
            &RECORD
        }
    };
}

unsafe fn name_of_owner(keyspace: &Keyspace, canonical: &[u8]) -> pg_sys::Datum {
    let number = keyspace.owner(canonical);
    match keyspace.map.shard(number) {
        Some(shard) => text(shard.name.as_str().as_bytes()),
        None => text(keyspace.shard_name(number).as_bytes()),
    }
}

c_function! {
    /// `shard_for(key text, keyspace text)`: the name of the shard that owns `key`.
    shardmap_shard_for_text, pg_finfo_shardmap_shard_for_text,
    |args| args.routed(Some(KeyType::TEXT), |keyspace, canonical| name_of_owner(keyspace, canonical))
}

c_function! {
    /// `shard_for(key anyelement, keyspace text)`.
    shardmap_shard_for_any, pg_finfo_shardmap_shard_for_any,
    |args| args.routed(None, |keyspace, canonical| name_of_owner(keyspace, canonical))
}

c_function! {
    /// `token_for(key text)`: the key's position on the ring, 0 to 2^32 - 1.
    shardmap_token_for_text, pg_finfo_shardmap_token_for_text,
    |args| args.token(Some(KeyType::TEXT))
}

c_function! {
    /// `token_for(key anyelement)`.
    shardmap_token_for_any, pg_finfo_shardmap_token_for_any,
    |args| args.token(None)
}

c_function! {
    /// `shardmap.canonical_key(key anyelement)`: the text that is hashed.
    shardmap_canonical_key, pg_finfo_shardmap_canonical_key,
    |args| {
        let Some(key) = args.get(0) else { return args.null() };
        key_type(args.type_of(0)).with_canonical(key, |canonical| text(canonical))
    }
}

impl Arguments {
    /// # Safety
    /// Called from a function declared with (key).
    unsafe fn token(&self, known: Option<KeyType>) -> pg_sys::Datum {
        let Some(key) = self.get(0) else { return self.null() };
        let key_type = known.unwrap_or_else(|| key_type(self.type_of(0)));
        key_type.with_canonical(key, |canonical| pg_sys::Datum::from(i64::from(Token::of(canonical).0)))
    }
}

c_function! {
    /// The extended hash function of every key class: from its result Postgres computes exactly the number of the
    /// shard that owns the key, as the remainder modulo 1024. It finds keyspace and type by the OID it was called as.
    shardmap_partition_hash, pg_finfo_shardmap_partition_hash,
    |args| {
        let Some(key) = args.get(0) else { return args.null() };
        let function = (*(*args.0).flinfo).fn_oid;
        let catalog = catalog::current().unwrap_or_else(|| no_extension());
        let Some((keyspace, key_type)) = catalog.hashes.get(&function) else {
            Refusal::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("function with OID {function} is not a registered key hash function"),
            )
            .hint("Key classes are made by shardmap.distribute_table(); do not create or rename them by hand.")
            .raise()
        };
        let number = key_type.with_canonical(key, |canonical| keyspace.owner(canonical));
        pg_sys::Datum::from(u64::from(number.0).wrapping_sub(HASH_COMBINE))
    }
}

/// Makes every session load the map anew when this transaction commits.
#[pg_extern(sql = false)]
fn invalidate_caches() {
    catalog::invalidate();
}

/// Validates the keyspace as this transaction has left it, raises its version by one and publishes the change.
/// Returns the new version.
#[pg_extern(sql = false)]
fn publish_map(text: &[u8]) -> i64 {
    let name = &*encoding::utf8(text);
    // SAFETY: the bytes are those of a text.
    let text = unsafe { DatumWithOid::new(text, pg_sys::TEXTOID) };
    let version = Spi::get_one_with_args::<i64>(
        "UPDATE shardmap.keyspace SET version = version + 1 WHERE name = $1 RETURNING version",
        &[text],
    );
    catalog::invalidate();
    match (catalog::current(), version) {
        (Some(catalog), Ok(Some(version))) => {
            keyspace(&catalog, name);
            version
        }
        (Some(catalog), _) => {
            keyspace(&catalog, name);
            Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("keyspace \"{name}\" does not exist"))
                .raise()
        }
        (None, _) => no_extension(),
    }
}

/// SQL, of built-in functions only, that computes the canonical text of `column_sql` on a shard.
#[pg_extern(sql = false)]
fn key_sql(key_type_oid: pg_sys::Oid, column_sql: &[u8]) -> Vec<u8> {
    encoding::server(&key_type(key_type_oid).kind.sql(&encoding::utf8(column_sql))).into_owned()
}

/// Refuses a column that cannot be a shard key: its type or its collation does not promise one text for equal values.
#[pg_extern(sql = false)]
fn check_key_column(relation: pg_sys::Oid, column: &[u8]) {
    let column = encoding::utf8(column);
    let name = encoding::server_string(&column);
    // SAFETY: system cache look-ups.
    let (number, type_oid) = unsafe {
        let number = pg_sys::get_attnum(relation, name.as_ptr());
        (number, pg_sys::get_atttype(relation, number))
    };
    if number <= 0 {
        Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN, format!("column \"{column}\" does not exist"))
            .hint("Name the column whose value decides the shard.")
            .raise()
    }
    key_type(type_oid);
    let (mut type_id, mut typmod, mut collation) = (pg_sys::InvalidOid, 0, pg_sys::InvalidOid);
    // SAFETY: the attribute exists.
    let deterministic = unsafe {
        pg_sys::get_atttypetypmodcoll(relation, number, &mut type_id, &mut typmod, &mut collation);
        collation == pg_sys::InvalidOid || pg_sys::get_collation_isdeterministic(collation)
    };
    if !deterministic {
        Refusal::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("column \"{column}\" has a nondeterministic collation and cannot be a shard key"),
        )
        .detail("Keys that are equal in such a collation have different texts, and would go to different shards.")
        .hint("Give the column a deterministic collation, or distribute by another column.")
        .raise()
    }
}
