//! What is known of the rules of a grammar: which are repetitions, which are regular, and which may
//! be empty.

use super::rules::{Alternatives, Item};

/// A rule that refers to itself at the ends of sequences alone is a repetition of something, and
/// then something else.
pub(super) fn without_tail_recursion(number: usize, rule: &Alternatives) -> Option<Alternatives> {
    let (mut again, last) = tail_recursion(number, rule)?;
    // A rule that is itself says nothing.
    again.retain(|sequence| !sequence.is_empty());
    if again.is_empty() || last.is_empty() {
        return None;
    }
    let again = Item::Repeated { item: Box::new(Item::Group(again)), least: 0, most: None };
    Some(vec![vec![again, Item::Group(last)]])
}

/// What comes before a rule in its own sequences, which may be nothing, and its other sequences.
fn tail_recursion(
    number: usize,
    alternatives: &Alternatives,
) -> Option<(Alternatives, Alternatives)> {
    let is_free = |item: &Item| item_all(item, &|other| other != number);
    let (mut again, mut last) = (Vec::new(), Vec::new());
    for sequence in alternatives {
        let Some((end, before)) = sequence.split_last().filter(|(end, _)| !is_free(end)) else {
            // Nowhere, or not at the end.
            if !sequence.iter().all(is_free) {
                return None;
            }
            last.push(sequence.clone());
            continue;
        };
        if !before.iter().all(is_free) {
            return None;
        }
        let (end, is_optional) = match end {
            Item::Repeated { item, least: 0, most: Some(1) } => (&**item, true),
            end => (end, false),
        };
        if is_optional {
            last.push(before.to_vec());
        }
        match end {
            Item::Rule(_) => again.push(before.to_vec()),
            Item::Group(group) => {
                let (inner_again, inner_last) = tail_recursion(number, group)?;
                let joined = |inner| [before, &[Item::Group(inner)]].concat();
                again.push(joined(inner_again));
                if !inner_last.is_empty() {
                    last.push(joined(inner_last));
                }
            }
            _ => return None,
        }
    }
    Some((again, last))
}

/// Whether all rules that are used in some alternatives are `fine`.
fn all(alternatives: &Alternatives, fine: &dyn Fn(usize) -> bool) -> bool {
    alternatives.iter().flatten().all(|item| item_all(item, fine))
}

fn item_all(item: &Item, fine: &dyn Fn(usize) -> bool) -> bool {
    match item {
        Item::Text(_) | Item::Class { .. } | Item::Any => true,
        Item::Rule(number) => fine(*number),
        Item::Group(group) => all(group, fine),
        Item::Repeated { item, .. } => item_all(item, fine),
    }
}

/// Of each rule.
pub(super) struct Sets {
    is_regular: Vec<bool>,
    is_nullable: Vec<bool>,
}

impl Sets {
    pub(super) fn of(rules: &[Alternatives]) -> Sets {
        let mut sets =
            Sets { is_regular: vec![false; rules.len()], is_nullable: vec![false; rules.len()] };
        // Rules are often defined before those that they use, or after them: both directions.
        let numbers = (0..rules.len()).chain((0..rules.len()).rev());
        let mut is_changed = true;
        while is_changed {
            is_changed = false;
            for number in numbers.clone() {
                let rule = &rules[number];
                let is_regular =
                    sets.is_regular[number] || all(rule, &|other| sets.is_regular[other]);
                let is_nullable = sets.is_nullable[number] || sets.are_nullable(rule);
                is_changed |= is_regular != sets.is_regular[number]
                    || is_nullable != sets.is_nullable[number];
                (sets.is_regular[number], sets.is_nullable[number]) = (is_regular, is_nullable);
            }
        }
        sets
    }

    /// Whether it leads to no recursive rule.
    pub(super) fn is_regular(&self, item: &Item) -> bool {
        item_all(item, &|number| self.is_regular[number])
    }

    /// Whether they include the empty text.
    fn are_nullable(&self, alternatives: &Alternatives) -> bool {
        alternatives.iter().any(|sequence| sequence.iter().all(|item| self.is_nullable(item)))
    }

    pub(super) fn is_nullable(&self, item: &Item) -> bool {
        match item {
            Item::Text(text) => text.is_empty(),
            Item::Class { .. } | Item::Any => false,
            Item::Rule(number) => self.is_nullable[*number],
            Item::Group(group) => self.are_nullable(group),
            Item::Repeated { item, least, .. } => *least == 0 || self.is_nullable(item),
        }
    }
}
