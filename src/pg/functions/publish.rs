//! How a change of the map reaches every session: checked as a whole, given a version, published at commit.
//!
//! Read next: `sql/keyspaces.sql` for who calls these, `catalog` for the cache that hears of it.

use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::pg::catalog;
use crate::pg::encoding;
use crate::pg::error::Refusal;

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
            catalog::keyspace(&catalog, name);
            version
        }
        (Some(catalog), _) => {
            catalog::keyspace(&catalog, name);
            Refusal::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, format!("keyspace \"{name}\" does not exist"))
                .raise()
        }
        (None, _) => catalog::no_extension(),
    }
}
