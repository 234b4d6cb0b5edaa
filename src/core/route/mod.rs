//! Which shards a statement can touch: the edge describes the statement in plain values, this module decides.
//!
//! A statement is a tree of query levels ([`Level`]). Each level has a join tree ([`Node`]) whose leaves are tables of
//! ours ([`Node::Table`]), derived tables and things that do not matter here; conditions are [`Fact`]s about columns.
//! For every reference to a logical table the decision is a [`Reach`]: the keys that its rows must have to matter to
//! the result. What always holds: a row left out by a `Reach` could not have changed the result; where that cannot be
//! shown, the reach is [`Reach::Everywhere`], with the reason.
//!
//! How facts travel: down into a leaf come the WHERE of its level, the ON of joins that it must pass, and the facts of
//! its inner-joined siblings; never the ON of an outer join into its preserved side. A subquery in an expression hears
//! all that its level knows about the outer row. Read next: [`solve`] for one table's facts, [`travel`] for the tree,
//! [`reason`] for what the user is told.

mod reason;
mod solve;
mod travel;

use std::collections::BTreeSet;

pub use reason::{Reason, Spread};
pub use travel::decide;

/// The step of the ladder that a statement takes (DESIGN.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// The whole statement on one shard.
    Routed,
    /// One shard, in place of the logical table.
    Substituted,
    /// Some shards, or one that is only known when the statement starts.
    Narrowed,
    /// Rows that each go to their own shard: INSERT of many rows, INSERT .. SELECT.
    Distributed,
    /// All shards.
    FanOut,
}

impl Step {
    /// The step's name in views and notes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::Substituted => "substituted",
            Self::Narrowed => "narrowed",
            Self::Distributed => "distributed",
            Self::FanOut => "fan_out",
        }
    }

    /// Reads [`Step::as_str`].
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let all = [Self::Routed, Self::Substituted, Self::Narrowed, Self::Distributed, Self::FanOut];
        all.into_iter().find(|step| step.as_str() == name)
    }

    /// The step in a few words, for EXPLAIN.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Routed => "whole on one shard",
            Self::Substituted => "one shard, in place of the logical table",
            Self::Narrowed => "only the shards of the keys named",
            Self::Distributed => "each row to its own shard",
            Self::FanOut => "all shards",
        }
    }
}

/// A column of one table reference in one query level; the edge numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Column(pub u32);

/// What a column is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A value known while planning: its canonical text.
    Known(Vec<u8>),
    /// NULL: nothing equals it.
    Null,
    /// A value (or an array of them) that is the same for the whole statement but known only when it starts: a parameter
    /// of a generic plan, a stable function. The edge's own number for it.
    Deferred(u32),
    /// A value that may differ from row to row, or whose equality is not the key's.
    Unknown,
}

/// A condition that rows must satisfy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Both columns are equal (and neither is NULL).
    Same(Column, Column),
    /// Both columns hold the same value, which may be NULL: an output of a derived table and the column behind it.
    Link(Column, Column),
    /// The column equals one of the values.
    Is(Column, Vec<Operand>),
    /// The column is at least the value.
    AtLeast(Column, Operand),
    /// The column is at most the value.
    AtMost(Column, Operand),
    /// All of them hold.
    All(Vec<Fact>),
    /// At least one of them holds.
    Any(Vec<Fact>),
    /// No row passes.
    Never,
    /// Something else, which mentions these columns.
    Other(Vec<Column>),
}

/// A reference to a logical table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRef {
    /// The edge's own number for it; results come back under it.
    pub id: usize,
    /// Its key column.
    pub key: Column,
}

/// How two sides of a join are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// Rows of both sides must match.
    Inner,
    /// Rows of the left side stay without a match.
    Left,
    /// Rows of both sides stay without a match.
    Full,
}

