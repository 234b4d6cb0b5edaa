//! SQL functions on shards: statements for one shard, for all, and the rows of a table to their owners.
//!
//! They are written in C's calling convention rather than with `#[pg_extern]`, so that a shard's error keeps every field
//! (see `remote::failure`). Each runs as the caller, through the caller's user mapping. Read next: `sql/remote.sql` for
//! who may call them.

use std::ffi::{CStr, CString};
use std::time::Duration;

use pgrx::pg_sys;
use pgrx::pg_sys::Datum;
use pgrx::{Array, FromDatum, PgLogLevel, PgSqlErrorCode};

use crate::pg::encoding;
use crate::pg::error::Refusal;
use crate::pg::moves::crash_here;
use crate::pg::reads::session;
use crate::pg::remote::resolve::look_around;
use crate::pg::remote::target::Target;
use crate::pg::remote::transaction::note_administration;
use crate::pg::remote::{
    ask_everywhere, ask_together, connections, copy_rows, copy_rows_to_each, guard, pipe, run_everywhere, Connection,
    Failure, Outcome, Result,
};
use crate::pg::replicas::registry;

/// The arguments of a strict function, none of which is NULL, and the place for its rows.
#[derive(Clone, Copy)]
struct Call(pg_sys::FunctionCallInfo);

impl Call {
    fn datum(self, at: usize) -> Datum {
        // SAFETY: the function was called with the arguments that sql/remote.sql declares.
        unsafe { (*self.0).args.as_slice((*self.0).nargs as usize)[at].value }
    }

    fn text(self, at: usize) -> CString {
        // SAFETY: argument `at` is declared text; the copy is NUL-terminated.
        unsafe { CStr::from_ptr(pg_sys::text_to_cstring(self.datum(at).cast_mut_ptr())).to_owned() }
    }

    /// A text argument that is a name.
    fn name(self, at: usize) -> String {
        self.text(at).to_string_lossy().into_owned()
    }

    fn flag(self, at: usize) -> bool {
        self.datum(at).value() as u8 != 0
    }

    fn names(self, at: usize) -> Result<Vec<String>> {
        // SAFETY: argument `at` is declared text[].
        let array = unsafe { Array::<String>::from_datum(self.datum(at), false) };
        array.and_then(|array| array.iter().collect::<Option<Vec<_>>>()).ok_or_else(|| {
            Failure::new(PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED, "array of names must not hold NULL")
                .hint("Remove the NULL elements.")
        })
    }

    /// Runs the text of argument 1 on the shards of argument 0, and returns a row for each.
    fn outcomes(self, run: fn(&[String], pg_sys::Oid, &CStr) -> Vec<Outcome>) -> Result<Datum> {
        let rows = self.rows();
        let sql = self.text(1);
        for outcome in run(&self.names(0)?, user(), &sql) {
            rows.put(|| {
                let shard = Some(text(outcome.shard.as_bytes()));
                match outcome.result {
                    Ok((tag, json)) => {
                        vec![shard, Some(Datum::from(true)), Some(text(tag.as_bytes())), json.and_then(jsonb), None]
                    }
                    Err(failure) => {
                        vec![shard, Some(Datum::from(false)), None, None, Some(text(failure.to_text().as_bytes()))]
                    }
                }
            });
        }
        Ok(Datum::from(0))
    }

    /// Prepares for rows. They are kept on disk if they are many.
    fn rows(self) -> Rows {
        /// Source: funcapi.h, MAT_SRF_USE_EXPECTED_DESC: also for a function that returns no row type.
        const USE_EXPECTED_DESCRIPTION: u32 = 1;
        // SAFETY: the function is declared to return a set; Postgres checks that the caller takes one.
        unsafe {
            pg_sys::InitMaterializedSRF(self.0, USE_EXPECTED_DESCRIPTION);
            let result = (*self.0).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            let scratch = pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"pg_shardmap rows".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            );
            Rows { store: (*result).setResult, description: (*result).setDesc, scratch }
        }
    }
}

