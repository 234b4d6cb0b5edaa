//! Conditions whose values are known only when the statement starts, made such that a shard can check them.
//!
//! postgres_fdw sends no stable function to a shard: of `k = current_setting(..)`, or of a list or an OR with one in it,
//! every row would be fetched and checked here. So a condition that it implies is put beside it, in which each such value
//! is the result of a subquery: computed once, and sent as a parameter. The original stays, since Postgres prunes
//! partitions by it before any shard is asked.
//!
//! What always holds: the condition added is true wherever the original is. It is made of comparisons that the reader has
//! understood, which raise no error and have no effects, and of nothing else.

use pgrx::pg_sys;
use shardmap_core::route::Operand;

use super::columns::strip;
use super::tree::{cast, items, nth, tag};

/// A condition to put beside a whole one: a WHERE, an ON, or that of a row security policy.
pub struct Late {
    pub query: *mut pg_sys::Query,
    /// Where the whole condition hangs.
    pub whole: *mut *mut pg_sys::Node,
    pub condition: Condition,
}

/// A condition that a part of the whole implies.
pub enum Condition {
    /// A comparison of a column with a value or an array.
    Comparison {
        node: *mut pg_sys::Node,
        is_late: bool,
        table: (i32, u32),
    },
    All(Vec<Condition>),
    Any(Vec<Condition>),
}

/// The comparisons of one condition that the reader has understood.
#[derive(Default)]
pub struct Understood(Vec<(*mut pg_sys::Node, bool, (i32, u32))>);

impl Understood {
    /// Notes that `node` compares `column` with `values`, which are worth `operands`.
    ///
    /// # Safety
    /// All must be valid expressions.
    pub unsafe fn note(
        &mut self,
        node: *mut pg_sys::Node,
        column: Option<*mut pg_sys::Node>,
        operands: &[Operand],
        values: &[*mut pg_sys::Node],
    ) {
        let Some(var) = column.and_then(|column| cast::<pg_sys::Var>(strip(column), pg_sys::NodeTag::T_Var)) else {
            return;
        };
        if operands.contains(&Operand::Unknown) {
            return;
        }
        // A parameter alone is sent as it is.
        let sendable = |value: &*mut pg_sys::Node| {
            matches!(tag(strip(*value)), pg_sys::NodeTag::T_Param | pg_sys::NodeTag::T_Const)
        };
        let is_late =
            operands.iter().any(|operand| matches!(operand, Operand::Deferred(_))) && !values.iter().all(sendable);
        self.0.push((node, is_late, ((*var).varno, (*var).varlevelsup)));
    }

    /// What `node` implies, if there is anything late in it.
    ///
    /// # Safety
    /// `node` must be a part of the condition of which the comparisons have been noted.
    pub unsafe fn late(&self, node: *mut pg_sys::Node) -> Option<Condition> {
        self.implied(node).filter(Condition::is_late)
    }

    unsafe fn implied(&self, node: *mut pg_sys::Node) -> Option<Condition> {
        if let Some((node, is_late, table)) = self.0.iter().find(|known| known.0 == node).copied() {
            return Some(Condition::Comparison { node, is_late, table });
        }
        let parts = cast::<pg_sys::BoolExpr>(node, pg_sys::NodeTag::T_BoolExpr)?;
        let implied = items((*parts).args).map(|part| self.implied(part));
        match (*parts).boolop {
            pg_sys::BoolExprType::AND_EXPR => {
                Some(implied.flatten().collect::<Vec<_>>()).filter(|all| !all.is_empty()).map(Condition::All)
            }
            pg_sys::BoolExprType::OR_EXPR => {
                let any = Condition::Any(implied.collect::<Option<_>>()?);
                // Arms about several tables can be checked on no shard.
                let mut tables = Vec::new();
                any.tables(&mut tables);
                tables.windows(2).all(|pair| pair[0] == pair[1]).then_some(any)
            }
            _ => None,
        }
    }
}

impl Condition {
    fn is_late(&self) -> bool {
        match self {
            Self::Comparison { is_late, .. } => *is_late,
            Self::All(parts) | Self::Any(parts) => parts.iter().any(Self::is_late),
        }
    }

    fn tables(&self, found: &mut Vec<(i32, u32)>) {
        match self {
            Self::Comparison { table, .. } => found.push(*table),
            Self::All(parts) | Self::Any(parts) => parts.iter().for_each(|part| part.tables(found)),
        }
    }

