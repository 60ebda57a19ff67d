//! Writes a grammar in llguidance's notation, a dialect of Lark. There, a text consists of lexemes,
//! which regular expressions match (terminals, in capitals), and rules say how lexemes follow each
//! other. The lexer takes each lexeme as long as it can, and never goes back.
//!
//! A grammar without recursion is one regular expression. In others each character is a lexeme, so
//! that rules alone decide. As a mask then takes a step of the parser for each byte of the
//! vocabulary, repetitions are lexemes where that changes nothing ([`loops`](super::loops)).

use std::fmt::Write as _;

use super::loops::{Loops, lexemes};
use super::rules::{Alternatives, Item};
use super::sets::{Sets, without_tail_recursion};

/// The empty text.
const EMPTY: &str = "\"\"";

pub(super) fn write(mut rules: Vec<Alternatives>) -> String {
    for (number, rule) in rules.iter_mut().enumerate() {
        if let Some(repetition) = without_tail_recursion(number, rule) {
            *rule = repetition;
        }
    }
    let sets = Sets::of(&rules);
    let root = Item::Rule(0);
    let is_regular = sets.is_regular(&root);
    let loops = if is_regular { Loops::default() } else { lexemes(&rules, &sets) };
    let mut writer = Writer { sets, loops, lines: String::new(), count: 0 };
    for (number, rule) in rules.iter().enumerate() {
        if writer.sets.is_regular(&Item::Rule(number)) {
            let expression = writer.terminal(rule);
            writer.line(&format!("T{number}"), &expression);
        }
        if !is_regular {
            let expression = writer.rule(rule);
            writer.line(&format!("r{number}"), &expression);
        }
    }
    let start = if is_regular { writer.lexeme(&root) } else { "r0".to_owned() };
    writer.line("start", &start);
    writer.lines
}

struct Writer {
    sets: Sets,
    /// The repetitions that are lexemes.
    loops: Loops,
    lines: String,
    /// Groups and lexemes so far, which their names have.
    count: usize,
}

impl Writer {
    fn line(&mut self, name: &str, expression: &str) {
        let _ = writeln!(self.lines, "{name}: {expression}");
    }

    /// Names something: Lark limits how deep parentheses are.
    fn named(&mut self, kind: char, expression: &str) -> String {
        self.count += 1;
        let name = format!("{kind}{}", self.count);
        self.line(&name, expression);
        name
    }

    /// An expression of terminals.
    fn terminal(&mut self, alternatives: &Alternatives) -> String {
        joined(alternatives, |sequence| sequence.iter().map(|item| self.atom(item)).collect())
    }

    /// A regular item.
    fn atom(&mut self, item: &Item) -> String {
        match item {
            Item::Text(text) if text.is_empty() => EMPTY.to_owned(),
            Item::Text(text) => format!("/{}/", text.chars().map(escaped).collect::<String>()),
            Item::Class { is_negated, ranges } => {
                let ranges = ranges.iter().map(|range| range.map(escaped).join("-"));
                let sign = if *is_negated { "^" } else { "" };
                format!("/[{sign}{}]/", ranges.collect::<String>())
            }
            Item::Any => "/(?s:.)/".to_owned(),
            Item::Rule(number) => format!("T{number}"),
            Item::Group(group) => {
                let expression = self.terminal(group);
                self.named('G', &expression)
            }
            Item::Repeated { item, least, most } => {
                let atom = self.atom(item);
                repeated(&atom, *least, *most)
            }
        }
    }

    /// An expression of rules and lexemes.
    fn rule(&mut self, alternatives: &Alternatives) -> String {
        joined(alternatives, |sequence| sequence.iter().map(|item| self.item(item)).collect())
    }

    fn item(&mut self, item: &Item) -> String {
        match item {
            Item::Text(text) if text.is_empty() => EMPTY.to_owned(),
            Item::Text(text) => {
                let characters = text.chars().map(|c| format!("/{}/", escaped(c)));
                let characters = characters.collect::<Vec<_>>().join(" ");
                // What repeats a text repeats all of it.
                if text.chars().nth(1).is_some() { format!("({characters})") } else { characters }
            }
            Item::Class { .. } | Item::Any => self.atom(item),
            Item::Rule(number) => format!("r{number}"),
            Item::Group(group) => {
                let expression = self.rule(group);
                self.named('g', &expression)
            }
            Item::Repeated { .. } if self.loops.contains(&std::ptr::from_ref(item)) => {
                self.lexeme(item)
            }
            Item::Repeated { item, least, most } => {
                let atom = self.item(item);
                repeated(&atom, *least, *most)
            }
        }
    }

    /// A regular item as a lexeme, which must not be empty: one that may be is optional.
    fn lexeme(&mut self, item: &Item) -> String {
        let atom = self.atom(item);
        if !self.sets.is_nullable(item) {
            return self.named('L', &atom);
        }
        self.named('L', &format!("{atom} & /(?s:.+)/")) + "?"
    }
}

/// Alternatives, whose items are written by `items`.
fn joined(alternatives: &Alternatives, mut items: impl FnMut(&[Item]) -> Vec<String>) -> String {
    let sequences = alternatives.iter().map(|sequence| match items(sequence) {
        items if items.is_empty() => EMPTY.to_owned(),
        items => items.join(" "),
    });
    sequences.collect::<Vec<_>>().join(" | ")
}

fn repeated(atom: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => format!("{atom}*"),
        (1, None) => format!("{atom}+"),
        (0, Some(1)) => format!("{atom}?"),
        (_, Some(0)) => EMPTY.to_owned(),
        (least, None) => format!("{atom}{{{least},}}"),
        (least, Some(most)) => format!("{atom}{{{least},{most}}}"),
    }
}

/// A character of a regular expression that stands for itself.
fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}
