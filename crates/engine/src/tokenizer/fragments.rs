//! A text that is cut at special tokens, one token after the other, in any order.

use std::collections::BTreeMap;
use std::ops::Range;

/// A piece of the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    /// Text that is still to be tokenized, as a range of bytes.
    Text(Range<usize>),
    /// A special token that stood there.
    Token(u32),
}

/// A special token to cut at.
pub(super) struct Cut<'c> {
    pub(super) id: u32,
    pub(super) token: &'c str,
    /// Takes the white space before it.
    pub(super) lstrip: bool,
    /// Takes the white space after it.
    pub(super) rstrip: bool,
}

/// The fragments so far.
pub(super) struct Fragments<'t> {
    text: &'t str,
    /// The ends of fragments of text by their starts, in bytes. None is empty.
    texts: BTreeMap<usize, usize>,
    /// Bytes in them.
    bytes: usize,
    /// Where tokens stood, in bytes, and their ids.
    tokens: Vec<(usize, u32)>,
}

impl<'t> Fragments<'t> {
    /// All of a text.
    pub(super) fn new(text: &'t str) -> Fragments<'t> {
        let texts = (!text.is_empty()).then_some((0, text.len())).into_iter().collect();
        Fragments { text, texts, bytes: text.len(), tokens: Vec::new() }
    }

    /// The number of fragments of text.
    pub(super) fn text_count(&self) -> usize {
        self.texts.len()
    }

    /// The bytes in them.
    pub(super) fn text_bytes(&self) -> usize {
        self.bytes
    }

    /// Cuts at a token that is at a place, if no other token has taken a part of it. Returns where
    /// the text after it starts.
    pub(super) fn cut_at(&mut self, at: usize, cut: &Cut<'_>) -> Option<usize> {
        let after = at + cut.token.len();
        let (&start, &end) =
            self.texts.range(..=at).next_back().filter(|(_, end)| after <= **end)?;
        let (mut left, mut right) = (&self.text[start..at], &self.text[after..end]);
        if cut.lstrip {
            left = left.trim_end_matches(is_space);
        }
        if cut.rstrip {
            right = right.trim_start_matches(is_space);
        }
        self.texts.remove(&start);
        if !left.is_empty() {
            self.texts.insert(start, start + left.len());
        }
        if !right.is_empty() {
            self.texts.insert(end - right.len(), end);
        }
        self.bytes -= end - start - left.len() - right.len();
        self.tokens.push((at, cut.id));
        Some(end - right.len())
    }

    /// Cuts wherever a token is, which it searches for.
    pub(super) fn cut_everywhere(&mut self, cut: &Cut<'_>) {
        let ranges: Vec<(usize, usize)> = self.texts.iter().map(|(&s, &e)| (s, e)).collect();
        for (mut start, end) in ranges {
            while let Some(found) = self.text[start..end].find(cut.token) {
                let Some(after) = self.cut_at(start + found, cut) else { break };
                start = after;
            }
        }
    }

    /// All in the order of the text.
    pub(super) fn into_vec(self) -> Vec<Fragment> {
        let tokens = self.tokens.into_iter().map(|(at, id)| (at, Fragment::Token(id)));
        let texts = self.texts.into_iter().map(|(start, end)| (start, Fragment::Text(start..end)));
        let mut all: Vec<(usize, Fragment)> = tokens.chain(texts).collect();
        all.sort_unstable_by_key(|&(at, _)| at);
        all.into_iter().map(|(_, fragment)| fragment).collect()
    }
}

/// White space as C has it.
fn is_space(character: char) -> bool {
    matches!(character, ' ' | '\t'..='\r')
}
