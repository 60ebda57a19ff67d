//! Byte-level BPE (`gpt2`): text is cut into words, words into bytes, and bytes are merged in the
//! order of a list. It must not know special tokens.

use bodkin_gguf::Metadata;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::alphabet;
use super::merge::{Merger, Pairs};
use super::split::{Named, Splitter};
use super::vocabulary::{Vocabulary, vocabulary as error};
use crate::error::Result;

const MERGES: &str = "tokenizer.ggml.merges";

/// Merges, and the symbols that they are between. A symbol is a token's id, or a number from the
/// vocabulary's size on for a text that is part of a merge and no token.
pub(super) struct ByteLevel {
    splitter: Splitter,
    whole_words: bool,
    pairs: PairTable,
    /// The symbol of each byte.
    bytes: Box<[u32; 256]>,
    /// Symbols from here on are no tokens.
    tokens: u32,
}

/// Rank and result by the two symbols, which make up the key.
struct PairTable(FxHashMap<u64, (u32, u32)>);

impl Pairs for PairTable {
    fn join(&self, left: u32, right: u32, _: &[u8]) -> Option<(u32, u32)> {
        self.0.get(&key(left, right)).copied()
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Numbers the texts of merges.
struct Symbols<'a> {
    vocabulary: &'a Vocabulary,
    others: FxHashMap<Vec<u8>, u32>,
    next: u32,
}

impl Symbols<'_> {
    /// As [`Symbols::number`], for a text that is likely to be that of the token `guess` or of the
    /// one after it: tokens mostly have the order of the merges that make them, and looking there
    /// is faster than looking everywhere.
    fn number_near(&mut self, guess: u32, text: &[u8]) -> u32 {
        // Special tokens need not be spelled in the alphabet, so their texts say nothing here.
        let is_it =
            |&id: &u32| self.vocabulary.text(id) == text && !self.vocabulary.kind(id).is_special();
        let found = [guess, guess.saturating_add(1)].into_iter().find(is_it);
        found.unwrap_or_else(|| self.number(text))
    }

    fn number(&mut self, text: &[u8]) -> u32 {
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

impl ByteLevel {
    pub(super) fn memory_bytes(&self) -> usize {
        // Of a standard table, an eighth at least stays empty, and each place has a byte of marks.
        let places = (self.pairs.0.capacity() * 8).div_ceil(7).next_power_of_two();
        places * (size_of::<(u64, (u32, u32))>() + 1)
    }

    pub(super) fn from_metadata(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
        named: &Named,
    ) -> Result<ByteLevel> {
        let Some(merges) = metadata.strings(MERGES)? else {
            return Err(error(MERGES, "an array of texts", "no such key"));
        };
        // Each merge and each byte may need a number of its own.
        if vocabulary.len() + 3 * merges.len() + 256 > u32::MAX as usize {
            return Err(error(MERGES, "fewer merges", merges.len().to_string()));
        }
        let tokens = vocabulary.len() as u32;
        let mut symbols = Symbols { vocabulary, others: aliases(vocabulary), next: tokens };
        let bytes = Box::new(std::array::from_fn(|byte| symbols.number(&[byte as u8])));
        let mut pairs = FxHashMap::with_capacity_and_hasher(merges.len(), FxBuildHasher);
        let (mut text, mut rank, mut joined) = (Vec::new(), 0, 0);
        for merge in merges {
            text.clear();
            if let Some(middle) = decode(merge, &mut text) {
                let (left, right) = text.split_at(middle);
                let pair = key(symbols.number(left), symbols.number(right));
                joined = symbols.number_near(joined, &text);
                pairs.entry(pair).or_insert((rank, joined));
            }
            rank += 1;
        }
        Ok(ByteLevel {
            splitter: Splitter::new(named),
            whole_words: named.whole_words,
            pairs: PairTable(pairs),
            bytes,
            tokens,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, vocabulary: &Vocabulary, out: &mut Vec<u32>) {
        let (mut words, mut buffer) = (Vec::new(), Vec::new());
        self.splitter.split(text, &mut words, &mut buffer);
        let mut merger = Merger::default();
        let mut start = 0;
        for end in words {
            let word = &text.as_bytes()[std::mem::replace(&mut start, end)..end];
            if self.whole_words
                && let Some(id) = vocabulary.find(word)
            {
                out.push(id);
                continue;
            }
            word.iter().for_each(|&byte| merger.push(self.bytes[usize::from(byte)], 1));
            merger.run(word, &self.pairs, |symbol, text| self.emit(symbol, text, out));
        }
    }

    /// Appends a symbol. One that is no token falls apart into those of its bytes that are spelled
    /// as themselves, which is what llama.cpp makes of it.
    fn emit(&self, symbol: u32, text: &[u8], out: &mut Vec<u32>) {
        if symbol < self.tokens {
            out.push(symbol);
            return;
        }
        let bytes = text.iter().filter(|&&byte| alphabet::is_itself(byte));
        out.extend(bytes.map(|&byte| self.bytes[usize::from(byte)]).filter(|&s| s < self.tokens));
    }
}

/// Special tokens whose texts spell something else in the alphabet: merges may make them, though
/// they are shown as they are.
fn aliases(vocabulary: &Vocabulary) -> FxHashMap<Vec<u8>, u32> {
    let mut aliases = FxHashMap::default();
    for &id in vocabulary.unlisted() {
        let mut bytes = Vec::new();
        if let Ok(text) = str::from_utf8(vocabulary.text(id))
            && alphabet::decode(text, &mut bytes)
        {
            aliases.insert(bytes, id);
        }
    }
    aliases
}

/// Appends the bytes of both sides of a merge and returns where the second starts; None if it is
/// not spelled in the alphabet, so that no text can need it.
fn decode(merge: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    let merge = str::from_utf8(merge).ok()?;
    // A side may be a space itself in vocabularies that are not byte-level, hence not from 0.
    let skip = merge.chars().next()?.len_utf8();
    let (left, right) = merge.split_at(skip + merge[skip..].find(' ')?);
    let is_spelled = alphabet::decode(left, out);
    let middle = out.len();
    (is_spelled && alphabet::decode(&right[1..], out)).then_some(middle)
}
