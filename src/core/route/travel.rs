//! How facts travel through a statement: up from the leaves, down again to every table.

use std::collections::BTreeSet;

use super::solve::{mentions, reach};
use super::{Column, Derived, Fact, Join, Level, Node, Reach, Reason, Sublink};

/// The reach of every table reference of a statement, under the reference's id.
///
/// `level` is the whole statement. References come in no particular order; each comes once.
#[must_use]
pub fn decide(level: &Level) -> Vec<(usize, Reach)> {
    let mut found = Vec::new();
    visit_level(level, &[], &mut found);
    found
}

/// Facts on the way down, with those that an outer join kept out (for the reason only).
fn visit_level(level: &Level, inherited: &[&Fact], found: &mut Vec<(usize, Reach)>) {
    let mut links = Vec::new();
    level.sublinks.iter().for_each(|sublink| links.extend(required(sublink)));
    let mut known: Vec<&Fact> = inherited.to_vec();
    known.extend(links.iter());
    visit(&level.from, &known, &[], found);

    let own = facts_of(&level.from);
    known.extend(own.iter());
    for sublink in &level.sublinks {
        let equal = sublink.equal.map(|(outer, inner)| Fact::Same(outer, inner));
        // A level that yields a row from nothing, or has changed its rows, vouches for nothing.
        let mut inside = match level.always_yields || sublink.after {
            true => inherited.to_vec(),
            false => known.clone(),
        };
        inside.extend(equal.iter());
        sublink.arms.iter().for_each(|arm| visit_level(arm, &inside, found));
    }
    for derived in &level.apart {
        derived.arms.iter().for_each(|arm| visit_level(arm, &[], found));
    }
}

/// What a condition of the form EXISTS or `= ANY` says about the outer row.
fn required(sublink: &Sublink) -> Vec<Fact> {
    let [arm] = sublink.arms.as_slice() else {
        return Vec::new();
    };
    if !sublink.required || arm.always_yields {
        return Vec::new();
    }
    let mut facts = facts_of(&arm.from);
    facts.extend(sublink.equal.map(|(outer, inner)| Fact::Same(outer, inner)));
    facts
}

/// The facts that hold for every row that `node` yields.
fn facts_of(node: &Node) -> Vec<Fact> {
    match node {
        Node::Table(_, own) => own.clone(),
        Node::Local => Vec::new(),
        Node::From(items, facts) => items.iter().flat_map(facts_of).chain(facts.iter().cloned()).collect(),
        Node::Join(Join::Inner, left, right, on) => {
            facts_of(left).into_iter().chain(facts_of(right)).chain(on.iter().cloned()).collect()
        }
        Node::Join(Join::Left, left, _, _) => facts_of(left),
        Node::Join(Join::Full, ..) => Vec::new(),
        Node::Derived(derived) => match derived.arms.as_slice() {
            [arm] if !arm.always_yields => facts_of(&arm.from).into_iter().chain(links(derived, 0, false)).collect(),
            _ => Vec::new(),
        },
    }
}

/// That an output column of `derived` is a column of its arm number `arm`; with `open_only`, only those columns on
/// which a condition may be checked inside.
fn links(derived: &Derived, arm: usize, open_only: bool) -> Vec<Fact> {
    let wanted = derived.outputs.iter().filter(|output| output.open || !open_only);
    wanted.filter_map(|output| Some(Fact::Link(output.outer, (*output.inner.get(arm)?)?))).collect()
}

