//! The shapes of PITFALLS.md and their traps, one by one.

use super::*;

const O: Column = Column(0);
const C: Column = Column(1);
const X: Column = Column(2);

fn known(key: &str) -> Operand {
    Operand::Known(key.as_bytes().to_vec())
}

fn is(column: Column, key: &str) -> Fact {
    Fact::Is(column, vec![known(key)])
}

fn table(id: usize, key: Column) -> Node {
    Node::Table(TableRef { id, key }, Vec::new())
}

fn level(from: Node) -> Level {
    Level { from, sublinks: Vec::new(), apart: Vec::new(), always_yields: false }
}

fn keys(names: &[&str]) -> Reach {
    Reach::Keys(names.iter().map(|k| k.as_bytes().to_vec()).collect())
}

/// The reach of references 0 and 1 of `level`.
fn reaches(level: &Level) -> Vec<Reach> {
    let mut found = decide(level);
    found.sort_by_key(|(id, _)| *id);
    found.into_iter().map(|(_, reach)| reach).collect()
}

fn one(facts: Vec<Fact>) -> Reach {
    reaches(&level(Node::From(vec![table(0, O)], facts))).remove(0)
}

fn join(kind: Join, on: Vec<Fact>, filter: Vec<Fact>) -> Vec<Reach> {
    let node = Node::Join(kind, Box::new(table(0, O)), Box::new(table(1, C)), on);
    reaches(&level(Node::From(vec![node], filter)))
}

fn late(keys: &[&str]) -> Reach {
    let keys = keys.iter().map(|k| k.as_bytes().to_vec()).collect();
    Reach::Deferred(Late { values: BTreeSet::from([3]), keys })
}

fn nowhere() -> Reach {
    Reach::Everywhere(Reason::NoCondition)
}

fn derived(arm: Level, open: bool) -> Node {
    Node::Derived(Derived { arms: vec![arm], outputs: vec![Output { outer: X, inner: vec![Some(C)], open }] })
}

#[test]
fn conditions_on_one_table() {
    let unknown = Reach::Everywhere(Reason::UnknownValue);
    let or_other = Reach::Everywhere(Reason::OrWithOther);
    for (facts, want) in [
        (vec![], nowhere()),
        (vec![is(O, "7")], keys(&["7"])),
        (vec![is(O, "7"), is(O, "8")], keys(&[])),
        (vec![is(X, "7")], nowhere()),
        (vec![is(X, "7"), Fact::Same(X, O)], keys(&["7"])),
        (vec![Fact::Is(O, vec![Operand::Null])], keys(&[])),
        (vec![Fact::Is(O, vec![known("b"), Operand::Null, known("a")])], keys(&["a", "b"])),
        (vec![Fact::Is(O, vec![known("a"), Operand::Unknown])], unknown.clone()),
        (vec![Fact::Is(O, vec![Operand::Deferred(3)])], late(&[])),
        (vec![Fact::Is(O, vec![Operand::Deferred(3)]), is(O, "7")], keys(&["7"])),
        (vec![Fact::Other(vec![O])], unknown.clone()),
        (vec![Fact::Other(vec![O]), is(O, "7")], keys(&["7"])),
        (vec![Fact::AtLeast(O, known("7")), Fact::AtMost(O, known("7"))], keys(&["7"])),
        (vec![Fact::AtLeast(O, known("7")), Fact::AtMost(O, known("8"))], unknown),
        (vec![Fact::Never], keys(&[])),
        // k = 1 OR k = 2 AND c = 3
        (vec![Fact::Any(vec![is(O, "1"), Fact::All(vec![is(O, "2"), Fact::Other(vec![X])])])], keys(&["1", "2"])),
        // k IN (1, 2) AND (c = '' OR c IS NULL)
        (
            vec![Fact::Is(O, vec![known("1"), known("2")]), Fact::Any(vec![is(X, ""), Fact::Other(vec![X])])],
            keys(&["1", "2"]),
        ),
        (vec![Fact::Any(vec![is(O, "1"), Fact::Other(vec![X])])], or_other),
        (vec![Fact::Any(vec![is(O, "1"), Fact::Never])], keys(&["1"])),
        (vec![Fact::Any(vec![is(O, "1"), Fact::Is(O, vec![Operand::Deferred(3)])])], late(&["1"])),
        // (k = 1 OR k = 2) AND k = 2
        (vec![Fact::Any(vec![is(O, "1"), is(O, "2")]), is(O, "2")], keys(&["2"])),
    ] {
        assert_eq!(one(facts.clone()), want, "{facts:?}");
    }
}

