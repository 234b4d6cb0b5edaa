//! TRUNCATE and ANALYZE of foreign tables.

use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::ffi::CString;
use std::hash::{BuildHasher, Hasher};

use pgrx::pg_sys;

use super::insert::{remote_column, remote_table};
use super::owned::check_truncate;
use super::shard::{connect, statement};
use super::tuples::{types, Rows};
use super::users;
use crate::pg::query::tree::items;
use crate::pg::raw::attribute;
use crate::pg::remote::failure::Result;
use crate::pg::remote::guard;
use crate::pg::remote::portal::Request;
use crate::pg::remote::wire::encode::Params;
use crate::pg::remote::Connection;

/// # Safety
/// Called by TRUNCATE, with open foreign tables of one server.
pub unsafe extern "C-unwind" fn exec_foreign_truncate(
    relations: *mut pg_sys::List,
    behavior: pg_sys::DropBehavior::Type,
    restart_sequences: bool,
) {
    guard(|| {
        let relations: Vec<pg_sys::Relation> = items::<pg_sys::RelationData>(relations).collect();
        let Some(first) = relations.first() else { return Ok(()) };
        check_truncate(relations.iter().map(|relation| (**relation).rd_id));
        let server = (*pg_sys::GetForeignTable((**first).rd_id)).serverid;
        let user = pg_sys::GetUserId();
        users::admit(server, user, true);
        let tables: Vec<Vec<u8>> = relations.iter().map(|relation| remote_table(*relation)).collect();
        let mut sql = [b"TRUNCATE ".as_slice(), &tables.join(&b", "[..])].concat();
        sql.extend_from_slice(if restart_sequences { b" RESTART IDENTITY" } else { b" CONTINUE IDENTITY" });
        let cascades = behavior == pg_sys::DropBehavior::DROP_CASCADE;
        sql.extend_from_slice(if cascades { b" CASCADE" } else { b" RESTRICT" });
        connect(server, user)?.query(&CString::new(sql).unwrap_or_default())?;
        Ok(())
    });
}

/// # Safety
/// Called by ANALYZE.
pub unsafe extern "C-unwind" fn analyze_foreign_table(
    relation: pg_sys::Relation,
    function: *mut pg_sys::AcquireSampleRowsFunc,
    pages: *mut pg_sys::BlockNumber,
) -> bool {
    guard(|| {
        *function = Some(acquire_sample_rows);
        *pages = Size::ask(relation)?.pages;
        Ok(true)
    })
}

/// A shard's table as its catalog knows it.
struct Size {
    connection: Connection,
    pages: u32,
    /// Of the last ANALYZE or VACUUM there; negative: never.
    rows: f64,
    is_table: bool,
}

impl Size {
    unsafe fn ask(relation: pg_sys::Relation) -> Result<Self> {
        let table = (*pg_sys::GetForeignTable((*relation).rd_id)).serverid;
        let connection = connect(table, (*(*relation).rd_rel).relowner)?;
        let literal = CString::new(remote_table(relation)).unwrap_or_default();
        let literal = std::ffi::CStr::from_ptr(pg_sys::quote_literal_cstr(literal.as_ptr())).to_bytes();
        let sql = [
            b"SELECT pg_relation_size(c.oid) / current_setting('block_size')::bigint, c.reltuples, c.relkind = 'r' FROM pg_class c WHERE c.oid = ".as_slice(),
            literal,
            b"::regclass",
        ]
        .concat();
        let answer = connection.read(&CString::new(sql).unwrap_or_default())?;
        let value = |at: usize| {
            let value = answer.rows.first().and_then(|row| row.get(at)?.as_deref()).unwrap_or_default();
            String::from_utf8_lossy(value).into_owned()
        };
        Ok(Self {
            connection,
            pages: value(0).parse().unwrap_or(0),
            rows: value(1).parse().unwrap_or(-1.0),
            is_table: value(2) == "t",
        })
    }
}

/// # Safety
/// Called by ANALYZE, with room for `wanted` rows.
unsafe extern "C-unwind" fn acquire_sample_rows(
    relation: pg_sys::Relation,
    _level: i32,
    rows: *mut pg_sys::HeapTuple,
    wanted: i32,
    total: *mut f64,
    dead: *mut f64,
) -> i32 {
    guard(|| {
        let size = Size::ask(relation)?;
        *dead = 0.0;
        let found = sample(relation, &size, std::slice::from_raw_parts_mut(rows, wanted.max(0) as usize), total)?;
        Ok(found as i32)
    })
}

/// Fills `rows` with a random sample, and `total` with the estimated number of all rows.
unsafe fn sample(
    relation: pg_sys::Relation,
    size: &Size,
    rows: &mut [pg_sys::HeapTuple],
    total: *mut f64,
) -> Result<usize> {
    let desc = (*relation).rd_att;
    let columns: Vec<i16> =
        (0..(*desc).natts as usize).filter(|at| !attribute(desc, *at).attisdropped).map(|at| at as i16 + 1).collect();
    let names: Vec<Vec<u8>> = columns.iter().map(|number| remote_column(relation, *number)).collect();
    // Some more than needed: the count there is only an estimate.
    let share = match size.is_table && size.rows > 0.0 {
        true => (rows.len() as f64 * 1.5 / size.rows).min(1.0),
        false => 1.0,
    };
    let list = if names.is_empty() { b"NULL".to_vec() } else { names.join(&b", "[..]) };
    let mut sql = [b"SELECT ".as_slice(), &list, b" FROM ", &remote_table(relation)].concat();
    if share < 1.0 {
        sql.extend_from_slice(format!(" TABLESAMPLE BERNOULLI ({})", share * 100.0).as_bytes());
    }
    let mut reader = Rows::new(desc, &columns, &types(desc));
    let statement = statement(sql.into(), Vec::new(), reader.formats(), reader.wanted());
    let request = Request {
        statement,
        params: Params::default(),
        chunk: 1000,
        begin: true,
        writes: false,
        needs: reader.needs(),
        commits: false,
    };
    let portal = size.connection.start(request)?;
    let (mut seen, mut row) = (0_usize, Vec::new());
    while portal.next(&mut row)? {
        // Each row seen so far is in the sample with equal probability. Source: Vitter, algorithm R.
        let is_full = seen >= rows.len();
        let place = if is_full { random_below(seen + 1) } else { seen };
        if let Some(kept) = rows.get_mut(place) {
            if is_full {
                pg_sys::heap_freetuple(*kept);
            }
            *kept = reader.form(&row)?;
        }
        seen += 1;
    }
    portal.close()?;
    *total = seen as f64 / share;
    Ok(seen.min(rows.len()))
}

thread_local! {
    static RANDOM: RefCell<u64> = RefCell::new(RandomState::new().build_hasher().finish() | 1);
}

/// A random number below `limit`. Source: Marsaglia, "Xorshift RNGs", 2003.
fn random_below(limit: usize) -> usize {
    RANDOM.with_borrow_mut(|state| {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state % limit as u64) as usize
    })
}
