//! The rules of a grammar.

/// What may stand in one place.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Item {
    Text(String),
    /// One character of a set of ranges, or none of them.
    Class {
        is_negated: bool,
        ranges: Vec<[char; 2]>,
    },
    /// Any character.
    Any,
    /// A rule, by its number.
    Rule(usize),
    Group(Alternatives),
    Repeated {
        item: Box<Item>,
        least: u32,
        most: Option<u32>,
    },
}

pub(super) type Sequence = Vec<Item>;

/// Sequences of which there is one.
pub(super) type Alternatives = Vec<Sequence>;
