//! One table's facts: which keys pass all of them.
//!
//! Columns that must be equal form classes; a value that one of a class must have, all have. An OR is worth what all its
//! arms together are worth. Conditions are combined by taking the narrowest of them, which is always enough.

use std::collections::{BTreeMap, BTreeSet};

use super::{Column, Fact, Late, Operand, Reach, Reason};

/// How deep ANDs and ORs may be nested before a condition is taken for unknown.
const MAX_DEPTH: usize = 16;

/// The keys of `key` that pass all of `facts`.
pub(super) fn reach(key: Column, facts: &[&Fact]) -> Reach {
    reach_within(key, facts, 0)
}

fn reach_within(key: Column, facts: &[&Fact], depth: usize) -> Reach {
    let mut flat = Vec::new();
    facts.iter().for_each(|fact| flatten(fact, &mut flat));
    if flat.iter().any(|fact| matches!(fact, Fact::Never)) {
        return Reach::Keys(Vec::new());
    }
    let class = class_of(key, &flat);
    let mut best = Reach::Everywhere(Reason::NoCondition);
    let (mut low, mut high) = (BTreeSet::new(), BTreeSet::new());
    for fact in &flat {
        let found = match fact {
            Fact::Is(column, operands) if class.contains(column) => one_of(operands),
            Fact::AtLeast(column, Operand::Known(value)) if class.contains(column) => {
                low.insert(value.clone());
                Reach::Everywhere(Reason::UnknownValue)
            }
            Fact::AtMost(column, Operand::Known(value)) if class.contains(column) => {
                high.insert(value.clone());
                Reach::Everywhere(Reason::UnknownValue)
            }
            Fact::AtLeast(column, _) | Fact::AtMost(column, _) if class.contains(column) => {
                Reach::Everywhere(Reason::UnknownValue)
            }
            Fact::Same(a, _) if class.contains(a) => Reach::Everywhere(Reason::UnknownValue),
            Fact::Other(columns) if columns.iter().any(|c| class.contains(c)) => {
                Reach::Everywhere(Reason::UnknownValue)
            }
            Fact::Any(arms) if depth < MAX_DEPTH => any_of(key, &class, arms, &flat, fact, depth),
            _ => continue,
        };
        best = narrower(best, found);
    }
    // `k BETWEEN 7 AND 7`
    if let Some(value) = low.intersection(&high).next() {
        best = narrower(best, Reach::Keys(vec![value.clone()]));
    }
    best
}

fn flatten<'a>(fact: &'a Fact, flat: &mut Vec<&'a Fact>) {
    match fact {
        Fact::All(facts) => facts.iter().for_each(|fact| flatten(fact, flat)),
        _ => flat.push(fact),
    }
}

/// The columns that equal `key` in every row that passes.
fn class_of(key: Column, flat: &[&Fact]) -> BTreeSet<Column> {
    let mut neighbours: BTreeMap<Column, Vec<Column>> = BTreeMap::new();
    for fact in flat {
        if let Fact::Same(a, b) | Fact::Link(a, b) = fact {
            neighbours.entry(*a).or_default().push(*b);
            neighbours.entry(*b).or_default().push(*a);
        }
    }
    let mut class = BTreeSet::from([key]);
    let mut open = vec![key];
    while let Some(column) = open.pop() {
        for next in neighbours.get(&column).into_iter().flatten() {
            if class.insert(*next) {
                open.push(*next);
            }
        }
    }
    class
}

fn one_of(operands: &[Operand]) -> Reach {
    let mut found = Late::default();
    for operand in operands {
        match operand {
            Operand::Known(key) => {
                found.keys.insert(key.clone());
            }
            Operand::Null => {}
            Operand::Deferred(value) => {
                found.values.insert(*value);
            }
            Operand::Unknown => return Reach::Everywhere(Reason::UnknownValue),
        }
    }
    found.into_reach()
}

impl Late {
    fn into_reach(self) -> Reach {
        match self.values.is_empty() {
            true => Reach::Keys(self.keys.into_iter().collect()),
            false => Reach::Deferred(self),
        }
    }
}

/// An OR: each arm is taken together with all the other facts.
fn any_of(key: Column, class: &BTreeSet<Column>, arms: &[Fact], flat: &[&Fact], own: &Fact, depth: usize) -> Reach {
    let mut all = Late::default();
    let mut unknown = None;
    let mut narrowed = 0;
    for arm in arms {
        // The other ORs are left out here, or every combination of arms would be tried.
        let mut together: Vec<&Fact> =
            flat.iter().copied().filter(|f| !std::ptr::eq(*f, own) && !matches!(f, Fact::Any(_))).collect();
        together.push(arm);
        match reach_within(key, &together, depth + 1) {
            Reach::Keys(found) => {
                narrowed += 1;
                all.keys.extend(found);
            }
            Reach::Deferred(late) => {
                narrowed += 1;
                all.keys.extend(late.keys);
                all.values.extend(late.values);
            }
            Reach::Everywhere(reason) => unknown = Some(reason),
        }
    }
    match unknown {
        Some(_) if narrowed > 0 => Reach::Everywhere(Reason::OrWithOther),
        Some(reason) if arms.iter().any(|arm| mentions(arm, class)) => {
            Reach::Everywhere(reason.max(Reason::UnknownValue))
        }
        Some(reason) => Reach::Everywhere(reason),
        None => all.into_reach(),
    }
}

/// Whether `fact` says anything about a column of `class`.
pub(super) fn mentions(fact: &Fact, class: &BTreeSet<Column>) -> bool {
    match fact {
        Fact::Same(a, b) => class.contains(a) || class.contains(b),
        Fact::Is(column, _) | Fact::AtLeast(column, _) | Fact::AtMost(column, _) => class.contains(column),
        Fact::All(facts) | Fact::Any(facts) => facts.iter().any(|fact| mentions(fact, class)),
        Fact::Never | Fact::Link(..) => false,
        Fact::Other(columns) => columns.iter().any(|column| class.contains(column)),
    }
}

/// The better of two reaches that both hold.
fn narrower(a: Reach, b: Reach) -> Reach {
    match (a, b) {
        (Reach::Keys(a), Reach::Keys(b)) => {
            // A key must pass both.
            let b: BTreeSet<_> = b.into_iter().collect();
            Reach::Keys(a.into_iter().filter(|key| b.contains(key)).collect())
        }
        (Reach::Keys(keys), _) | (_, Reach::Keys(keys)) => Reach::Keys(keys),
        (Reach::Deferred(late), _) | (_, Reach::Deferred(late)) => Reach::Deferred(late),
        (Reach::Everywhere(a), Reach::Everywhere(b)) => Reach::Everywhere(a.max(b)),
    }
}
