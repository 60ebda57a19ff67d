//! Reads GBNF.

use rustc_hash::FxHashMap;

use super::rules::{Alternatives, Item, Sequence};

/// The longest grammar, in bytes.
pub(super) const TEXT_BYTES: usize = 1 << 16;
/// The most rules of a grammar.
const RULES: usize = 1000;
/// The most parentheses within each other.
const DEPTH: usize = 64;
/// The most items that are repeated: the time to compile them grows with their square.
const REPEATED: usize = 2000;
/// The highest number of a repetition; llama.cpp's.
const REPETITIONS: u32 = 2000;

/// The rule that an answer is.
const ROOT: &str = "root";

type Parsed<T> = Result<T, String>;

/// The rules, by number; the first is that of the answer.
///
/// # Errors
/// If the text is not GBNF, or larger than the limits.
pub(super) fn parse(text: &str) -> Parsed<Vec<Alternatives>> {
    if text.len() > TEXT_BYTES {
        let bytes = text.len();
        return Err(format!("the grammar has {bytes} bytes, at most {TEXT_BYTES} are allowed"));
    }
    let mut parser =
        Parser { text, at: 0, names: FxHashMap::default(), rules: Vec::new(), repeated: 0 };
    parser.number(ROOT)?;
    parser.rules()?;
    let undefined = |name: &&&str| parser.rules[parser.names[**name]].is_none();
    // The first by name, so that the error is always the same.
    match parser.names.keys().filter(undefined).min() {
        None => Ok(parser.rules.into_iter().flatten().collect()),
        Some(&ROOT) => Err(format!("expected a rule named {ROOT}, found none")),
        Some(name) => Err(format!("the rule {name} is used and not defined")),
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// The numbers of rules.
    names: FxHashMap<&'a str, usize>,
    /// None for a rule that has only been used.
    rules: Vec<Option<Alternatives>>,
    /// Repeated items so far.
    repeated: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    /// Takes a text if it comes next.
    fn take(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    /// An error on this line.
    fn wrong_here<T>(&self, message: &str) -> Parsed<T> {
        let line = self.text[..self.at].matches('\n').count() + 1;
        Err(format!("line {line}: {message}"))
    }

    /// An error at this place.
    fn wrong<T>(&self, expected: &str) -> Parsed<T> {
        let found = match self.peek() {
            None => "the end".to_owned(),
            Some('\n' | '\r') => "the end of the line".to_owned(),
            Some(c) => c.to_string(),
        };
        self.wrong_here(&format!("expected {expected}, found {found}"))
    }

    /// Skips spaces and comments, and ends of lines if those mean nothing here.
    fn space(&mut self, over_lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if over_lines => self.at += 1,
                '#' => self.at += self.rest().find(['\n', '\r']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    /// The number of a rule.
    fn number(&mut self, name: &'a str) -> Parsed<usize> {
        let next = self.names.len();
        if next == RULES && !self.names.contains_key(name) {
            return self.wrong_here(&format!("the grammar has more than {RULES} rules"));
        }
        let number = *self.names.entry(name).or_insert(next);
        if number == next {
            self.rules.push(None);
        }
        Ok(number)
    }

    /// A name; empty if there is none.
    fn name(&mut self) -> &'a str {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let rest = self.rest();
        let name = &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())];
        self.at += name.len();
        name
    }

    fn rules(&mut self) -> Parsed<()> {
        self.space(true);
        while self.peek().is_some() {
            let name = self.name();
            if name.is_empty() {
                return self.wrong("the name of a rule");
            }
            self.space(false);
            if !self.take("::=") {
                return self.wrong("::=");
            }
            self.space(true);
            let number = self.number(name)?;
            let alternatives = self.alternatives(0)?;
            if !matches!(self.peek(), None | Some('\n' | '\r')) {
                return self.wrong("the end of the rule");
            }
            // As in llama.cpp, the last definition counts.
            self.rules[number] = Some(alternatives);
            self.space(true);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Parsed<Alternatives> {
        let mut alternatives = vec![self.sequence(depth)?];
        while self.take("|") {
            self.space(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(alternatives)
    }

    fn sequence(&mut self, depth: usize) -> Parsed<Sequence> {
        let mut items = Vec::new();
        loop {
            let item = match self.peek() {
                Some('"') => self.text()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Item::Any
                }
                Some('(') if depth == DEPTH => {
                    let message = format!("more than {DEPTH} parentheses are within each other");
                    return self.wrong_here(&message);
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let group = self.alternatives(depth + 1)?;
                    if !self.take(")") {
                        return self.wrong(")");
                    }
                    Item::Group(group)
                }
                Some('<' | '!') => {
                    return self.wrong("a text or a rule (tokens are not supported)");
                }
                _ => match self.name() {
                    "" => return Ok(items),
                    name => Item::Rule(self.number(name)?),
                },
            };
            // Within parentheses a sequence goes on in the next line.
            self.space(depth > 0);
            items.push(self.repeated(item, depth)?);
        }
    }

    /// An item with the repetition that comes next, if any does.
    fn repeated(&mut self, item: Item, depth: usize) -> Parsed<Item> {
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.bounds(depth)?,
            _ => return Ok(item),
        };
        self.at += 1;
        self.space(depth > 0);
        self.repeated += 1;
        match self.peek() {
            _ if self.repeated > REPEATED => {
                self.wrong_here(&format!("the grammar repeats more than {REPEATED} items"))
            }
            Some('*' | '+' | '?' | '{') => self.wrong("one repetition (parentheses allow another)"),
            _ => Ok(Item::Repeated { item: Box::new(item), least, most }),
        }
    }

    /// The numbers between braces, up to the closing one.
    fn bounds(&mut self, depth: usize) -> Parsed<(u32, Option<u32>)> {
        let over_lines = depth > 0;
        self.at += 1;
        self.space(over_lines);
        let Some(least) = self.integer()? else { return self.wrong("a number") };
        self.space(over_lines);
        let most = match self.take(",") {
            false => Some(least),
            true => {
                self.space(over_lines);
                let most = self.integer()?;
                self.space(over_lines);
                most
            }
        };
        match most {
            _ if self.peek() != Some('}') => self.wrong("}"),
            Some(most) if most < least => self.wrong_here(&format!(
                "expected a highest number of at least {least}, found {most}"
            )),
            most => Ok((least, most)),
        }
    }

    fn integer(&mut self) -> Parsed<Option<u32>> {
        let rest = self.rest();
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
        if digits.is_empty() {
            return Ok(None);
        }
        match digits.parse() {
            Ok(number) if number <= REPETITIONS => {
                self.at += digits.len();
                Ok(Some(number))
            }
            _ => self.wrong(&format!("a number of repetitions of at most {REPETITIONS}")),
        }
    }

    fn text(&mut self) -> Parsed<Item> {
        self.at += 1;
        let mut text = String::new();
        while !self.take("\"") {
            text.push(self.character("\"")?);
        }
        Ok(Item::Text(text))
    }

    fn class(&mut self) -> Parsed<Item> {
        self.at += 1;
        let is_negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.character("]")?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            self.at += usize::from(is_range);
            let last = if is_range { self.character("]")? } else { first };
            if last < first {
                let message = format!("the range {first}-{last} ends before it begins");
                return self.wrong_here(&message);
            }
            ranges.push([first, last]);
        }
        match ranges.is_empty() {
            true => self.wrong_here("expected characters between the brackets, found none"),
            false => Ok(Item::Class { is_negated, ranges }),
        }
    }

    /// A character of what ends with `end`, which may be an escape.
    fn character(&mut self, end: &str) -> Parsed<char> {
        match self.next() {
            None => self.wrong(end),
            Some('\\') => {
                let digits = match self.peek() {
                    Some('x') => 2,
                    Some('u') => 4,
                    Some('U') => 8,
                    Some('t') => return Ok(self.skip('\t')),
                    Some('r') => return Ok(self.skip('\r')),
                    Some('n') => return Ok(self.skip('\n')),
                    Some(c @ ('\\' | '"' | '[' | ']')) => return Ok(self.skip(c)),
                    _ => return self.wrong("an escape: one of t r n \\ \" [ ] x u U"),
                };
                let hex = self.rest().get(1..=digits);
                let hex = hex.filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
                let code = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok());
                let Some(c) = code.and_then(char::from_u32) else {
                    let expected = format!("{digits} hexadecimal digits of a Unicode character");
                    return self.wrong(&expected);
                };
                self.at += 1 + digits;
                Ok(c)
            }
            Some(c) => Ok(c),
        }
    }

    /// Goes on behind one ASCII character, which stands for `c`.
    fn skip(&mut self, c: char) -> char {
        self.at += 1;
        c
    }
}
