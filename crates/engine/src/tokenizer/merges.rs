//! The list of merges of a vocabulary (`tokenizer.ggml.merges`): which two symbols become which
//! third, and in which order. It must not know how a text is cut into its first symbols.

use bodkin_gguf::Metadata;
use hashbrown::HashMap;

use super::merge::Pairs;
use super::vocabulary::{Vocabulary, vocabulary as error};
use crate::error::Result;

const MERGES: &str = "tokenizer.ggml.merges";

/// Known models have fewer than half a million. Each may need three symbols of its own.
const MAX_MERGES: usize = 1 << 20;

/// Rank and result by the two symbols, which make up the key.
pub(super) struct PairTable(HashMap<u64, (u32, u32)>);

impl Pairs for PairTable {
    fn join(&self, left: u32, right: u32, _: &[u8]) -> Option<(u32, u32)> {
        self.0.get(&key(left, right)).copied()
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Numbers the texts of merges: a symbol is a token's id, or a number from the vocabulary's size on
/// for a text that is part of a merge and no token.
pub(super) struct Symbols<'a> {
    vocabulary: &'a Vocabulary,
    others: HashMap<Vec<u8>, u32>,
    next: u32,
}

impl<'a> Symbols<'a> {
    /// `others` are texts that are numbered already.
    pub(super) fn new(vocabulary: &'a Vocabulary, others: HashMap<Vec<u8>, u32>) -> Symbols<'a> {
        Symbols { vocabulary, others, next: vocabulary.len() as u32 }
    }

    /// As [`Symbols::number`], for a text that is likely to be that of the token `guess` or of the
    /// one after it: tokens mostly have the order of the merges that make them, and looking there
    /// is faster than looking everywhere.
    fn number_near(&mut self, guess: u32, text: &[u8]) -> u32 {
        // Special tokens need not be spelled in the alphabet, so their texts say nothing here.
        let is_it = |&id: &u32| {
            self.vocabulary.text(id) == text && !self.vocabulary.token_type(id).is_special()
        };
        let found = [guess, guess.saturating_add(1)].into_iter().find(is_it);
        found.unwrap_or_else(|| self.number(text))
    }

    /// The characters that are parts of merges and no tokens.
    pub(super) fn characters(&self) -> impl Iterator<Item = (char, u32)> {
        self.others.iter().filter_map(|(text, &symbol)| {
            let mut characters = str::from_utf8(text).ok()?.chars();
            let first = characters.next()?;
            characters.next().is_none().then_some((first, symbol))
        })
    }

    /// The symbol of a text.
    pub(super) fn number(&mut self, text: &[u8]) -> u32 {
        if let Some(id) = self.vocabulary.find(text) {
            return id;
        }
        if let Some(&number) = self.others.get(text) {
            return number;
        }
        self.next += 1;
        self.others.insert(text.to_vec(), self.next - 1);
        self.next - 1
    }
}

impl PairTable {
    /// Reads the merges. `split` appends the bytes of both sides of one to its buffer and returns
    /// where the second starts, or none if no text can need the merge.
    pub(super) fn from_metadata(
        metadata: &Metadata,
        symbols: &mut Symbols<'_>,
        split: impl Fn(&[u8], &mut Vec<u8>) -> Option<usize>,
    ) -> Result<PairTable> {
        let Some(merges) = metadata.strings(MERGES)? else {
            return Err(error(MERGES, "an array of texts", "no such key"));
        };
        if merges.len() > MAX_MERGES {
            let expected = format!("at most {MAX_MERGES} merges");
            return Err(error(MERGES, &expected, merges.len().to_string()));
        }
        let mut pairs = HashMap::with_capacity(merges.len());
        let (mut text, mut rank, mut joined) = (Vec::new(), 0, 0);
        for merge in merges {
            text.clear();
            if let Some(middle) = split(merge, &mut text) {
                let (left, right) = text.split_at(middle);
                let pair = key(symbols.number(left), symbols.number(right));
                joined = symbols.number_near(joined, &text);
                pairs.entry(pair).or_insert((rank, joined));
            }
            rank += 1;
        }
        Ok(PairTable(pairs))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        // Of a standard table, an eighth at least stays empty, and each place has a byte of marks.
        let places = (self.0.capacity() * 8).div_ceil(7).next_power_of_two();
        places * (size_of::<(u64, (u32, u32))>() + 1)
    }
}
