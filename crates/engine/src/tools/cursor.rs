//! A place in the text of a block of calls, and what is read there.

use serde_json::Value;

/// The longest text in the place of a placeholder, in bytes.
const PLACEHOLDER_BYTES: usize = 128;

/// What may stand in the texts of a format.
const PLACEHOLDERS: [&str; 6] = ["{n}", "{id}", "{call_id}", "{json}", "{type}", "{any}"];

/// Why a text cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It ends too soon.
    End,
    /// It is not what was expected.
    Wrong,
}

pub(super) type Found<T> = Result<T, Stop>;

/// A place in a text.
pub(super) struct Cursor<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Skips characters of these kinds.
    pub(super) fn skip(&mut self, is_skipped: impl Fn(char) -> bool) {
        self.at = self.text.len() - self.rest().trim_start_matches(is_skipped).len();
    }

    pub(super) fn skip_space(&mut self) {
        self.skip(char::is_whitespace);
    }

    /// Skips a text if it comes next.
    pub(super) fn take(&mut self, text: &str) -> bool {
        let is_next = self.rest().starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    /// Skips a text that must come next.
    pub(super) fn expect(&mut self, text: &str) -> Found<()> {
        match self.take(text) {
            true => Ok(()),
            false if text.starts_with(self.rest()) => Err(Stop::End),
            false => Err(Stop::Wrong),
        }
    }

    /// Skips what is written as `pattern`. White space around the texts between placeholders may
    /// be there or not.
    pub(super) fn expect_written(&mut self, pattern: &str) -> Found<()> {
        let mut is_skipping = false;
        for (i, text) in pieces(pattern).enumerate() {
            if i % 2 == 1 {
                is_skipping = true;
                continue;
            }
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            if is_skipping {
                let window = self.rest().floor_char_boundary(PLACEHOLDER_BYTES);
                match self.rest()[..window].find(text) {
                    Some(found) => self.at += found,
                    None if window == self.rest().len() => return Err(Stop::End),
                    None => return Err(Stop::Wrong),
                }
            } else {
                self.skip_space();
            }
            self.expect(text)?;
            is_skipping = false;
        }
        Ok(())
    }

    /// A JSON value.
    pub(super) fn json(&mut self) -> Found<Value> {
        let mut values = serde_json::Deserializer::from_str(self.rest()).into_iter();
        let value = values.next();
        self.at += values.byte_offset();
        match value {
            None => Err(Stop::End),
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) if error.is_eof() => Err(Stop::End),
            Some(Err(_)) => Err(Stop::Wrong),
        }
    }
}

/// The texts of a pattern and, between them, the names of its placeholders.
pub(crate) fn pieces(pattern: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(pattern);
    let mut placeholder = None;
    std::iter::from_fn(move || {
        if let Some(name) = placeholder.take() {
            return Some(name);
        }
        let text = rest.take()?;
        let found = PLACEHOLDERS.iter().filter_map(|name| Some((text.find(name)?, *name))).min();
        let Some((at, name)) = found else { return Some(text) };
        placeholder = Some(name);
        rest = Some(&text[at + name.len()..]);
        Some(&text[..at])
    })
}
