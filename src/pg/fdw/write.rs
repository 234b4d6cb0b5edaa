//! Rows written one by one, or many in one statement.
//!
//! Decides how many rows of an INSERT go together. What always holds: a row reported as written was written on the
//! shard, or an error is raised. Read next: [`super::modify`] for what may be written where.

use std::collections::HashMap;
use std::rc::Rc;

use pgrx::pg_sys::{self, Datum};

use super::private::WritePlan;
use super::shard::{connect, statement};
use super::tuples::{types, Rows};
use crate::pg::raw::attribute;
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::remote::portal::{Portal, Request};
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::wire::encode::{Params, Values};
use crate::pg::remote::Connection;
use crate::pg::transfer::declared;
use crate::pg::transfer::encode::Parameter;
use crate::pg::transfer::settings::{PlainOutput, Settings};

/// The protocol's limit of parameters. Source: libpq-fe.h, `PQ_QUERY_PARAM_MAX_LIMIT`.
pub const MAX_PARAMS: i32 = 65_535;

/// The state of a row modification that has begun.
pub struct Write {
    connection: Connection,
    plan: WritePlan,
    /// The columns whose values are sent, and how.
    sent: Vec<(i16, Parameter)>,
    types: Vec<pg_sys::Oid>,
    rows: Rows,
    needs: Needs,
    /// Where a row to be changed brings its ctid along.
    ctid: Option<(i16, Parameter)>,
    /// By the number of rows that they insert.
    statements: HashMap<usize, Rc<Statement>>,
    row: Vec<u8>,
    settings: Settings,
    /// For what is computed for one row.
    scratch: pg_sys::MemoryContext,
    allocates: bool,
}

impl Write {
    /// # Safety
    /// `result` must be the open target of a running statement, in whose memory context this is called; `ctid` is the
    /// position of the rows' ctid in the plan's result, for UPDATE and DELETE.
    pub unsafe fn begin(
        result: *mut pg_sys::ResultRelInfo,
        server: pg_sys::Oid,
        user: pg_sys::Oid,
        plan: WritePlan,
        ctid: Option<i16>,
    ) -> Result<Self> {
        let desc = (*(*result).ri_RelationDesc).rd_att;
        let kinds = types(desc);
        let retrieved = if plan.has_returning { plan.retrieved.as_slice() } else { &[] };
        let rows = Rows::new(desc, retrieved, &kinds);
        // The SQL says DEFAULT for what the shard generates.
        let given = plan.targets.iter().filter(|number| attribute(desc, **number as usize - 1).attgenerated == 0);
        let given: Vec<i16> = given.copied().collect();
        let mut types: Vec<_> = given.iter().map(|number| declared(kinds[*number as usize - 1].0)).collect();
        let ctid = ctid.map(|at| (at, Parameter::new(pg_sys::TIDOID)));
        if ctid.is_some() {
            types.insert(0, pg_sys::TIDOID);
        }
        let scratch = pg_sys::AllocSetContextCreateInternal(
            pg_sys::CurrentMemoryContext,
            c"shardmap row".as_ptr(),
            pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
            pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
            pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
        );
        let mut write = Self {
            connection: connect(server, user)?,
            plan,
            sent: Vec::new(),
            types,
            needs: rows.needs(),
            rows,
            ctid,
            statements: HashMap::new(),
            row: Vec::new(),
            settings: Settings::default(),
            scratch,
            allocates: false,
        };
        write.send(given.iter().map(|number| (*number, Parameter::new(kinds[*number as usize - 1].0))).collect());
        Ok(write)
    }

    /// Sends these columns' values so.
    fn send(&mut self, sent: Vec<(i16, Parameter)>) {
        let parameters = || sent.iter().map(|(_, parameter)| parameter);
        self.settings = parameters().map(Parameter::settings).fold(Settings::default(), Settings::and);
        self.allocates = parameters().any(Parameter::allocates);
        self.sent = sent;
    }

