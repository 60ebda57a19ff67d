//! Which repetitions can be lexemes. The lexer reads a lexeme as far as it goes and never goes
//! back, so while it may be in a repetition, nothing else may be able to read the same character.
//!
//! Each character of the grammar's texts, and each set of characters, is a position of a Glushkov
//! automaton. Which positions may be read at the same place follows from the start, and from what
//! follows two positions that read the same character. A rule is followed by whatever follows it
//! anywhere, and characters outside of ASCII are one: so more may seem possible than is, and a
//! repetition is read character by character, which is slower and as right.

use std::ops::Range;

use rustc_hash::FxHashSet;

use super::rules::{Alternatives, Item};
use super::sets::Sets;

/// The most positions, and nodes with them, of a grammar whose repetitions can be lexemes.
const POSITIONS: usize = 1024;
const NODES: usize = 4096;
/// The most passes over the rules, and pairs of positions in all searches.
const PASSES: usize = 64;
const PAIRS: usize = 500_000;

/// Repetitions, by where they are in memory.
pub(super) type Loops = FxHashSet<*const Item>;

/// A set of positions.
type Positions = [u64; POSITIONS / 64];

const NONE: Positions = [0; POSITIONS / 64];

/// A set of characters: a bit for each of ASCII but the last, and one for all others together.
type Characters = u128;

/// The bit of all characters that have none of their own.
const OTHERS: u32 = 127;

/// Those of the rules' repetitions that can be lexemes.
pub(super) fn lexemes(rules: &[Alternatives], sets: &Sets) -> Loops {
    let mut loops = Loops::default();
    rules.iter().flatten().flatten().for_each(|item| add_regular(item, sets, &mut loops));
    let mut work = PAIRS;
    loop {
        let search = Search::of(rules, sets, &loops);
        let Some(excluded) = search.and_then(|search| search.conflicts(&mut work)) else {
            return Loops::default();
        };
        if excluded.is_empty() {
            return loops;
        }
        loops.retain(|found| !excluded.contains(found));
    }
}

/// Adds the regular repetitions in an item.
fn add_regular(item: &Item, sets: &Sets, loops: &mut Loops) {
    match item {
        Item::Text(_) | Item::Class { .. } | Item::Any | Item::Rule(_) => {}
        Item::Group(group) => {
            group.iter().flatten().for_each(|item| add_regular(item, sets, loops));
        }
        Item::Repeated { item: one, most, .. } => {
            if *most != Some(1) && sets.is_regular(one) {
                loops.insert(item);
            }
            add_regular(one, sets, loops);
        }
    }
}

/// An item as positions.
enum Node {
    Position(usize),
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeated { node: Box<Node>, is_nullable: bool },
}

struct Search<'a> {
    rules: &'a [Alternatives],
    sets: &'a Sets,
    loops: &'a Loops,
    nodes: usize,
    /// Of each position.
    characters: Vec<Characters>,
    follow: Vec<Positions>,
    /// Of each rule: the positions that it may begin with, and that may follow it.
    rule_first: Vec<Positions>,
    rule_follow: Vec<Positions>,
    /// The positions of each repetition that is to be a lexeme.
    ranges: Vec<(*const Item, Range<usize>)>,
}

