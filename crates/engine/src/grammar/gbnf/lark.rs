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
use crate::grammar::regex::{escape, escape_character};

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
            let expression = writer.alternatives(rule, true);
            writer.line(&format!("T{number}"), &expression);
        }
        if !is_regular {
            let expression = writer.alternatives(rule, false);
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

    /// An expression: of terminals in a lexeme, of rules and lexemes elsewhere.
    fn alternatives(&mut self, alternatives: &Alternatives, is_in_lexeme: bool) -> String {
        let mut sequences = Vec::new();
        for sequence in alternatives {
            let items: Vec<String> =
                sequence.iter().map(|item| self.item(item, is_in_lexeme)).collect();
            sequences.push(if items.is_empty() { EMPTY.to_owned() } else { items.join(" ") });
        }
        sequences.join(" | ")
    }

    fn item(&mut self, item: &Item, is_in_lexeme: bool) -> String {
        match item {
            Item::Text(text) if text.is_empty() => EMPTY.to_owned(),
            Item::Text(text) if is_in_lexeme => format!("/{}/", escape(text)),
            Item::Text(text) => {
                let characters = text.chars().map(|c| format!("/{}/", escape_character(c)));
                let characters = characters.collect::<Vec<_>>().join(" ");
                // What repeats a text repeats all of it.
                if text.chars().nth(1).is_some() { format!("({characters})") } else { characters }
            }
            Item::Class { is_negated, ranges } => {
                let ranges = ranges.iter().map(|range| range.map(escape_character).join("-"));
                let sign = if *is_negated { "^" } else { "" };
                format!("/[{sign}{}]/", ranges.collect::<String>())
            }
            Item::Any => "/(?s:.)/".to_owned(),
            Item::Rule(number) => format!("{}{number}", if is_in_lexeme { 'T' } else { 'r' }),
            Item::Group(group) => {
                let expression = self.alternatives(group, is_in_lexeme);
                self.named(if is_in_lexeme { 'G' } else { 'g' }, &expression)
            }
            Item::Repeated { .. }
                if !is_in_lexeme && self.loops.contains(&std::ptr::from_ref(item)) =>
            {
                self.lexeme(item)
            }
            Item::Repeated { item, least, most } => {
                let item = self.item(item, is_in_lexeme);
                repeated(&item, *least, *most)
            }
        }
    }

    /// A regular item as a lexeme, which must not be empty: one that may be is optional.
    fn lexeme(&mut self, item: &Item) -> String {
        let item_text = self.item(item, true);
        if !self.sets.is_nullable(item) {
            return self.named('L', &item_text);
        }
        self.named('L', &format!("{item_text} & /(?s:.+)/")) + "?"
    }
}

fn repeated(item: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => format!("{item}*"),
        (1, None) => format!("{item}+"),
        (0, Some(1)) => format!("{item}?"),
        (_, Some(0)) => EMPTY.to_owned(),
        (least, None) => format!("{item}{{{least},}}"),
        (least, Some(most)) => format!("{item}{{{least},{most}}}"),
    }
}