    /// The condition as an expression, with late values as results of subqueries.
    unsafe fn build(&self) -> Option<*mut pg_sys::Node> {
        let built = |parts: &[Self]| parts.iter().map(|part| part.build()).collect::<Option<Vec<_>>>();
        match self {
            Self::Comparison { node, is_late: false, .. } => Some(pg_sys::copyObjectImpl(node.cast()).cast()),
            Self::Comparison { node, .. } => match tag(*node) {
                pg_sys::NodeTag::T_OpExpr => is_one_of(node.cast()),
                _ => any_of(node.cast()),
            },
            Self::All(parts) => Some(pg_sys::make_andclause(list_of(&built(parts)?)).cast()),
            Self::Any(parts) => Some(pg_sys::make_orclause(list_of(&built(parts)?)).cast()),
        }
    }
}

/// Puts the condition beside the whole.
///
/// # Safety
/// `late` must have been read from a query that has not been changed since, except by this function and `substitute`.
pub unsafe fn send_as_value(late: &Late) {
    let Some(condition) = late.condition.build() else { return };
    *late.whole = pg_sys::make_andclause(list_of(&[*late.whole, condition])).cast();
    (*late.query).hasSubLinks = true;
}

/// `column = ANY (ARRAY[(SELECT value)])` for `column = value`. (As a plain equality it would join the other's equivalence
/// class, and pruning would be lost.)
unsafe fn is_one_of(equality: *mut pg_sys::OpExpr) -> Option<*mut pg_sys::Node> {
    let (left, right) = (nth::<pg_sys::Node>((*equality).args, 0)?, nth::<pg_sys::Node>((*equality).args, 1)?);
    let column_first = tag(strip(left)) == pg_sys::NodeTag::T_Var;
    let (column, value, operator) = match column_first {
        true => (left, right, (*equality).opno),
        false => (right, left, pg_sys::get_commutator((*equality).opno)),
    };
    if operator == pg_sys::InvalidOid {
        return None;
    }
    let array = array_of_value(pg_sys::copyObjectImpl(value.cast()).cast())?;
    let any = pgrx::PgBox::<pg_sys::ScalarArrayOpExpr>::alloc_node(pg_sys::NodeTag::T_ScalarArrayOpExpr).into_pg();
    (*any).opno = operator;
    (*any).opfuncid = pg_sys::get_opcode(operator);
    (*any).useOr = true;
    (*any).inputcollid = (*equality).inputcollid;
    (*any).args = list_of(&[pg_sys::copyObjectImpl(column.cast()).cast(), array.cast()]);
    (*any).location = -1;
    Some(any.cast())
}

/// `column = ANY ((SELECT array))` for `column = ANY (array)`.
unsafe fn any_of(membership: *mut pg_sys::ScalarArrayOpExpr) -> Option<*mut pg_sys::Node> {
    let any = pg_sys::copyObjectImpl(membership.cast()).cast::<pg_sys::ScalarArrayOpExpr>();
    let (column, array) = (nth::<pg_sys::Node>((*any).args, 0)?, nth::<pg_sys::Node>((*any).args, 1)?);
    (*any).args = list_of(&[column, select_value(array).cast()]);
    Some(any.cast())
}

unsafe fn list_of(nodes: &[*mut pg_sys::Node]) -> *mut pg_sys::List {
    nodes.iter().fold(std::ptr::null_mut(), |list, node| pg_sys::lappend(list, (*node).cast()))
}

/// `ARRAY[(SELECT value)]`.
unsafe fn array_of_value(value: *mut pg_sys::Node) -> Option<*mut pg_sys::ArrayExpr> {
    let element = pg_sys::exprType(value);
    let array_type = pg_sys::get_array_type(element);
    if array_type == pg_sys::InvalidOid {
        return None;
    }
    let array = pgrx::PgBox::<pg_sys::ArrayExpr>::alloc_node(pg_sys::NodeTag::T_ArrayExpr).into_pg();
    (*array).array_typeid = array_type;
    (*array).array_collid = pg_sys::exprCollation(value);
    (*array).element_typeid = element;
    (*array).elements = list_of(&[select_value(value).cast()]);
    (*array).location = -1;
    Some(array)
}

/// `(SELECT value)`.
unsafe fn select_value(value: *mut pg_sys::Node) -> *mut pg_sys::SubLink {
    let query = pgrx::PgBox::<pg_sys::Query>::alloc_node(pg_sys::NodeTag::T_Query).into_pg();
    let target = pg_sys::makeTargetEntry(value.cast(), 1, pg_sys::pstrdup(c"value".as_ptr()), false);
    (*query).commandType = pg_sys::CmdType::CMD_SELECT;
    (*query).canSetTag = true;
    (*query).targetList = list_of(&[target.cast()]);
    (*query).jointree = pg_sys::makeFromExpr(std::ptr::null_mut(), std::ptr::null_mut());
    let link = pgrx::PgBox::<pg_sys::SubLink>::alloc_node(pg_sys::NodeTag::T_SubLink).into_pg();
    (*link).subLinkType = pg_sys::SubLinkType::EXPR_SUBLINK;
    (*link).subselect = query.cast();
    (*link).location = -1;
    link
}
