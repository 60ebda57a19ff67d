//! WordPiece (`bert`): text is normalised as BERT's own code does it and cut into words, and a word
//! into the longest tokens from left to right. A token that starts a word is spelled with a space
//! before it, because converters turn the published `##` round. It must not know special tokens.

use bodkin_gguf::Metadata;
use unicode_normalization::char::decompose_canonical;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

use super::sentence_piece::SPACE;
use super::trie::Trie;
use super::vocabulary::Vocabulary;
use crate::error::Result;

/// A vocabulary, and how text is normalised.
pub(super) struct WordPiece {
    trie: Trie,
    lowercase: bool,
    strip_accents: bool,
}

/// What a character does to the word it stands in.
#[derive(Debug, PartialEq, Eq)]
enum Role {
    /// Ends it.
    Space,
    /// Nothing: it is dropped.
    Dropped,
    /// Becomes part of it.
    Inside(char),
    /// Is a word itself.
    Alone(char),
}

impl WordPiece {
    pub(super) fn memory_bytes(&self) -> usize {
        self.trie.memory_bytes()
    }

    pub(super) fn from_metadata(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<WordPiece> {
        let flag = |key: &str| metadata.bool(&format!("tokenizer.ggml.normalizer.{key}"));
        let lowercase = flag("lowercase")?.unwrap_or(true);
        let ids = 0..vocabulary.len() as u32;
        Ok(WordPiece {
            trie: Trie::new(ids.map(|id| (vocabulary.text(id), id)).collect()),
            lowercase,
            strip_accents: flag("strip_accents")?.unwrap_or(lowercase),
        })
    }

    /// Appends the tokens of `text`; a word that cannot be spelled becomes `unknown`.
    pub(super) fn encode(&self, text: &str, unknown: Option<u32>, out: &mut Vec<u32>) {
        let mut word = String::from(SPACE);
        let mut end_word = |word: &mut String| {
            if word.len() > SPACE.len() {
                self.spell(word, unknown, out);
                word.truncate(SPACE.len());
            }
        };
        for character in text.chars() {
            match self.role(character) {
                Role::Space => end_word(&mut word),
                Role::Dropped => {}
                Role::Inside(character) => word.push(character),
                Role::Alone(character) => {
                    end_word(&mut word);
                    word.push(character);
                    end_word(&mut word);
                }
            }
        }
        end_word(&mut word);
    }

    /// Appends the tokens of a word.
    fn spell(&self, word: &str, unknown: Option<u32>, out: &mut Vec<u32>) {
        let start = out.len();
        let mut rest = word.as_bytes();
        while !rest.is_empty() {
            let Some((len, token)) = self.trie.prefixes(rest).last() else {
                out.truncate(start);
                out.extend(unknown);
                return;
            };
            out.push(token);
            rest = &rest[len..];
        }
    }

    fn role(&self, character: char) -> Role {
        let base = if self.strip_accents { base(character) } else { character };
        if base.is_whitespace() {
            return Role::Space;
        }
        let group = base.general_category_group();
        let is_dropped = match group {
            GeneralCategoryGroup::Other => base.general_category() != GeneralCategory::Unassigned,
            GeneralCategoryGroup::Mark => self.strip_accents,
            _ => matches!(base, '\u{FFFD}'),
        };
        if is_dropped {
            return Role::Dropped;
        }
        let is_alone = match group {
            GeneralCategoryGroup::Punctuation => true,
            GeneralCategoryGroup::Symbol => base.is_ascii(),
            _ => is_ideograph(base),
        };
        // One character for one, also where Unicode's rules give two.
        let lower = base.to_lowercase().next().filter(|_| self.lowercase).unwrap_or(base);
        if is_alone { Role::Alone(lower) } else { Role::Inside(lower) }
    }
}

/// The first character of the canonical decomposition. Those that follow are nearly always accents,
/// which are stripped; Hangul loses its vowels, as in llama.cpp.
fn base(character: char) -> char {
    if character.is_ascii() {
        return character;
    }
    let mut first = None;
    decompose_canonical(character, |part| first = first.or(Some(part)));
    first.unwrap_or(character)
}

/// The blocks of ideographs that BERT's code lists, each of which is a word. One starts later than
/// there, which is a slip of the `tokenizers` crate that all models since were trained with.
fn is_ideograph(character: char) -> bool {
    matches!(character,
        '\u{3400}'..='\u{4DBF}'
        | '\u{4E00}'..='\u{9FFF}'
        | '\u{F900}'..='\u{FAFF}'
        | '\u{20000}'..='\u{2A6DF}'
        | '\u{2A700}'..='\u{2B81F}'
        | '\u{2B920}'..='\u{2CEAF}'
        | '\u{2F800}'..='\u{2FA1F}'
    )
}