    /// Sends all values as text from now on.
    ///
    /// # Safety
    /// `desc` must be the target's.
    pub unsafe fn send_text(&mut self, desc: pg_sys::TupleDesc) {
        // The type's functions are kept in the memory of the statement.
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::MemoryContextGetParent(self.scratch));
        let text = |number: i16| (number, Parameter::text(attribute(desc, number as usize - 1).atttypid));
        let sent = self.sent.iter().map(|(number, _)| text(*number)).collect();
        self.send(sent);
        pg_sys::MemoryContextSwitchTo(before);
    }

    /// Whether all values can be sent in binary.
    pub fn is_binary(&self) -> bool {
        self.sent.iter().all(|(_, parameter)| parameter.is_binary())
    }

    /// The columns whose values are sent.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = i16> + '_ {
        self.sent.iter().map(|(number, _)| *number)
    }

    /// The types that their parameters are declared with.
    pub fn types(&self) -> &[pg_sys::Oid] {
        &self.types
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The INSERT of one row.
    pub fn sql(&self) -> &[u8] {
        &self.plan.sql
    }

    /// Inserts the rows of `slots`, and returns how many the shard has taken; the returned row, if there is one, is put
    /// into the first slot.
    ///
    /// # Safety
    /// `slots` must be of the target's row type.
    pub unsafe fn insert(&mut self, slots: &[*mut pg_sys::TupleTableSlot]) -> Result<u64> {
        let mut params = Params::default();
        self.scratched(|own| {
            for slot in slots {
                own.push_values(*slot, &mut params);
            }
        });
        let statement = self.statement(slots.len());
        self.run(statement, params, slots[0])
    }

    /// Updates or deletes the row that `plan_slot` tells the ctid of; for an update with the values of `slot`.
    ///
    /// # Safety
    /// As [`Write::insert`]; `plan_slot` must hold the plan's result.
    pub unsafe fn change(
        &mut self,
        slot: *mut pg_sys::TupleTableSlot,
        plan_slot: *mut pg_sys::TupleTableSlot,
        gives_values: bool,
    ) -> Result<u64> {
        let mut params = Params::default();
        self.scratched(|own| {
            if let Some((at, parameter)) = &mut own.ctid {
                parameter.push(value(plan_slot, *at), &mut params);
            }
            if gives_values {
                own.push_values(slot, &mut params);
            }
        });
        let statement = self.statement(1);
        self.run(statement, params, slot)
    }

    unsafe fn run(
        &mut self,
        statement: Rc<Statement>,
        params: Params,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> Result<u64> {
        let portal = self.start(statement, params)?;
        let mut returned = 0;
        while portal.next(&mut self.row)? {
            returned += 1;
            if returned == 1 {
                self.returned(slot)?;
            }
        }
        Ok(if self.plan.has_returning { returned } else { portal.affected() })
    }

    fn start(&self, statement: Rc<Statement>, params: Params) -> Result<Rc<Portal>> {
        let needs = self.needs;
        self.connection.start(Request { statement, params, chunk: 0, begin: true, writes: true, needs, commits: false })
    }

    /// Adds the values of a row of `slot`.
    ///
    /// # Safety
    /// As [`Write::insert`].
    pub unsafe fn push(&mut self, slot: *mut pg_sys::TupleTableSlot, values: &mut impl Values) {
        self.scratched(|own| own.push_values(slot, values));
    }

    /// Sends the INSERT of so many rows, and does not wait for its outcome.
    pub fn start_insert(&mut self, params: Params, rows: usize) -> Result<Rc<Portal>> {
        let statement = self.statement(rows);
        self.start(statement, params)
    }

    /// Puts the row just read into `slot`.
    unsafe fn returned(&mut self, slot: *mut pg_sys::TupleTableSlot) -> Result<()> {
        let tuple = self.rows.form(&self.row)?;
        pg_sys::ExecForceStoreHeapTuple(tuple, slot, true);
        Ok(())
    }

    /// Runs `fill` in the memory for one row, under the settings for writing values as text where that matters.
    unsafe fn scratched(&mut self, fill: impl FnOnce(&mut Self)) {
        if !self.allocates && self.ctid.is_none() {
            return fill(self);
        }
        pg_sys::MemoryContextReset(self.scratch);
        let before = pg_sys::MemoryContextSwitchTo(self.scratch);
        let plain = PlainOutput::begin(self.settings);
        fill(self);
        drop(plain);
        pg_sys::MemoryContextSwitchTo(before);
    }

    unsafe fn push_values(&mut self, slot: *mut pg_sys::TupleTableSlot, values: &mut impl Values) {
        for (number, parameter) in &mut self.sent {
            parameter.push(value(slot, *number), values);
        }
    }

    fn statement(&mut self, rows: usize) -> Rc<Statement> {
        if let Some(known) = self.statements.get(&rows) {
            return Rc::clone(known);
        }
        let sql = if rows == 1 { self.plan.sql.clone() } else { self.many_rows(rows) };
        let types = self.types.iter().copied().cycle().take(self.types.len() * rows).collect();
        let made = statement(sql, types, self.rows.formats(), self.rows.wanted());
        self.statements.insert(rows, Rc::clone(&made));
        made
    }

    /// The INSERT of one row, made one of `rows` rows.
    fn many_rows(&self, rows: usize) -> Box<[u8]> {
        let end = usize::try_from(self.plan.values_end).unwrap_or(self.plan.sql.len());
        let (head, tail) = self.plan.sql.split_at(end);
        let mut sql = head.to_vec();
        let mut number = self.sent.len();
        for _ in 1..rows {
            sql.extend_from_slice(b", (");
            for (at, target) in self.plan.targets.iter().enumerate() {
                if at > 0 {
                    sql.extend_from_slice(b", ");
                }
                if self.sent.iter().any(|(sent, _)| sent == target) {
                    number += 1;
                    sql.extend_from_slice(format!("${number}").as_bytes());
                } else {
                    sql.extend_from_slice(b"DEFAULT");
                }
            }
            sql.push(b')');
        }
        sql.extend_from_slice(tail);
        sql.into()
    }
}

/// The value of column `number`; `None` is NULL.
unsafe fn value(slot: *mut pg_sys::TupleTableSlot, number: i16) -> Option<Datum> {
    if (*slot).tts_nvalid < number {
        pg_sys::slot_getsomeattrs_int(slot, i32::from(number));
    }
    let at = number as usize - 1;
    (!*(*slot).tts_isnull.add(at)).then(|| *(*slot).tts_values.add(at))
}
