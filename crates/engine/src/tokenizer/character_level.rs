//! BPE on characters (`gemma4`, and `gpt2` with a few pre-tokenizers): as byte-level BPE, but a
//! word starts as its characters, tokens are spelled as they are, and what is no token falls back
//! to tokens of bytes. It must not know special tokens.

use bodkin_gguf::Metadata;
use hashbrown::HashMap;

use super::merge::Merger;
use super::merges::{PairTable, Symbols};
use super::pre_tokenizers::{CharacterRules, PreTokenizer};
use super::sentence_piece::SPACE;
use super::splitter::Splitter;
use super::vocabulary::Vocabulary;
use crate::error::Result;

/// Merges, and the symbols that words start from.
pub(super) struct CharacterLevel {
    splitter: Splitter,
    rules: CharacterRules,
    pairs: PairTable,
    /// CharacterRules that are parts of merges and no tokens.
    others: HashMap<char, u32>,
    /// The token of each byte.
    bytes: Box<[Option<u32>; 256]>,
    /// Symbols from here on are no tokens.
    tokens: u32,
}

/// A character that is neither a token nor part of a merge.
const UNKNOWN: u32 = u32::MAX;

impl CharacterLevel {
    pub(super) fn memory_bytes(&self) -> usize {
        self.pairs.memory_bytes()
    }

    pub(super) fn from_metadata(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
        pre: &PreTokenizer,
        rules: CharacterRules,
    ) -> Result<CharacterLevel> {
        let mut symbols = Symbols::new(vocabulary, HashMap::default());
        let pairs = PairTable::from_metadata(metadata, &mut symbols, split)?;
        let byte = |byte| vocabulary.find(format!("<0x{byte:02X}>").as_bytes());
        Ok(CharacterLevel {
            splitter: Splitter::new(pre),
            rules,
            pairs,
            others: symbols.characters().collect(),
            bytes: Box::new(std::array::from_fn(byte)),
            tokens: vocabulary.len() as u32,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, text: &str, vocabulary: &Vocabulary, out: &mut Vec<u32>) {
        let text = text.replace(' ', SPACE);
        let (mut words, mut buffer) = (Vec::new(), Vec::new());
        self.splitter.split(&text, &mut words, &mut buffer);
        let mut merger = Merger::default();
        let mut start = 0;
        for end in words {
            let word = &text[std::mem::replace(&mut start, end)..end];
            if self.rules.whole_breaks
                && word.bytes().all(|byte| byte == b'\n')
                && let Some(id) = vocabulary.find(word.as_bytes())
            {
                out.push(id);
                continue;
            }
            let mut spelled = [0; 4];
            for (at, character) in word.char_indices() {
                let spelled = character.encode_utf8(&mut spelled).as_bytes();
                let symbol = vocabulary.find(spelled);
                let symbol = symbol.or_else(|| self.others.get(&character).copied());
                merger.push(symbol.unwrap_or(UNKNOWN), at);
            }
            merger.run(word.as_bytes(), &self.pairs, |symbol, text| match symbol < self.tokens {
                true => out.push(symbol),
                false => out.extend(text.iter().filter_map(|&byte| self.bytes[usize::from(byte)])),
            });
        }
    }
}

/// Appends both sides of a merge, which a space parts, and returns where the second starts. The
/// first has at least one byte, which may be a space itself.
fn split(merge: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    let middle = 1 + merge.get(1..)?.iter().position(|&byte| byte == b' ')?;
    out.extend_from_slice(&merge[..middle]);
    out.extend_from_slice(&merge[middle + 1..]);
    Some(middle)
}