/// Where a function's rows go.
struct Rows {
    store: *mut pg_sys::Tuplestorestate,
    description: pg_sys::TupleDesc,
    /// Holds the values of one row while it is put.
    scratch: pg_sys::MemoryContext,
}

impl Rows {
    /// Puts the row whose values `make` allocates.
    fn put(&self, make: impl FnOnce() -> Vec<Option<Datum>>) {
        // SAFETY: the scratch context lives as long as the function call; the tuple store copies the values.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(self.scratch);
            let row = make();
            let mut nulls: Vec<bool> = row.iter().map(Option::is_none).collect();
            let mut values: Vec<Datum> = row.into_iter().map(|value| value.unwrap_or(Datum::from(0))).collect();
            pg_sys::tuplestore_putvalues(self.store, self.description, values.as_mut_ptr(), nulls.as_mut_ptr());
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(self.scratch);
        }
    }
}

fn user() -> pg_sys::Oid {
    // SAFETY: reads a variable of the session.
    unsafe { pg_sys::GetUserId() }
}

fn text(value: &[u8]) -> Datum {
    // SAFETY: copies the bytes into the current memory context.
    Datum::from(unsafe { pg_sys::cstring_to_text_with_len(value.as_ptr().cast(), value.len() as i32) })
}

/// A row of a shard as text[].
fn text_array(row: &[Option<Box<[u8]>>]) -> Datum {
    let row: Vec<_> = row.iter().map(|value| value.as_deref().map(text)).collect();
    let mut nulls: Vec<bool> = row.iter().map(Option::is_none).collect();
    let mut values: Vec<Datum> = row.into_iter().map(|value| value.unwrap_or(Datum::from(0))).collect();
    let (mut dimension, mut lower) = (values.len() as i32, 1);
    // SAFETY: the lengths agree; text is a varlena of integer alignment.
    unsafe {
        Datum::from(if values.is_empty() {
            pg_sys::construct_empty_array(pg_sys::TEXTOID)
        } else {
            pg_sys::construct_md_array(
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
                1,
                &mut dimension,
                &mut lower,
                pg_sys::TEXTOID,
                -1,
                false,
                b'i' as _,
            )
        })
    }
}

/// JSON text as jsonb.
fn jsonb(json: Vec<u8>) -> Option<Datum> {
    let json = CString::new(json).ok()?;
    // SAFETY: jsonb_in takes a C string and returns a jsonb, or raises an error.
    unsafe { pgrx::direct_function_call_as_datum(pg_sys::jsonb_in, &[Some(Datum::from(json.as_ptr()))]) }
}

/// Declares a function for SQL, and the record by which Postgres knows its calling convention.
macro_rules! sql_function {
    ($(#[$doc:meta])* $name:ident, $info:ident, $body:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Called by Postgres' function manager with the arguments that sql/remote.sql declares.
        #[no_mangle]
        pub unsafe extern "C-unwind" fn $name(fcinfo: pg_sys::FunctionCallInfo) -> Datum {
            let body: fn(Call) -> Result<Datum> = $body;
            guard(|| body(Call(fcinfo)))
        }

        #[no_mangle]
        #[doc(hidden)]
        pub extern "C" fn $info() -> &'static pg_sys::Pg_finfo_record {
            const RECORD: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };
            &RECORD
        }
    };
}

sql_function! {
    /// `remote_execute(shard, sql, transactional)`: the command tag of the last statement.
    remote_execute_wrapper, pg_finfo_remote_execute_wrapper,
    |call| {
        note_administration();
        let connection = Connection::open(&call.name(0), user(), call.flag(2))?;
        // What is not transactional commits at once.
        if !call.flag(2) && registry::shard_of(&call.name(0)).is_none() {
            session::note_write(connection.link().target.id);
        }
        Ok(text(connection.lend(&call.text(1))?.tag.as_bytes()))
    }
}

