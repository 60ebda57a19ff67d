//! What is known of the rules of a grammar: which are regular, which may be empty, which characters
//! they begin with, and which may follow them.

use super::rules::{Alternatives, Item, Sequence};

/// A set of characters: a bit for each of ASCII but the last, and one for all others together.
type Characters = u128;

/// The bit of all characters that have none of their own.
const OTHERS: u32 = 127;

/// A rule that refers to itself at the ends of sequences alone: what comes before itself again, and
/// what comes last. So it is a repetition.
pub(super) fn tail_recursion(
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
            // By itself it says nothing.
            Item::Rule(_) if before.is_empty() => {}
            Item::Rule(_) => again.push(before.to_vec()),
            Item::Group(group) => {
                let (inner_again, inner_last) = tail_recursion(number, group)?;
                let joined = |inner: Sequence| [before, &inner].concat();
                again.extend(inner_again.into_iter().map(joined));
                last.extend(inner_last.into_iter().map(joined));
            }
            _ => return None,
        }
    }
    (!again.is_empty()).then_some((again, last))
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
    first: Vec<Characters>,
    follow: Vec<Characters>,
}

impl Sets {
    pub(super) fn of(rules: &[Alternatives]) -> Sets {
        let count = rules.len();
        let mut sets = Sets {
            is_regular: vec![false; count],
            is_nullable: vec![false; count],
            first: vec![0; count],
            follow: vec![0; count],
        };
        let mut is_changed = true;
        while is_changed {
            is_changed = false;
            for (number, rule) in rules.iter().enumerate() {
                let found = (
                    sets.alternatives_are_regular(rule),
                    sets.are_nullable(rule),
                    sets.first(rule),
                );
                let known = (sets.is_regular[number], sets.is_nullable[number], sets.first[number]);
                if found != known {
                    (sets.is_regular[number], sets.is_nullable[number], sets.first[number]) = found;
                    is_changed = true;
                }
            }
        }
        loop {
            let before = sets.follow.clone();
            for (number, rule) in rules.iter().enumerate() {
                sets.add_follow(rule, sets.follow[number]);
            }
            if sets.follow == before {
                return sets;
            }
        }
    }

    /// What may follow a rule.
    pub(super) fn follow(&self, number: usize) -> Characters {
        self.follow[number]
    }

    /// Whether it leads to no recursive rule.
    pub(super) fn is_regular(&self, item: &Item) -> bool {
        item_all(item, &|number| self.is_regular[number])
    }

    fn alternatives_are_regular(&self, alternatives: &Alternatives) -> bool {
        alternatives.iter().flatten().all(|item| self.is_regular(item))
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

    fn first(&self, alternatives: &Alternatives) -> Characters {
        alternatives.iter().fold(0, |set, sequence| set | self.before(sequence, 0))
    }

    /// What items that are followed by some characters begin with.
    pub(super) fn before(&self, items: &[Item], follow: Characters) -> Characters {
        items.iter().rev().fold(follow, |follow, item| {
            let follow = if self.is_nullable(item) { follow } else { 0 };
            follow | self.item_first(item)
        })
    }

    pub(super) fn item_first(&self, item: &Item) -> Characters {
        match item {
            Item::Text(text) => text.chars().next().map_or(0, |c| range([c, c])),
            Item::Class { is_negated: false, ranges } => {
                ranges.iter().fold(0, |set, bounds| set | range(*bounds))
            }
            // Of the others, only some may be excluded.
            Item::Class { is_negated: true, ranges } => {
                let excluded = ranges.iter().fold(0, |set, bounds| set | range(*bounds));
                !excluded | 1 << OTHERS
            }
            Item::Any => Characters::MAX,
            Item::Rule(number) => self.first[*number],
            Item::Group(group) => self.first(group),
            Item::Repeated { item, .. } => self.item_first(item),
        }
    }

    /// Adds what follows rules that are used in alternatives, which are followed by `follow`.
    fn add_follow(&mut self, alternatives: &Alternatives, follow: Characters) {
        for sequence in alternatives {
            for (i, item) in sequence.iter().enumerate() {
                let follow = self.before(&sequence[i + 1..], follow);
                self.add_item_follow(item, follow);
            }
        }
    }

    fn add_item_follow(&mut self, item: &Item, follow: Characters) {
        match item {
            Item::Text(_) | Item::Class { .. } | Item::Any => {}
            Item::Rule(number) => self.follow[*number] |= follow,
            Item::Group(group) => self.add_follow(group, follow),
            Item::Repeated { item, .. } => {
                self.add_item_follow(item, follow | self.item_first(item));
            }
        }
    }
}

/// The characters from one to another.
fn range(bounds: [char; 2]) -> Characters {
    let [first, last] = bounds.map(|c| u32::from(c).min(OTHERS));
    (first..=last).fold(0, |set, bit| set | 1 << bit)
}
