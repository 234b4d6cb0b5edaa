//! Conditions of a statement, read into the core's facts.
//!
//! What always holds: a fact says no more than its expression does. Whatever is not understood becomes
//! [`Fact::Other`]. Values are simplified as the planner will simplify them, with the parameters it was given.

use pgrx::pg_sys;
use shardmap_core::route::{Column, Fact, Operand};

use super::columns::{comparable, is_deterministic, is_equality, strip, Side};
use super::read::Reader;
use super::tree::{cast, items, nth, tag, walk_expression};
use crate::pg::keys::KeyType;

impl Reader<'_> {
    /// The facts of a condition: of its conjuncts, if it is an AND or a list.
    ///
    /// # Safety
    /// `node` must be NULL or an expression of the innermost level.
    pub unsafe fn facts(&mut self, node: *mut pg_sys::Node) -> Vec<Fact> {
        match tag(node) {
            pg_sys::NodeTag::T_Invalid => Vec::new(),
            pg_sys::NodeTag::T_List => {
                items::<pg_sys::Node>(node.cast()).collect::<Vec<_>>().into_iter().flat_map(|n| self.facts(n)).collect()
            }
            pg_sys::NodeTag::T_BoolExpr
                if (*node.cast::<pg_sys::BoolExpr>()).boolop == pg_sys::BoolExprType::AND_EXPR =>
            {
                self.facts((*node.cast::<pg_sys::BoolExpr>()).args.cast())
            }
            _ => vec![self.fact(node)],
        }
    }

    unsafe fn fact(&mut self, node: *mut pg_sys::Node) -> Fact {
        let known = match tag(node) {
            pg_sys::NodeTag::T_OpExpr => self.comparison(node.cast()),
            pg_sys::NodeTag::T_ScalarArrayOpExpr => self.membership(node.cast()),
            pg_sys::NodeTag::T_BoolExpr
                if (*node.cast::<pg_sys::BoolExpr>()).boolop == pg_sys::BoolExprType::OR_EXPR =>
            {
                let arms: Vec<_> = items::<pg_sys::Node>((*node.cast::<pg_sys::BoolExpr>()).args).collect();
                Some(Fact::Any(arms.into_iter().map(|arm| Fact::All(self.facts(arm))).collect()))
            }
            pg_sys::NodeTag::T_Const => {
                let constant = &*node.cast::<pg_sys::Const>();
                let is_false = constant.constisnull || constant.constvalue.value() == 0;
                (constant.consttype == pg_sys::BOOLOID && is_false).then_some(Fact::Never)
            }
            _ => None,
        };
        match known {
            Some(fact) => fact,
            None => Fact::Other(self.mentioned(node)),
        }
    }

    /// `a = b`, `a >= value`, `a <= value`, either way round.
    unsafe fn comparison(&mut self, op: *mut pg_sys::OpExpr) -> Option<Fact> {
        let (left, right) = (nth::<pg_sys::Node>((*op).args, 0)?, nth::<pg_sys::Node>((*op).args, 1)?);
        if is_equality((*op).opno, (*op).inputcollid) {
            return match (self.side(left), self.side(right)) {
                (Some(a), Some(b)) => comparable(a.kind, b.kind).then_some(Fact::Same(a.column, b.column)),
                (Some(a), None) => self.equals(op, a, right, 1),
                (None, Some(b)) => self.equals(op, b, left, 0),
                (None, None) => None,
            };
        }
        if (*op).opno.to_u32() >= pg_sys::FirstNormalObjectId || !is_deterministic((*op).inputcollid) {
            return None;
        }
        let name = pg_sys::get_opname((*op).opno);
        if name.is_null() {
            return None;
        }
        let name = std::ffi::CStr::from_ptr(name).to_bytes();
        let (side, value, at_least) = match (self.side(left), self.side(right), name) {
            (Some(side), None, b">=") => (side, right, true),
            (Some(side), None, b"<=") => (side, right, false),
            (None, Some(side), b">=") => (side, left, false),
            (None, Some(side), b"<=") => (side, left, true),
            _ => return None,
        };
        let operand = self.operand(side, value);
        Some(match at_least {
            true => Fact::AtLeast(side.column, operand),
            false => Fact::AtMost(side.column, operand),
        })
    }

    unsafe fn equals(
        &mut self,
        op: *mut pg_sys::OpExpr,
        side: Side,
        value: *mut pg_sys::Node,
        value_at: usize,
    ) -> Option<Fact> {
        if side.bare && self.is_initplan(side, value) {
            return Some(Fact::Is(side.column, vec![self.deferred(std::ptr::null_mut())]));
        }
        let operand = self.operand(side, value);
        let operands = vec![operand];
        self.understood.note(op.cast(), nth((*op).args, 1 - value_at), &operands, &[value]);
        Some(Fact::Is(side.column, operands))
    }

    /// `a = ANY (array)`, `a IN (list)`.
    unsafe fn membership(&mut self, op: *mut pg_sys::ScalarArrayOpExpr) -> Option<Fact> {
        if !(*op).useOr || !is_equality((*op).opno, (*op).inputcollid) {
            return None;
        }
        let column = nth::<pg_sys::Node>((*op).args, 0);
        let side = self.side(column?)?;
        let array = nth::<pg_sys::Node>((*op).args, 1)?;
        // Elements of another kind may be equal without having one text.
        KeyType::of(pg_sys::get_base_element_type(pg_sys::exprType(array)))
            .filter(|t| comparable(side.kind, t.kind))?;
        if let Some(list) = cast::<pg_sys::ArrayExpr>(array, pg_sys::NodeTag::T_ArrayExpr) {
            if (*list).multidims {
                return None;
            }
            let elements: Vec<_> = items::<pg_sys::Node>((*list).elements).collect();
            let operands: Vec<_> = elements.iter().map(|element| self.operand(side, *element)).collect();
            self.understood.note(op.cast(), column, &operands, &elements);
            return Some(Fact::Is(side.column, operands));
        }
        let operands = match self.simplified(array)? {
            Value::Constant(constant) => array_elements(constant)?,
            Value::Deferred(node) => vec![self.deferred(node)],
        };
        self.understood.note(op.cast(), column, &operands, &[array]);
        Some(Fact::Is(side.column, operands))
    }

    /// The column that `node` is, as an operator sees it.
    unsafe fn side(&mut self, node: *mut pg_sys::Node) -> Option<Side> {
        self.columns.side(node, &self.levels)
    }

    /// What `node` is worth as a value that `side` is compared with.
    pub unsafe fn operand(&mut self, side: Side, node: *mut pg_sys::Node) -> Operand {
        match KeyType::of(pg_sys::exprType(node)) {
            Some(value_type) if comparable(side.kind, value_type.kind) => {}
            _ => return Operand::Unknown,
        }
        self.value(node)
    }

    /// What `node` is worth by itself, by its own type.
    pub unsafe fn value(&mut self, node: *mut pg_sys::Node) -> Operand {
        match self.simplified(node) {
            None => Operand::Unknown,
            Some(Value::Deferred(node)) => self.deferred(node),
            Some(Value::Constant(constant)) if (*constant).constisnull => Operand::Null,
            Some(Value::Constant(constant)) => match KeyType::of((*constant).consttype) {
                Some(key_type) => Operand::Known(key_type.with_canonical((*constant).constvalue, <[u8]>::to_vec)),
                None => Operand::Unknown,
            },
        }
    }

    /// Whether `node` is a subquery that depends on no row: it runs once, and Postgres itself prunes by its value, if that
    /// is of the column's own kind.
    unsafe fn is_initplan(&self, side: Side, node: *mut pg_sys::Node) -> bool {
        if KeyType::of(pg_sys::exprType(node)).is_none_or(|value| value.kind != side.kind) {
            return false;
        }
        let Some(link) = cast::<pg_sys::SubLink>(strip(node), pg_sys::NodeTag::T_SubLink) else { return false };
        (*link).subLinkType == pg_sys::SubLinkType::EXPR_SUBLINK
            && !pg_sys::contain_volatile_functions(node)
            && (0..self.levels.len()).all(|level| !pg_sys::contain_vars_of_level(node, level as i32))
    }

    fn deferred(&mut self, node: *mut pg_sys::Node) -> Operand {
        self.values.push(node);
        Operand::Deferred(self.values.len() as u32 - 1)
    }

    /// `node` simplified as the planner will do it; `None` if it depends on a row or may change while the statement
    /// runs.
    unsafe fn simplified(&mut self, node: *mut pg_sys::Node) -> Option<Value> {
        if let Some(constant) = cast::<pg_sys::Const>(node, pg_sys::NodeTag::T_Const) {
            return Some(Value::Constant(constant));
        }
        let mut depends = false;
        walk_expression(node, &mut |below| {
            let varies = [
                pg_sys::NodeTag::T_Var,
                pg_sys::NodeTag::T_SubLink,
                pg_sys::NodeTag::T_Aggref,
                pg_sys::NodeTag::T_WindowFunc,
                pg_sys::NodeTag::T_GroupingFunc,
                pg_sys::NodeTag::T_SetToDefault,
                pg_sys::NodeTag::T_CurrentOfExpr,
            ];
            let internal = match cast::<pg_sys::Param>(below, pg_sys::NodeTag::T_Param) {
                Some(param) => (*param).paramkind != pg_sys::ParamKind::PARAM_EXTERN,
                None => false,
            };
            depends |= internal || varies.contains(&tag(below));
            !depends
        });
        if depends || pg_sys::contain_volatile_functions(node) || pg_sys::expression_returns_set(node) {
            return None;
        }
        let simple = pg_sys::eval_const_expressions(self.planner(), node);
        Some(match cast::<pg_sys::Const>(simple, pg_sys::NodeTag::T_Const) {
            Some(constant) => Value::Constant(constant),
            None => Value::Deferred(simple),
        })
    }

    /// The columns of this level or outer ones that an expression mentions, subqueries aside.
    unsafe fn mentioned(&mut self, node: *mut pg_sys::Node) -> Vec<Column> {
        let mut vars = Vec::new();
        walk_expression(node, &mut |below| {
            vars.extend(cast::<pg_sys::Var>(below, pg_sys::NodeTag::T_Var));
            true
        });
        vars.into_iter().filter_map(|var| self.columns.of_var(var, &self.levels)).collect()
    }
}

enum Value {
    Constant(*mut pg_sys::Const),
    Deferred(*mut pg_sys::Node),
}

/// The elements of a constant array.
unsafe fn array_elements(constant: *const pg_sys::Const) -> Option<Vec<Operand>> {
    if (*constant).constisnull {
        return Some(vec![Operand::Null]);
    }
    let elements = crate::pg::keys::array_elements((*constant).consttype, (*constant).constvalue)?;
    Some(elements.into_iter().map(|key| key.map_or(Operand::Null, Operand::Known)).collect())
}
