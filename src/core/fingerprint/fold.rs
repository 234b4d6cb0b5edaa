//! Lists of values, folded: `IN (1, 2, 3)` and `IN (1, 2)` are one shape.
//!
//! Decides which lists those are: the parentheses of `IN`, the brackets of `ARRAY` and the rows of `VALUES`. Neighbours
//! that differ in their values only become the first of them and `...`. What always holds: elements without a value are
//! never folded; one pass, no recursion, each element compared once; brackets that do not match are no obstacle.

use std::ops::Range;

use super::lexer::{Kind, Token};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    /// Arguments, subqueries, anything.
    Plain,
    /// The list of `IN` or `ARRAY`.
    List,
    /// All rows of one `VALUES`; has no brackets of its own.
    Rows,
    /// One of its rows.
    Row,
}

struct Frame {
    group: Group,
    /// Where the current element starts.
    element: usize,
    /// The element that its equals are folded into.
    model: Option<Range<usize>>,
    folded: bool,
}

/// Returns the tokens with lists of values folded and a closing semicolon gone.
pub(super) fn lists(tokens: Vec<Token<'_>>) -> Vec<Token<'_>> {
    let mut folder = Folder { out: Vec::with_capacity(tokens.len()), frames: Vec::new() };
    for token in tokens {
        folder.add(token);
    }
    while !folder.frames.is_empty() {
        folder.leave();
    }
    while folder.out.last().is_some_and(|token| token.kind == Kind::Semicolon) {
        folder.out.pop();
    }
    folder.out
}

struct Folder<'a> {
    out: Vec<Token<'a>>,
    frames: Vec<Frame>,
}

impl<'a> Folder<'a> {
    fn add(&mut self, token: Token<'a>) {
        self.end_rows(&token);
        match token.kind {
            Kind::Open => self.open(token),
            Kind::Close => {
                if !self.frames.is_empty() {
                    self.leave();
                }
                self.out.push(token);
            }
            Kind::Comma => {
                self.end_element();
                self.out.push(token);
                self.start_element();
            }
            _ => {
                if self.starts_subquery(&token) {
                    self.set_group(Group::Plain);
                }
                self.out.push(token);
            }
        }
    }

    fn group(&self) -> Option<Group> {
        self.frames.last().map(|frame| frame.group)
    }

    fn set_group(&mut self, group: Group) {
        if let Some(frame) = self.frames.last_mut() {
            frame.group = group;
        }
    }

    fn enter(&mut self, group: Group) {
        self.frames.push(Frame { group, element: self.out.len(), model: None, folded: false });
    }

    fn leave(&mut self) {
        self.end_element();
        self.frames.pop();
    }

    /// Leaves a `VALUES` whose rows are over: neither a comma nor a row follows.
    fn end_rows(&mut self, next: &Token<'a>) {
        if self.group() != Some(Group::Rows) {
            return;
        }
        let after_row = self.out.last().is_some_and(|last| last.kind == Kind::Close || last.kind == Kind::More);
        let goes_on = match next.kind {
            Kind::Comma => after_row,
            Kind::Open => next.text == "(" && !after_row,
            Kind::More => !after_row,
            _ => false,
        };
        if !goes_on {
            self.leave();
        }
    }

    fn open(&mut self, token: Token<'a>) {
        let square = token.text == "[";
        let group = match self.out.last() {
            _ if self.group() == Some(Group::Rows) => Group::Row,
            Some(last) if !square && last.is_word("values") => {
                self.enter(Group::Rows);
                Group::Row
            }
            Some(last) if !square && last.is_word("in") => Group::List,
            Some(last) if square && last.is_word("array") => Group::List,
            Some(last)
                if square && self.group() == Some(Group::List) && matches!(last.kind, Kind::Open | Kind::Comma) =>
            {
                Group::List
            }
            _ => Group::Plain,
        };
        self.out.push(token);
        self.enter(group);
    }

    fn starts_subquery(&self, token: &Token<'a>) -> bool {
        self.frames
            .last()
            .is_some_and(|frame| frame.group == Group::List && frame.model.is_none() && frame.element == self.out.len())
            && ["select", "with", "values", "table"].iter().any(|word| token.is_word(word))
    }

    fn start_element(&mut self) {
        let at = self.out.len();
        if let Some(frame) = self.frames.last_mut() {
            frame.element = at;
        }
    }

    /// Folds the element that ends here into the one before, if it has the same shape.
    fn end_element(&mut self) {
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        if frame.group == Group::Plain {
            return;
        }
        // The other literals of SQL, where they can be nothing else.
        if let Some([only]) = self.out.get_mut(frame.element..) {
            if frame.group != Group::Rows && ["null", "true", "false"].iter().any(|word| only.is_word(word)) {
                only.kind = Kind::Literal;
            }
        }
        if frame.group == Group::Row {
            return;
        }
        let element = self.out.get(frame.element..).unwrap_or_default();
        let model = frame.model.clone().and_then(|range| self.out.get(range));
        let repeats = model.is_some_and(|model| match element {
            [more] if more.kind == Kind::More => true,
            _ => element.iter().any(|token| token.kind.is_value()) && same_shape(model, element),
        });
        if !repeats {
            frame.model = Some(frame.element..self.out.len());
            frame.folded = false;
            return;
        }
        // Behind a model stands a comma, which goes or stays with the dots.
        let comma = frame.element.saturating_sub(1);
        if frame.folded {
            self.out.truncate(comma);
        } else {
            self.out.truncate(frame.element);
            self.out.push(Token { kind: Kind::More, text: "..." });
            frame.folded = true;
        }
    }
}

fn same_shape(left: &[Token<'_>], right: &[Token<'_>]) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .all(|(l, r)| (l.kind.is_value() && r.kind.is_value()) || (l.kind == r.kind && l.text == r.text))
}
