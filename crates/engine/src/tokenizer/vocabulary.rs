//! The tokens of a model: their texts, kinds, and the way from a text back to its token. All texts
//! lie in one buffer, because a quarter of a million small allocations would take longer than
//! everything else at load. It must not know how text is cut into tokens.

use std::hash::BuildHasher;

use bodkin_gguf::{Array, Metadata, Value};
use hashbrown::{DefaultHashBuilder, HashTable};

use super::alphabet;
use crate::error::{Error, Result};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

/// The longest text of a token in the metadata. At each byte of a text, some tokenizers read as
/// many as the longest token has. Those of known models have less than 400.
const MAX_TOKEN_BYTES: usize = 1024;

/// The texts of all tokens, with 16 bytes for each, as some tokenizers hold 12 times their bytes. A
/// million tokens of usual lengths have less.
const MAX_VOCABULARY_BYTES: usize = 24 << 20;

/// What a token is for. The numbers are those of `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    Undefined,
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_number(number: i32) -> TokenType {
        match number {
            1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => TokenType::Undefined,
        }
    }

    /// Whether the token is looked for in the text before anything else is.
    pub(super) fn is_special(self) -> bool {
        matches!(self, TokenType::Unknown | TokenType::Control | TokenType::UserDefined)
    }

    /// Whether the token has no text of its own.
    pub(super) fn is_hidden(self) -> bool {
        matches!(self, TokenType::Unknown | TokenType::Control)
    }
}

/// How the texts in the metadata stand for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// In the alphabet of byte-level BPE; special tokens as they are.
    ByteLevel,
    /// As they are.
    Plain,
}

/// All tokens, by id.
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each text ends in `bytes`.
    ends: Vec<u32>,
    kinds: Vec<TokenType>,
    /// Ids by text.
    table: HashTable<u32>,
    /// Tokens that no piece of text can be, because they are not spelled in the alphabet.
    unlisted: Vec<u32>,
    hasher: DefaultHashBuilder,
}

impl Vocabulary {
    pub(super) fn memory_bytes(&self) -> usize {
        let lists = self.bytes.capacity() + 4 * self.ends.capacity() + self.kinds.capacity();
        lists + self.table.allocation_size()
    }

    /// Reads `tokenizer.ggml.tokens` and `token_type`.
    pub(super) fn from_metadata(metadata: &Metadata, spelling: Spelling) -> Result<Vocabulary> {
        let Some(texts) = metadata.strings(TOKENS)? else {
            return Err(vocabulary(TOKENS, "an array of texts", "no such key"));
        };
        let kinds = kinds(metadata, texts.len())?;
        let length: usize = texts.iter().map(|text| text.len() + 16).sum();
        if length > MAX_VOCABULARY_BYTES {
            let expected = format!("texts of at most {MAX_VOCABULARY_BYTES} bytes in all");
            return Err(vocabulary(TOKENS, &expected, format!("{length} bytes")));
        }
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        if longest > MAX_TOKEN_BYTES {
            let expected = format!("tokens of at most {MAX_TOKEN_BYTES} bytes");
            return Err(vocabulary(TOKENS, &expected, format!("{longest} bytes")));
        }
        let mut new = Vocabulary {
            bytes: Vec::with_capacity(length),
            ends: Vec::with_capacity(texts.len()),
            kinds,
            table: HashTable::with_capacity(texts.len()),
            unlisted: Vec::new(),
            hasher: DefaultHashBuilder::default(),
        };
        for text in texts {
            new.push(text, spelling);
        }
        Ok(new)
    }

    fn push(&mut self, text: &[u8], spelling: Spelling) {
        let id = self.ends.len() as u32;
        let start = self.bytes.len();
        let is_listed = if text.is_empty() {
            // Nothing can be this token; it is shown by a name, as in llama.cpp.
            self.bytes.extend_from_slice(format!("[EMPTY_{id}]").as_bytes());
            true
        } else if spelling == Spelling::Plain {
            self.bytes.extend_from_slice(text);
            true
        } else {
            self.push_byte_level(text, self.kinds[id as usize].is_special())
        };
        self.ends.push(self.bytes.len() as u32);
        if !is_listed {
            self.unlisted.push(id);
            return;
        }
        let (bytes, ends, hasher) = (&self.bytes, &self.ends, &self.hasher);
        let text = &bytes[start..];
        let is_same = |&other: &u32| slice(bytes, ends, other) == text;
        let hash_of = |&other: &u32| hasher.hash_one(slice(bytes, ends, other));
        match self.table.entry(hasher.hash_one(text), is_same, hash_of) {
            // Of two tokens with one text the later is found.
            hashbrown::hash_table::Entry::Occupied(mut entry) => *entry.get_mut() = id,
            hashbrown::hash_table::Entry::Vacant(entry) => drop(entry.insert(id)),
        }
    }

