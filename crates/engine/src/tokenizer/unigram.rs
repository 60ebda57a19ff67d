//! SentencePiece's unigram model (`t5`): of all ways to cut a text into tokens, the one whose
//! scores add up to most (Kudo 2018). It must not know special tokens.

use bodkin_gguf::Metadata;

use super::charsmap::Charsmap;
use super::sentence_piece::SPACE;
use super::trie::Trie;
use super::vocabulary::{TokenType, Vocabulary, scores};
use crate::error::Result;

/// How much worse than the worst token an unknown character is.
const UNKNOWN_PENALTY: f32 = 10.0;

/// A vocabulary with its scores, and how text is normalised.
pub(super) struct Unigram {
    trie: Trie,
    /// By id.
    scores: Vec<f32>,
    unknown_score: f32,
    charsmap: Option<Charsmap>,
    /// Runs of spaces become one, and those at the end go.
    merges_spaces: bool,
}

/// The best path to a position in the text.
#[derive(Clone)]
struct Best {
    score: f64,
    /// The token that ends there, and its bytes; 0 if no path leads here.
    len: u32,
    token: u32,
}

/// Stands for the unknown token, which need not exist.
const UNKNOWN: u32 = u32::MAX;

impl Unigram {
    pub(super) fn memory_bytes(&self) -> usize {
        let charsmap = self.charsmap.as_ref().map_or(0, Charsmap::memory_bytes);
        self.trie.memory_bytes() + 4 * self.scores.capacity() + charsmap
    }

    pub(super) fn from_metadata(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Unigram> {
        let mut scores = scores(metadata, vocabulary.len())?;
        let mut worst = f32::MAX;
        let mut texts = Vec::with_capacity(vocabulary.len());
        for (id, score) in (0..).zip(&mut scores) {
            match vocabulary.token_type(id) {
                TokenType::Normal => worst = worst.min(*score),
                TokenType::UserDefined => *score = 0.0,
                TokenType::Unused => {}
                _ => continue,
            }
            texts.push((vocabulary.text(id), id));
        }
        let merges = metadata.bool("tokenizer.ggml.remove_extra_whitespaces")?;
        Ok(Unigram {
            trie: Trie::new(texts),
            scores,
            unknown_score: worst - UNKNOWN_PENALTY,
            charsmap: Charsmap::from_metadata(metadata)?,
            merges_spaces: merges.unwrap_or(false),
        })
    }

    /// Appends the tokens of `text`, after a space if `prefix` says so. Neighbouring characters
    /// that are unknown become one `unknown`.
    pub(super) fn encode(
        &self,
        text: &str,
        prefix: bool,
        unknown: Option<u32>,
        out: &mut Vec<u32>,
    ) {
        let text = self.normalize(text.as_bytes(), prefix);
        let best = self.search(&text);
        let start = out.len();
        let mut end = text.len();
        let mut follows_unknown = false;
        while end > 0 {
            let Best { len, token, .. } = best[end];
            let is_unknown = token == UNKNOWN || Some(token) == unknown;
            if !is_unknown {
                out.push(token);
            } else if !follows_unknown {
                out.extend(unknown);
            }
            follows_unknown = is_unknown;
            // No path leads here if scores are NaN: then the text before it is unknown.
            end -= if len == 0 { end } else { len as usize };
        }
        out[start..].reverse();
    }

    /// The best path to every position in the text. Time is linear in the text, for tokens of
    /// bounded
    /// length.
    fn search(&self, text: &[u8]) -> Vec<Best> {
        let mut best = vec![Best { score: f64::MIN, len: 0, token: UNKNOWN }; text.len() + 1];
        best[0].score = 0.0;
        let mut at = 0;
        while at < text.len() {
            let character = character_len(text[at]).min(text.len() - at);
            let score = best[at].score;
            let mut is_known = false;
            let mut offer = |len: usize, token, token_score: f32| {
                let (score, best) = (score + f64::from(token_score), &mut best[at + len]);
                if score > best.score {
                    *best = Best { score, len: len as u32, token };
                }
            };
            for (len, token) in self.trie.prefixes(&text[at..]) {
                is_known |= len == character;
                offer(len, token, self.scores[token as usize]);
            }
            if !is_known {
                offer(character, UNKNOWN, self.unknown_score);
            }
            at += character;
        }
        best
    }

    /// The text as the vocabulary spells it.
    fn normalize(&self, mut text: &[u8], prefix: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len() + text.len() / 2);
        let (mut in_word, mut needs_prefix) = (false, prefix);
        while let Some(&first) = text.first() {
            let (len, piece) = self.rewrite(text, first);
            for &byte in piece {
                if byte == b' ' {
                    in_word = false;
                    if !self.merges_spaces {
                        out.extend_from_slice(SPACE.as_bytes());
                    }
                    continue;
                }
                if !in_word && (needs_prefix || self.merges_spaces) {
                    out.extend_from_slice(SPACE.as_bytes());
                    needs_prefix = false;
                }
                in_word = true;
                out.push(byte);
            }
            text = &text[len..];
        }
        out
    }

    /// What the first bytes become, and how many they are: those of a rule, or one character.
    fn rewrite<'a>(&'a self, text: &'a [u8], first: u8) -> (usize, &'a [u8]) {
        if let Some(found) = self.charsmap.as_ref().and_then(|map| map.replacement(text)) {
            return found;
        }
        // A rule may have ended inside a character.
        if first & 0xC0 == 0x80 {
            return (1, "\u{FFFD}".as_bytes());
        }
        let len = character_len(first);
        (len, &text[..len])
    }
}

/// Bytes of the character that starts with `first`.
fn character_len(first: u8) -> usize {
    match first {
        0xF0.. => 4,
        0xE0.. => 3,
        0xC0.. => 2,
        _ => 1,
    }
}
