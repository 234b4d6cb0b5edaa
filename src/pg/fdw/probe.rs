//! Whether a shard's table takes rows by COPY, and of which types.

use pgrx::pg_sys;

use super::insert::remote_table;
use super::write::Write;
use crate::pg::remote::failure::Result;
use crate::pg::remote::transaction::{self, Found};
use crate::pg::remote::wait::Patience;
use crate::pg::remote::wire::decode;
use crate::pg::remote::wire::encode::Batch;

/// Whether COPY can write a table: it takes no notice of rules, and refuses views and row security.
const TAKES_COPY: &[u8] = b"SELECT c.relkind IN ('r', 'p') AND NOT c.relhasrules \
    AND NOT pg_catalog.row_security_active(c.oid) FROM pg_catalog.pg_class c WHERE c.oid = ";

/// Asks the shard about the table that `write` inserts into, within its transaction as at `level`, unless that was asked
/// before. What was found holds until the transaction ends or is rolled back, for the shard takes the lock of an INSERT when
/// it reads the statement; or until somebody sends something of his own to the shard, which may be DDL.
///
/// # Safety
/// `relation` must be the open target of `write`.
pub unsafe fn ask(write: &Write, relation: pg_sys::Relation, level: i32) -> Result<Found> {
    let link = write.connection().link();
    let key = (write.sql().into(), write.types().into());
    if let Some(found) = link.remote.tables.borrow().get(&key).filter(|_| link.in_transaction() && link.is_open()) {
        return Ok(*found);
    }
    link.make_ready()?;
    let mut batch = Batch::default();
    for command in transaction::at_level(level, || transaction::enter(link))? {
        batch.command(&command);
    }
    batch.parse(b"", write.sql(), &[]);
    batch.describe_statement(b"");
    let name = std::ffi::CString::new(remote_table(relation)).unwrap_or_default();
    let literal = std::ffi::CStr::from_ptr(pg_sys::quote_literal_cstr(name.as_ptr())).to_bytes();
    batch.command(&[TAKES_COPY, literal, b"::pg_catalog.regclass"].concat());
    batch.sync();
    link.remote.wrote.set(true);
    let busy = link.begin(&batch)?;
    let (mut found, mut failure, mut body) = (Found::default(), None, Vec::new());
    loop {
        match link.receive_or(&mut body, &mut Patience::Interruptible, &failure)? {
            b't' => found.has_our_types = same_types(write.types(), &decode::parameter_types(&body)),
            b'D' => found.takes_copy = decode::values(&body).next().flatten() == Some(b"t"),
            b'E' => failure = failure.or_else(|| Some(link.error(&body))),
            b'Z' => break,
            _ => {}
        }
    }
    busy.hand_over();
    link.tell_notices();
    if let Some(failure) = failure {
        return Err(transaction::after_failure(link, failure));
    }
    link.remote.tables.borrow_mut().insert(key, found);
    Ok(found)
}

fn same_types(ours: &[pg_sys::Oid], theirs: &[pg_sys::Oid]) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(own, other)| *own == pg_sys::InvalidOid || own == other)
}