#[test]
fn inner_joins_pass_the_key_both_ways() {
    let same = || Fact::Same(O, C);
    assert_eq!(join(Join::Inner, vec![same()], vec![is(O, "7")]), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(join(Join::Inner, vec![same(), is(C, "7")], vec![]), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(join(Join::Inner, vec![], vec![is(O, "7")]), [keys(&["7"]), nowhere()]);
    assert_eq!(join(Join::Inner, vec![same()], vec![])[0], Reach::Everywhere(Reason::UnknownValue));
}

#[test]
fn outer_joins_restrict_only_the_side_that_may_be_missing() {
    let same = || Fact::Same(O, C);
    let only_on = Reach::Everywhere(Reason::OuterJoinOnly);
    assert_eq!(join(Join::Left, vec![same()], vec![is(O, "7")]), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(join(Join::Left, vec![same(), is(O, "7")], vec![]), [only_on.clone(), keys(&["7"])]);
    assert_eq!(join(Join::Left, vec![same(), is(C, "7")], vec![]), [only_on.clone(), keys(&["7"])]);
    // WHERE on the right side makes it an inner join.
    assert_eq!(join(Join::Left, vec![same()], vec![is(C, "7")]), [keys(&["7"]), keys(&["7"])]);
    // ... but `c.k = 7 OR c.k IS NULL` does not.
    let or_null = Fact::Any(vec![is(C, "7"), Fact::Other(vec![C])]);
    assert_eq!(join(Join::Left, vec![same()], vec![or_null])[0], only_on);
    assert_eq!(join(Join::Full, vec![same()], vec![is(O, "7")]), [keys(&["7"]), only_on]);
}

#[test]
fn a_derived_table_hears_its_outer_level_where_it_is_open() {
    let inner = || level(Node::From(vec![table(1, C)], vec![]));
    let outer = |open| {
        reaches(&level(Node::From(vec![table(0, O), derived(inner(), open)], vec![Fact::Same(O, X), is(O, "7")])))
    };
    assert_eq!(outer(true), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(outer(false), [keys(&["7"]), nowhere()]);
}

#[test]
fn a_derived_table_tells_its_outer_level_what_its_rows_are() {
    let inner = |always_yields| Level { always_yields, ..level(Node::From(vec![table(1, C)], vec![is(C, "7")])) };
    let outer = |inner| reaches(&level(Node::From(vec![table(0, O), derived(inner, false)], vec![Fact::Same(O, X)])));
    assert_eq!(outer(inner(false)), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(outer(inner(true)), [Reach::Everywhere(Reason::UnknownValue), keys(&["7"])]);
}

#[test]
fn a_lateral_aggregate_says_nothing_about_the_outer_row() {
    // FROM o, LATERAL (SELECT count(*) FROM c WHERE c.k = o.k AND c.k = 7)
    let inner =
        Level { always_yields: true, ..level(Node::From(vec![table(1, C)], vec![Fact::Same(C, O), is(C, "7")])) };
    let outer = level(Node::From(vec![table(0, O), derived(inner, false)], vec![]));
    assert_eq!(reaches(&outer), [nowhere(), keys(&["7"])]);
}

#[test]
fn set_operations_hear_but_do_not_tell() {
    let arm = |id, key, facts| level(Node::From(vec![table(id, key)], facts));
    let union = Node::Derived(Derived {
        arms: vec![arm(0, O, vec![]), arm(1, C, vec![])],
        outputs: vec![Output { outer: X, inner: vec![Some(O), Some(C)], open: true }],
    });
    assert_eq!(reaches(&level(Node::From(vec![union], vec![is(X, "7")]))), [keys(&["7"]), keys(&["7"])]);
}

#[test]
fn correlated_subqueries_follow_the_outer_row() {
    let inner = level(Node::From(vec![table(1, C)], vec![Fact::Same(C, O)]));
    let sublink = |required, filter: Vec<Fact>, inner: Level, equal| {
        let sublinks = vec![Sublink { arms: vec![inner], required, equal, after: false }];
        reaches(&Level { sublinks, ..level(Node::From(vec![table(0, O)], filter)) })
    };
    assert_eq!(sublink(false, vec![is(O, "7")], inner.clone(), None), [keys(&["7"]), keys(&["7"])]);
    let unknown = Reach::Everywhere(Reason::UnknownValue);
    assert_eq!(sublink(false, vec![], inner.clone(), None), [nowhere(), unknown]);
    // EXISTS (SELECT 1 FROM c WHERE c.k = o.k AND c.k = 7)
    let fixed = level(Node::From(vec![table(1, C)], vec![Fact::Same(C, O), is(C, "7")]));
    assert_eq!(sublink(true, vec![], fixed.clone(), None), [keys(&["7"]), keys(&["7"])]);
    assert_eq!(sublink(false, vec![], fixed.clone(), None), [nowhere(), keys(&["7"])]);
    let counting = Level { always_yields: true, ..fixed };
    assert_eq!(sublink(true, vec![], counting, None), [nowhere(), keys(&["7"])]);
    // o.k IN (SELECT c.k FROM c) with o.k = 7
    let plain = level(Node::From(vec![table(1, C)], vec![]));
    assert_eq!(sublink(true, vec![is(O, "7")], plain, Some((O, C))), [keys(&["7"]), keys(&["7"])]);
}

#[test]
fn what_stands_apart_hears_nothing() {
    let cte = Derived { arms: vec![level(Node::From(vec![table(1, C)], vec![]))], outputs: vec![] };
    let level = Level { apart: vec![cte], ..level(Node::From(vec![table(0, O)], vec![is(O, "7"), is(C, "7")])) };
    assert_eq!(reaches(&level), [keys(&["7"]), nowhere()]);
}

#[test]
fn deep_nesting_ends() {
    let mut fact = is(O, "7");
    for _ in 0..200 {
        fact = Fact::Any(vec![fact, Fact::Other(vec![X])]);
    }
    assert!(matches!(one(vec![fact]), Reach::Everywhere(_)));
}

#[test]
fn a_link_to_a_nullable_column_restricts_nothing() {
    // SELECT FROM (SELECT c.k AS x FROM o LEFT JOIN c ON c.k = o.k AND o.k = 7) s [WHERE s.x = 7]
    let join =
        || Node::Join(Join::Left, Box::new(table(0, O)), Box::new(table(1, C)), vec![Fact::Same(C, O), is(O, "7")]);
    let outer = |filter| {
        let arm = level(Node::From(vec![join()], vec![]));
        reaches(&level(Node::From(vec![derived(arm, true)], filter)))
    };
    assert_eq!(outer(vec![]), [Reach::Everywhere(Reason::OuterJoinOnly), keys(&["7"])]);
    assert_eq!(outer(vec![is(X, "7")]), [keys(&["7"]), keys(&["7"])]);
}

#[test]
fn subqueries_of_a_row_made_from_nothing_hear_nothing_of_its_input() {
    // SELECT count(*), (SELECT .. FROM c WHERE c.k = o.k) FROM o WHERE o.k = 7, and WHERE false
    let sublink = |after| Sublink {
        arms: vec![level(Node::From(vec![table(1, C)], vec![]))],
        required: false,
        equal: None,
        after,
    };
    let outer = |always_yields, after| {
        let from = Node::From(vec![table(0, O)], vec![Fact::Never]);
        reaches(&Level { sublinks: vec![sublink(after)], always_yields, ..level(from) })
    };
    assert_eq!(outer(true, false), [keys(&[]), nowhere()]);
    assert_eq!(outer(false, true), [keys(&[]), nowhere()]);
    assert_eq!(outer(false, false), [keys(&[]), keys(&[])]);
}

#[test]
fn a_comparison_of_two_columns_names_no_value() {
    assert_eq!(one(vec![Fact::Same(O, X)]), Reach::Everywhere(Reason::UnknownValue));
}

#[test]
fn nested_subqueries_are_told_from_single_ones() {
    let statement = |arm: Level| level(Node::Derived(Derived { arms: vec![arm], outputs: vec![] }));
    let with = |arm: Level, inner: Level| Level {
        sublinks: vec![Sublink { arms: vec![inner], required: false, equal: None, after: false }],
        ..arm
    };
    let plain = || level(Node::From(vec![table(0, O)], vec![]));
    assert!(!statement(plain()).nests_subqueries());
    assert!(!statement(with(plain(), plain())).nests_subqueries());
    assert!(statement(with(plain(), with(plain(), plain()))).nests_subqueries());
    let in_derived = level(Node::From(vec![derived(with(plain(), plain()), true)], vec![]));
    assert!(statement(in_derived).nests_subqueries());
}

#[test]
fn every_reason_is_a_sentence_of_its_own() {
    use Spread::{Keys, Keyspaces, Late, Layout, Nothing, Off, Sample, Tables, Triggers, WholeRow};
    let spreads = [Keys, Late, Nothing, Tables, Keyspaces, Off, Sample, WholeRow, Layout, Triggers];
    let reasons = [Reason::NoCondition, Reason::UnknownValue, Reason::OrWithOther, Reason::OuterJoinOnly];
    let sentences = spreads.map(|spread| spread.sentence("t", "k")).into_iter();
    let sentences: BTreeSet<_> = sentences.chain(reasons.map(|reason| reason.sentence("t", "k"))).collect();
    assert_eq!(sentences.len(), spreads.len() + reasons.len());
    assert!(sentences.iter().all(|sentence| sentence.ends_with('.')), "{sentences:?}");
}
