//! Byte-level BPE (`gpt2`): text is cut into words, words into bytes, and bytes are merged in the
//! order of a list. It must not know special tokens.

use bodkin_gguf::Metadata;
use hashbrown::HashMap;

use super::alphabet;
use super::merge::Merger;
use super::merges::{PairTable, Symbols};
use super::pre_tokenizers::PreTokenizer;
use super::splitter::Splitter;
use super::vocabulary::Vocabulary;
use crate::error::Result;

/// Merges, and the symbols that words start from.
pub(super) struct ByteLevel {
    splitter: Splitter,
    ignore_merges: bool,
    pairs: PairTable,
    /// The symbol of each byte.
    bytes: Box<[u32; 256]>,
    /// Symbols from here on are no tokens.
    tokens: u32,
}

impl ByteLevel {
    pub(super) fn memory_bytes(&self) -> usize {
        self.pairs.memory_bytes()
    }

    pub(super) fn from_metadata(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
        pre: &PreTokenizer,
    ) -> Result<ByteLevel> {
        let mut symbols = Symbols::new(vocabulary, aliases(vocabulary));
        let bytes = Box::new(std::array::from_fn(|byte| symbols.number(&[byte as u8])));
        Ok(ByteLevel {
            splitter: Splitter::new(pre),
            ignore_merges: pre.ignore_merges,
            pairs: PairTable::from_metadata(metadata, &mut symbols, decode)?,
            bytes,
            tokens: vocabulary.len() as u32,
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
            if self.ignore_merges
                && let Some(id) = vocabulary.find(word)
            {
                out.push(id);
                continue;
            }
            for (at, &byte) in word.iter().enumerate() {
                merger.push(self.bytes[usize::from(byte)], at);
            }
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
fn aliases(vocabulary: &Vocabulary) -> HashMap<Vec<u8>, u32> {
    let mut aliases = HashMap::default();
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