    /// Appends a text that is spelled in the alphabet of byte-level BPE. Returns whether the
    /// appended bytes are the ones that it stands for.
    fn push_byte_level(&mut self, text: &[u8], is_special: bool) -> bool {
        let start = self.bytes.len();
        if let Ok(spelled) = str::from_utf8(text)
            && alphabet::decode(spelled, &mut self.bytes)
        {
            if !is_special || self.bytes[start..] == *text {
                return true;
            }
            self.bytes.truncate(start);
        }
        self.bytes.extend_from_slice(text);
        false
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// A token's text: for byte-level BPE the bytes that it stands for, else as in the metadata.
    /// Empty for ids that are no tokens.
    pub(super) fn text(&self, id: u32) -> &[u8] {
        if (id as usize) < self.len() { slice(&self.bytes, &self.ends, id) } else { &[] }
    }

    /// A token's kind; `Undefined` for ids that are no tokens.
    pub(super) fn token_type(&self, id: u32) -> TokenType {
        self.kinds.get(id as usize).copied().unwrap_or(TokenType::Undefined)
    }

    pub(super) fn set_token_type(&mut self, id: u32, kind: TokenType) {
        self.kinds[id as usize] = kind;
    }

    /// The token that a piece of text is.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(text);
        let is_same = |&id: &u32| slice(&self.bytes, &self.ends, id) == text;
        self.table.find(hash, is_same).copied()
    }

    /// The token with this text, special tokens included that no piece of text can be.
    pub(super) fn find_named(&self, text: &[u8]) -> Option<u32> {
        let unlisted = || self.unlisted.iter().copied().find(|&id| self.text(id) == text);
        self.find(text).or_else(unlisted)
    }

    /// Tokens that [`Vocabulary::find`] does not find.
    pub(super) fn unlisted(&self) -> &[u32] {
        &self.unlisted
    }
}

fn slice<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] as usize };
    &bytes[start..ends[id] as usize]
}

fn kinds(metadata: &Metadata, count: usize) -> Result<Vec<TokenType>> {
    let numbers = match metadata.get(TYPES) {
        None => return Ok(vec![TokenType::Normal; count]),
        Some(Value::Array(Array::I32(numbers))) => numbers,
        Some(_) => return Err(vocabulary(TYPES, "an array of i32", "another type")),
    };
    if numbers.len() < count {
        let expected = format!("{count} kinds, one for each token");
        return Err(vocabulary(TYPES, expected, numbers.len().to_string()));
    }
    Ok(numbers[..count].iter().map(|&number| TokenType::from_number(number)).collect())
}

/// The scores of `count` tokens, by id; all 0 if the metadata has none.
pub(super) fn scores(metadata: &Metadata, count: usize) -> Result<Vec<f32>> {
    let mut scores = match metadata.get(SCORES) {
        None => return Ok(vec![0.0; count]),
        Some(Value::Array(Array::F32(scores))) => scores.clone(),
        Some(Value::Array(Array::I32(scores))) => {
            scores.iter().map(|&score| score as f32).collect()
        }
        Some(_) => return Err(vocabulary(SCORES, "an array of f32 or i32", "another type")),
    };
    if scores.len() < count {
        let expected = format!("{count} scores, one for each token");
        return Err(vocabulary(SCORES, expected, scores.len().to_string()));
    }
    scores.truncate(count);
    Ok(scores)
}

/// Builds [`Error::Vocabulary`].
pub(super) fn vocabulary(
    key: &'static str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> Error {
    Error::Vocabulary { key, expected: expected.into(), found: found.into() }
}