/// A node of a level's join tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A reference to a logical table, with the conditions that row security puts on it.
    Table(TableRef, Vec<Fact>),
    /// A subquery, view or CTE in FROM.
    Derived(Derived),
    /// A join of two nodes. A right join is a left join with its sides swapped.
    Join(Join, Box<Node>, Box<Node>, Vec<Fact>),
    /// Nodes that are all joined, and the conditions on them.
    From(Vec<Node>, Vec<Fact>),
    /// A local table, function, VALUES: nothing to decide.
    Local,
}

/// A query whose rows a level reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Derived {
    /// The queries whose rows it holds: one, or the arms of a set operation.
    pub arms: Vec<Level>,
    /// Output columns as the outer level numbers them, with the arms' own columns behind each (`None`: an expression).
    pub outputs: Vec<Output>,
}

/// One output column of a [`Derived`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The column as the outer level sees it.
    pub outer: Column,
    /// The column behind it in each arm.
    pub inner: Vec<Option<Column>>,
    /// Whether a condition on the column may be checked inside: no LIMIT, window or aggregate stands in between.
    pub open: bool,
}

/// A subquery in an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sublink {
    /// The subquery's arms.
    pub arms: Vec<Level>,
    /// Whether the level's rows must find a row in it: EXISTS or `= ANY` as a condition by itself in WHERE.
    pub required: bool,
    /// For `outer = ANY (subquery)`: the outer column and the subquery's own output column.
    pub equal: Option<(Column, Column)>,
    /// Whether it is computed after the level's rows have been changed (UPDATE .. RETURNING, a policy's check): what held
    /// for the old row need not hold for the new one.
    pub after: bool,
}

/// One query level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The join tree, WHERE included.
    pub from: Node,
    /// Subqueries in expressions.
    pub sublinks: Vec<Sublink>,
    /// CTEs that are read more than once, write, or recurse: each stands for itself.
    pub apart: Vec<Derived>,
    /// Whether it yields a row even if no row passes its conditions: it aggregates without GROUP BY.
    pub always_yields: bool,
}

impl Level {
    /// Whether a subquery that may run again and again has a subquery of its own: one inside another, or inside a derived
    /// table. The whole statement is the one arm, or the arms, of the derived table that this level is.
    #[must_use]
    pub fn nests_subqueries(&self) -> bool {
        let mut derived = Vec::new();
        self.from.derived(&mut derived);
        derived.into_iter().flat_map(|derived| &derived.arms).any(|statement| {
            let mut inner = Vec::new();
            statement.from.derived(&mut inner);
            let derived = inner.into_iter().chain(&statement.apart).flat_map(|derived| &derived.arms);
            statement.sublinks.iter().flat_map(|sublink| &sublink.arms).chain(derived).any(Self::has_subqueries)
        })
    }

    fn has_subqueries(&self) -> bool {
        let mut derived = Vec::new();
        self.from.derived(&mut derived);
        let derived = derived.into_iter().chain(&self.apart).flat_map(|derived| &derived.arms);
        !self.sublinks.is_empty() || derived.into_iter().any(Self::has_subqueries)
    }
}

impl Node {
    /// Collects the derived tables of a join tree.
    fn derived<'a>(&'a self, found: &mut Vec<&'a Derived>) {
        match self {
            Self::Derived(derived) => found.push(derived),
            Self::Join(_, left, right, _) => {
                left.derived(found);
                right.derived(found);
            }
            Self::From(items, _) => items.iter().for_each(|item| item.derived(found)),
            Self::Table(..) | Self::Local => {}
        }
    }
}

/// The keys whose rows can matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// These keys (canonical texts, sorted, each once); none means that no row can matter.
    Keys(Vec<Vec<u8>>),
    /// The keys are named, but some are known only when the statement starts.
    Deferred(Late),
    /// Any key, and why.
    Everywhere(Reason),
}

/// Keys of which some are known only when the statement starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Late {
    /// The numbers of the values that will be known then.
    pub values: BTreeSet<u32>,
    /// The keys known already.
    pub keys: BTreeSet<Vec<u8>>,
}

#[cfg(test)]
mod tests;