sql_function! {
    /// `remote_rows(shard, sql, transactional)`: the rows of the last statement.
    remote_rows_wrapper, pg_finfo_remote_rows_wrapper,
    |call| {
        let rows = call.rows();
        let connection = Connection::open(&call.name(0), user(), call.flag(2))?;
        let answer = connection.lend(&call.text(1))?;
        for row in &answer.rows {
            rows.put(|| vec![Some(text_array(row))]);
        }
        Ok(Datum::from(0))
    }
}

sql_function! {
    /// `run_on_each(shards, sql)`: the statement on each of the shards, a row of result or error for each.
    run_on_each_wrapper, pg_finfo_run_on_each_wrapper,
    |call| {
        call.outcomes(run_everywhere)
    }
}

sql_function! {
    /// `_ask_each(shards, sql)`: the same for a question, in sessions that the next question of the transaction uses.
    ask_each_wrapper, pg_finfo_ask_each_wrapper,
    |call| {
        call.outcomes(ask_everywhere)
    }
}

sql_function! {
    /// `_ask_together(shards, sql)`: the first value of the last statement's first row, of each of the shards, in the local
    /// transaction.
    ask_together_wrapper, pg_finfo_ask_together_wrapper,
    |call| {
        let rows = call.rows();
        let shards = call.names(0)?;
        let open = |shard: &String| Connection::open(shard, user(), true);
        let answers = ask_together(&shards.iter().map(open).collect::<Result<Vec<_>>>()?, &call.text(1))?;
        for (shard, answer) in shards.iter().zip(&answers) {
            let value = answer.rows.first().and_then(|row| row.first()).and_then(Option::as_deref);
            rows.put(|| vec![Some(text(&encoding::server(shard))), value.map(text)]);
        }
        Ok(Datum::from(0))
    }
}

sql_function! {
    /// `copy_rows_to_shards(source, target_schema, target_table, key_column, keyspace, columns)`: the rows of a local
    /// table, each to the shard that owns it; returns the shards with their numbers of rows.
    copy_rows_to_shards_wrapper, pg_finfo_copy_rows_to_shards_wrapper,
    |call| {
        let rows = call.rows();
        let source = pg_sys::Oid::from(call.datum(0).value() as u32);
        let (schema, table, key, keyspace) = (call.name(1), call.name(2), call.name(3), call.name(4));
        note_administration();
        let counts = copy_rows(source, user(), (&schema, &table), (&key, &keyspace), &call.names(5)?)?;
        for (shard, count) in counts {
            rows.put(|| vec![Some(text(shard.as_bytes())), Some(Datum::from(count))]);
        }
        Ok(Datum::from(0))
    }
}

sql_function! {
    /// `_copy_rows_to_each(source, target_schema, target_table, shards, columns)`: the rows of a local table, all of them
    /// to each of the shards; returns the shards with their numbers of rows.
    copy_rows_to_each_wrapper, pg_finfo_copy_rows_to_each_wrapper,
    |call| {
        let rows = call.rows();
        let source = pg_sys::Oid::from(call.datum(0).value() as u32);
        let (schema, table) = (call.name(1), call.name(2));
        note_administration();
        let counts = copy_rows_to_each(source, user(), (&schema, &table), &call.names(3)?, &call.names(4)?)?;
        for (shard, count) in counts {
            rows.put(|| vec![Some(text(shard.as_bytes())), Some(Datum::from(count))]);
        }
        Ok(Datum::from(0))
    }
}

sql_function! {
    /// `_pipe_rows(source, query, target, command, keys, transactional)`: the rows of a query on one shard to a COPY of
    /// another; returns the numbers of rows and bytes, and the last row's first values.
    pipe_rows_wrapper, pg_finfo_pipe_rows_wrapper,
    |call| {
        note_administration();
        let source = Connection::open(&call.name(0), user(), true)?;
        let target = Connection::open(&call.name(2), user(), call.flag(5))?;
        let piped = pipe(&source, &call.text(1), &target, &call.text(3), call.datum(4).value())?;
        let count = |count: u64| Some(count.to_string().into_bytes().into_boxed_slice());
        let last = piped.last.into_iter().map(|value| value.map(Vec::into_boxed_slice));
        Ok(text_array(&[count(piped.rows), count(piped.bytes)].into_iter().chain(last).collect::<Vec<_>>()))
    }
}