/// `kept_out`: facts of outer joins that do not restrict the node; they only serve the reason.
fn visit(node: &Node, inherited: &[&Fact], kept_out: &[&Fact], found: &mut Vec<(usize, Reach)>) {
    match node {
        Node::Local => {}
        Node::Table(table, own) => {
            let facts: Vec<&Fact> = inherited.iter().copied().chain(own).collect();
            let reach = match reach(table.key, &facts) {
                Reach::Everywhere(Reason::NoCondition) if is_named(table.key, kept_out) => {
                    Reach::Everywhere(Reason::OuterJoinOnly)
                }
                reach => reach,
            };
            found.push((table.id, reach));
        }
        Node::From(items, facts) => visit_joined(&items.iter().collect::<Vec<_>>(), facts, inherited, kept_out, found),
        Node::Join(Join::Inner, left, right, on) => visit_joined(&[left, right], on, inherited, kept_out, found),
        Node::Join(Join::Left, left, right, on) if is_strict_on(right, inherited) => {
            // A condition above drops the rows without a match: the join is an inner one.
            visit_joined(&[left, right], on, inherited, kept_out, found);
        }
        Node::Join(Join::Left, left, right, on) => {
            let of_left = facts_of(left);
            let on: Vec<&Fact> = on.iter().collect();
            visit(left, inherited, &[kept_out, &on].concat(), found);
            let inside: Vec<&Fact> = inherited.iter().copied().chain(on).chain(&of_left).collect();
            visit(right, &inside, kept_out, found);
        }
        Node::Join(Join::Full, left, right, on) => {
            let on: Vec<&Fact> = on.iter().chain(kept_out.iter().copied()).collect();
            visit(left, inherited, &on, found);
            visit(right, inherited, &on, found);
        }
        Node::Derived(derived) => {
            for (at, arm) in derived.arms.iter().enumerate() {
                let links = links(derived, at, true);
                let inside: Vec<&Fact> = inherited.iter().copied().chain(&links).collect();
                visit_level(arm, &inside, found);
            }
        }
    }
}

/// Visits nodes that are all inner-joined under `on`.
fn visit_joined(
    items: &[&Node],
    on: &[Fact],
    inherited: &[&Fact],
    kept_out: &[&Fact],
    found: &mut Vec<(usize, Reach)>,
) {
    let facts: Vec<Vec<Fact>> = items.iter().map(|item| facts_of(item)).collect();
    for (at, item) in items.iter().enumerate() {
        let siblings = facts.iter().enumerate().filter(|(other, _)| *other != at).flat_map(|(_, facts)| facts);
        let known: Vec<&Fact> = inherited.iter().copied().chain(on).chain(siblings).collect();
        visit(item, &known, kept_out, found);
    }
}

fn is_named(key: Column, facts: &[&Fact]) -> bool {
    let class = BTreeSet::from([key]);
    facts.iter().any(|fact| mentions(fact, &class))
}

/// Whether a condition in `facts` fails for a row in which the columns of `node` are NULL.
fn is_strict_on(node: &Node, facts: &[&Fact]) -> bool {
    let mut columns = BTreeSet::new();
    columns_of(node, &mut columns);
    // What a derived table shows of them outside is NULL too.
    let links = facts.iter().filter_map(|fact| match fact {
        Fact::Link(a, b) => Some((*a, *b)),
        _ => None,
    });
    let links: Vec<_> = links.collect();
    let mut before = 0;
    while columns.len() > before {
        before = columns.len();
        for (a, b) in &links {
            if columns.contains(a) || columns.contains(b) {
                columns.extend([*a, *b]);
            }
        }
    }
    facts.iter().any(|fact| is_strict(fact, &columns))
}

fn is_strict(fact: &Fact, columns: &BTreeSet<Column>) -> bool {
    match fact {
        Fact::Same(..) | Fact::Is(..) | Fact::AtLeast(..) | Fact::AtMost(..) => mentions(fact, columns),
        Fact::All(facts) => facts.iter().any(|fact| is_strict(fact, columns)),
        Fact::Any(facts) => facts.iter().all(|fact| is_strict(fact, columns)),
        Fact::Never | Fact::Link(..) | Fact::Other(_) => false,
    }
}

/// The columns by which `node`'s rows are seen from outside: keys of its tables, outputs of its derived tables.
fn columns_of(node: &Node, columns: &mut BTreeSet<Column>) {
    match node {
        Node::Local => {}
        Node::Table(table, _) => {
            columns.insert(table.key);
        }
        Node::Derived(derived) => columns.extend(derived.outputs.iter().map(|output| output.outer)),
        Node::Join(_, left, right, _) => {
            columns_of(left, columns);
            columns_of(right, columns);
        }
        Node::From(items, _) => items.iter().for_each(|item| columns_of(item, columns)),
    }
}