impl<'a> Search<'a> {
    /// Finds what follows each position; none if the grammar is too large for that.
    fn of(rules: &'a [Alternatives], sets: &'a Sets, loops: &'a Loops) -> Option<Search<'a>> {
        let mut search = Search {
            rules,
            sets,
            loops,
            nodes: 0,
            characters: Vec::new(),
            follow: Vec::new(),
            rule_first: vec![NONE; rules.len()],
            rule_follow: vec![NONE; rules.len()],
            ranges: Vec::new(),
        };
        let nodes: Option<Vec<Node>> =
            rules.iter().map(|rule| search.choice(rule, false)).collect();
        let nodes = nodes?;
        search.follow = vec![NONE; search.characters.len()];
        for _ in 0..PASSES {
            let before = (search.rule_first.clone(), search.rule_follow.clone());
            // Rules mostly use those that are defined after them.
            for (number, node) in nodes.iter().enumerate().rev() {
                search.rule_first[number] = search.first(node);
            }
            for (number, node) in nodes.iter().enumerate() {
                search.connect(node, search.rule_follow[number]);
            }
            if before == (search.rule_first.clone(), search.rule_follow.clone()) {
                return Some(search);
            }
        }
        None
    }

    fn choice(&mut self, alternatives: &Alternatives, is_in_loop: bool) -> Option<Node> {
        let mut choice = Vec::new();
        for sequence in alternatives {
            let items = sequence.iter().map(|item| self.node(item, is_in_loop));
            choice.push(Node::Sequence(items.collect::<Option<_>>()?));
        }
        Some(Node::Choice(choice))
    }

    /// In a repetition that is to be a lexeme, rules have positions of their own.
    fn node(&mut self, item: &Item, is_in_loop: bool) -> Option<Node> {
        self.nodes += 1;
        if self.nodes > NODES {
            return None;
        }
        match item {
            Item::Text(text) => {
                let characters = text.chars().map(|c| self.position(range([c, c])));
                Some(Node::Sequence(characters.collect::<Option<_>>()?))
            }
            Item::Class { is_negated, ranges } => {
                let set = ranges.iter().fold(0, |set, bounds| set | range(*bounds));
                // Of the others, only some may be excluded.
                self.position(if *is_negated { !set | 1 << OTHERS } else { set })
            }
            Item::Any => self.position(Characters::MAX),
            Item::Rule(number) if is_in_loop => self.choice(&self.rules[*number], true),
            Item::Rule(number) => Some(Node::Rule(*number)),
            Item::Group(group) => self.choice(group, is_in_loop),
            Item::Repeated { item: one, least, most } => {
                let is_lexeme = !is_in_loop && self.loops.contains(&std::ptr::from_ref(item));
                let start = self.characters.len();
                let node = self.node(one, is_in_loop || is_lexeme)?;
                if is_lexeme {
                    self.ranges.push((item, start..self.characters.len()));
                }
                match most {
                    Some(0) => Some(Node::Sequence(Vec::new())),
                    Some(1) if *least == 0 => {
                        Some(Node::Choice(vec![node, Node::Sequence(Vec::new())]))
                    }
                    _ => Some(Node::Repeated { node: Box::new(node), is_nullable: *least == 0 }),
                }
            }
        }
    }

    fn position(&mut self, characters: Characters) -> Option<Node> {
        self.characters.push(characters);
        let position = self.characters.len() - 1;
        (position < POSITIONS).then_some(Node::Position(position))
    }

    fn is_nullable(&self, node: &Node) -> bool {
        match node {
            Node::Position(_) => false,
            Node::Rule(number) => self.sets.is_nullable(&Item::Rule(*number)),
            Node::Sequence(nodes) => nodes.iter().all(|node| self.is_nullable(node)),
            Node::Choice(nodes) => nodes.iter().any(|node| self.is_nullable(node)),
            Node::Repeated { node, is_nullable } => *is_nullable || self.is_nullable(node),
        }
    }

    /// The positions that it may begin with.
    fn first(&self, node: &Node) -> Positions {
        match node {
            Node::Position(position) => {
                let mut only = NONE;
                only[position / 64] |= 1 << (position % 64);
                only
            }
            Node::Rule(number) => self.rule_first[*number],
            Node::Sequence(nodes) => {
                nodes.iter().rev().fold(NONE, |rest, node| self.before(node, rest))
            }
            Node::Choice(nodes) => {
                nodes.iter().fold(NONE, |sum, node| union(sum, self.first(node)))
            }
            Node::Repeated { node, .. } => self.first(node),
        }
    }

    /// What it and what follows it may begin with.
    fn before(&self, node: &Node, follow: Positions) -> Positions {
        let first = self.first(node);
        if self.is_nullable(node) { union(first, follow) } else { first }
    }

    /// Notes what may follow the positions and rules in it, which `follow` may follow.
    fn connect(&mut self, node: &Node, follow: Positions) {
        match node {
            Node::Position(position) => {
                self.follow[*position] = union(self.follow[*position], follow);
            }
            Node::Rule(number) => {
                self.rule_follow[*number] = union(self.rule_follow[*number], follow);
            }
            Node::Sequence(nodes) => {
                nodes.iter().rev().fold(follow, |follow, node| {
                    self.connect(node, follow);
                    self.before(node, follow)
                });
            }
            Node::Choice(nodes) => nodes.iter().for_each(|node| self.connect(node, follow)),
            Node::Repeated { node, .. } => {
                let again = self.first(node);
                self.connect(node, union(follow, again));
            }
        }
    }

    /// The repetitions in which something else may read the same character; none if there are too
    /// many pairs of positions.
    fn conflicts(self, work: &mut usize) -> Option<Loops> {
        let mut together = vec![NONE; self.characters.len()];
        let mut pairs = Vec::new();
        let mut add = |first: Positions, second: Positions, pairs: &mut Vec<(usize, usize)>| {
            for one in members(first) {
                let new: Positions = std::array::from_fn(|i| second[i] & !together[one][i]);
                together[one] = union(together[one], new);
                pairs.extend(members(new).map(|other| (one, other)));
            }
        };
        add(self.rule_first[0], self.rule_first[0], &mut pairs);
        while let Some((one, other)) = pairs.pop() {
            *work = work.checked_sub(1)?;
            if self.characters[one] & self.characters[other] != 0 {
                *work = work.checked_sub(members(self.follow[one]).count())?;
                add(self.follow[one], self.follow[other], &mut pairs);
            }
        }
        let is_read_otherwise = |range: &Range<usize>| {
            range.clone().any(|one| {
                let mut others = members(together[one]).filter(|other| !range.contains(other));
                others.any(|other| self.characters[one] & self.characters[other] != 0)
            })
        };
        let conflicts = self.ranges.iter().filter(|(_, range)| is_read_otherwise(range));
        Some(conflicts.map(|(item, _)| *item).collect())
    }
}

fn union(a: Positions, b: Positions) -> Positions {
    std::array::from_fn(|i| a[i] | b[i])
}

fn members(set: Positions) -> impl Iterator<Item = usize> {
    set.into_iter().enumerate().filter(|(_, word)| *word != 0).flat_map(|(i, word)| {
        (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| 64 * i + bit)
    })
}

/// The characters from one to another.
fn range(bounds: [char; 2]) -> Characters {
    let [first, last] = bounds.map(|c| u32::from(c).min(OTHERS));
    Characters::MAX >> (OTHERS - (last - first)) << first
}