sql_function! {
    /// `_subscribe(target, source, command, transactional)`: a command on the target in which %s stands for the way to the
    /// source.
    subscribe_wrapper, pg_finfo_subscribe_wrapper,
    |call| {
        note_administration();
        let source = Target::resolve(&call.name(1), user())?;
        if !source.pooler.keeps_session() && !source.has_peer_address() {
            let message = format!("{} stands behind a pooler, which does not replicate", source.place);
            return Err(Failure::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, message)
                .hint("Say where other shards reach it: ALTER SERVER ... OPTIONS (ADD peer_host '..', ADD peer_port '..')."));
        }
        let target = Connection::open(&call.name(0), user(), call.flag(3))?;
        target.lend(&replaced(&call.text(2), &source.connection_string()))?;
        Ok(Datum::from(0))
    }
}

/// `command` with `value`, as a literal, in the place of %s.
fn replaced(command: &CStr, value: &[u8]) -> CString {
    let command = command.to_bytes();
    let at = command.windows(2).position(|two| two == b"%s").unwrap_or(command.len());
    let value = CString::new(value).unwrap_or_default();
    // SAFETY: a C string; the literal is a copy in the current memory context.
    let literal = unsafe { CStr::from_ptr(pg_sys::quote_literal_cstr(value.as_ptr())) };
    let rest = command.get(at + 2..).unwrap_or_default();
    CString::new([&command[..at], literal.to_bytes(), rest].concat()).unwrap_or_default()
}

sql_function! {
    /// `_crash_here(name)`: a named point at which a test lets a move break.
    crash_here_wrapper, pg_finfo_crash_here_wrapper,
    |call| crash_here(&call.name(0)).map(|()| Datum::from(0))
}

sql_function! {
    /// `_prepared_transactions(resolve)`: what is prepared on the shards, and finished now if `resolve`.
    prepared_transactions_wrapper, pg_finfo_prepared_transactions_wrapper,
    |call| {
        let rows = call.rows();
        for shard in look_around(call.flag(0).then_some(Duration::ZERO))? {
            let name = || Some(text(&encoding::server(&shard.name)));
            let words = |words: &str| Some(text(&encoding::server(words)));
            match &shard.parts {
                Ok(parts) => {
                    for part in parts {
                        rows.put(|| {
                            let number = words(&part.id.whole.transaction.to_string());
                            let (id, owner) = (words(&part.id.to_string()), words(&part.owner));
                            let (at, decision) = (words(&part.prepared_at), words(part.decision.as_str()));
                            let error = part.error.as_deref().and_then(words);
                            vec![name(), id, number, owner, at, decision, Some(Datum::from(part.done)), error]
                        });
                    }
                }
                Err(failure) => rows.put(|| {
                    let error = words(&encoding::message(failure.to_text()));
                    vec![name(), None, None, None, None, None, Some(Datum::from(false)), error]
                }),
            }
        }
        Ok(Datum::from(0))
    }
}

sql_function! {
    /// `_connections()`: the connections of all sessions to the shards, and who waits for one.
    connections_wrapper, pg_finfo_connections_wrapper,
    |call| {
        let rows = call.rows();
        let figures = connections();
        if figures.is_none() {
            Refusal::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                "connections to shards are not counted on this server",
            )
            .hint("Add pg_shardmap to shared_preload_libraries and restart the server.")
            .report(PgLogLevel::NOTICE);
        }
        for shard in figures.unwrap_or_default() {
            let count = |count: u32| Some(Datum::from(count as i32));
            rows.put(|| vec![Some(Datum::from(shard.server)), count(shard.held), count(shard.waiting)]);
        }
        Ok(Datum::from(0))
    }
}
