//! SentencePiece's BPE (`llama`): characters of the whole text are merged into tokens, the one
//! with the best score first; what is no token falls back to bytes. It must not know special
//! tokens.

use bodkin_gguf::Metadata;

use super::merge::{Merger, Pairs};
use super::vocabulary::{Vocabulary, scores};
use crate::error::Result;

/// How SentencePiece writes a space.
pub(super) const SPACE: &str = "\u{2581}";

/// Scores and bytes of a vocabulary.
pub(super) struct SentencePiece {
    /// By id; the lowest is merged first.
    ranks: Vec<u32>,
    /// The token of each byte.
    bytes: Box<[Option<u32>; 256]>,
}

/// No token, for a character that is none.
const NONE: u32 = u32::MAX;

struct Merges<'a> {
    vocabulary: &'a Vocabulary,
    ranks: &'a [u32],
}

impl Pairs for Merges<'_> {
    fn join(&self, _: u32, _: u32, joined: &[u8]) -> Option<(u32, u32)> {
        let id = self.vocabulary.find(joined)?;
        Some((self.ranks[id as usize], id))
    }
}

impl SentencePiece {
    pub(super) fn memory_bytes(&self) -> usize {
        4 * self.ranks.capacity()
    }

    pub(super) fn from_metadata(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
    ) -> Result<SentencePiece> {
        let ranks = scores(metadata, vocabulary.len())?.into_iter().map(rank).collect();
        let byte = |byte: u8| {
            let spelled = vocabulary.find(format!("<0x{byte:02X}>").as_bytes());
            spelled.or_else(|| vocabulary.find(&[byte]))
        };
        let bytes = Box::new(std::array::from_fn(|index| byte(index as u8)));
        Ok(SentencePiece { ranks, bytes })
    }

    /// Appends the tokens of `text`, after a space if `prefix` says so. Bytes that are no tokens
    /// become `unknown`.
    pub(super) fn encode(
        &self,
        text: &str,
        prefix: bool,
        vocabulary: &Vocabulary,
        unknown: Option<u32>,
        out: &mut Vec<u32>,
    ) {
        let spaces = text.bytes().filter(|&byte| byte == b' ').count();
        let mut escaped = String::with_capacity(text.len() + 2 * spaces + SPACE.len());
        if prefix {
            escaped.push_str(SPACE);
        }
        for (index, part) in text.split(' ').enumerate() {
            if index > 0 {
                escaped.push_str(SPACE);
            }
            escaped.push_str(part);
        }
        let mut merger = Merger::default();
        merger.reserve(escaped.chars().count());
        let mut buffer = [0; 4];
        for (at, character) in escaped.char_indices() {
            let spelled = character.encode_utf8(&mut buffer).as_bytes();
            merger.push(vocabulary.find(spelled).unwrap_or(NONE), at);
        }
        let merges = Merges { vocabulary, ranks: &self.ranks };
        merger.run(escaped.as_bytes(), &merges, |id, text| match id {
            NONE => {
                out.extend(text.iter().filter_map(|&b| self.bytes[usize::from(b)].or(unknown)));
            }
            id => out.push(id),
        });
    }
}

/// Puts scores in an order of whole numbers, the best first.
fn rank(score: f32) -> u32 {
    // Adding zero makes -0 and 0 the same; NaN goes last.
    let bits = if score.is_nan() { return u32::MAX } else { (score + 0.0).to_bits() };
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_scores_have_lower_ranks() {
        let scores = [f32::INFINITY, 3.5, 1.0, 0.0, -1.0, -1e4, f32::NEG_INFINITY, f32::NAN];
        assert!(scores.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
        assert_eq!(rank(0.0), rank(-0.0));
    }
}
