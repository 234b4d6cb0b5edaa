//! A node's shard: the connection that it uses, and how its parameters are computed and sent.

use std::rc::Rc;

use pgrx::pg_sys::{self, Datum};

use crate::pg::query::tree::{cast, items};
use crate::pg::raw;
use crate::pg::remote::failure::Result;
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::wire::encode::Params;
use crate::pg::remote::Connection;
use crate::pg::transfer::declared;
use crate::pg::transfer::encode::Parameter;
use crate::pg::transfer::settings::{PlainOutput, Settings};

/// Connects to the foreign server of a shard as `user`.
///
/// # Safety
/// Inside a transaction.
pub unsafe fn connect(server: pg_sys::Oid, user: pg_sys::Oid) -> Result<Connection> {
    Connection::open_server(server, user)
}

/// Where a value comes from when a statement starts.
pub enum Source {
    /// It is there.
    Ready(Option<Datum>),
    /// It is computed.
    Computed(*mut pg_sys::ExprState),
}

impl Source {
    /// # Safety
    /// `expression` must belong to `parent`'s plan. In the memory context of the statement.
    pub unsafe fn of(expression: *mut pg_sys::Node, parent: *mut pg_sys::PlanState) -> Self {
        if let Some(constant) = cast::<pg_sys::Const>(expression, pg_sys::NodeTag::T_Const) {
            return Self::Ready((!(*constant).constisnull).then_some((*constant).constvalue));
        }
        if let Some(param) = cast::<pg_sys::Param>(expression, pg_sys::NodeTag::T_Param) {
            if let Some(value) = given((*(*parent).state).es_param_list_info, param) {
                return Self::Ready((!value.isnull).then_some(value.value));
            }
        }
        Self::Computed(pg_sys::ExecInitExpr(expression.cast(), parent))
    }

    /// The value; `None` is NULL.
    ///
    /// # Safety
    /// `context` must be the parent's.
    pub unsafe fn value(&self, context: *mut pg_sys::ExprContext) -> Option<Datum> {
        match self {
            Self::Ready(value) => *value,
            Self::Computed(state) => {
                let mut is_null = false;
                let value = raw::evaluate(*state, context, &mut is_null);
                (!is_null).then_some(value)
            }
        }
    }
}

/// The value that the statement was given for a parameter, if it lies ready.
unsafe fn given(list: pg_sys::ParamListInfo, param: *const pg_sys::Param) -> Option<pg_sys::ParamExternData> {
    if list.is_null()
        || (*param).paramkind != pg_sys::ParamKind::PARAM_EXTERN
        || (*list).paramFetch.is_some()
        || !(1..=(*list).numParams).contains(&(*param).paramid)
    {
        return None;
    }
    let value = *(*list).params.as_ptr().add((*param).paramid as usize - 1);
    (value.ptype == (*param).paramtype).then_some(value)
}

/// The parameters that a node computes for its statement.
pub struct Inputs {
    sources: Vec<Source>,
    parameters: Vec<Parameter>,
    pub types: Vec<pg_sys::Oid>,
}

impl Inputs {
    /// # Safety
    /// As [`Source::of`], for each of `expressions`.
    pub unsafe fn new(expressions: *mut pg_sys::List, parent: *mut pg_sys::PlanState) -> Self {
        let nodes: Vec<_> = items::<pg_sys::Node>(expressions).collect();
        let kinds: Vec<_> = nodes.iter().map(|node| pg_sys::exprType(*node)).collect();
        Self {
            sources: nodes.iter().map(|node| Source::of(*node, parent)).collect(),
            parameters: kinds.iter().map(|kind| Parameter::new(*kind)).collect(),
            types: kinds.into_iter().map(declared).collect(),
        }
    }

    /// Computes them.
    ///
    /// # Safety
    /// `context` must be the node's.
    pub unsafe fn compute(&mut self, context: *mut pg_sys::ExprContext) -> Params {
        let mut params = Params::default();
        if self.sources.is_empty() {
            return params;
        }
        let before = pg_sys::MemoryContextSwitchTo((*context).ecxt_per_tuple_memory);
        let settings = self.parameters.iter().map(Parameter::settings).fold(Settings::default(), Settings::and);
        let plain = PlainOutput::begin(settings);
        for (source, parameter) in self.sources.iter().zip(&mut self.parameters) {
            parameter.push(source.value(context), &mut params);
        }
        drop(plain);
        pg_sys::MemoryContextSwitchTo(before);
        params
    }
}

/// A statement for the shard.
pub fn statement(
    sql: Box<[u8]>,
    types: Vec<pg_sys::Oid>,
    formats: Box<[i16]>,
    wanted: Box<[pg_sys::Oid]>,
) -> Rc<Statement> {
    Rc::new(Statement { sql, types: types.into(), formats, wanted })
}
