//! Follows an answer token by token, and masks the tokens that may not come next. While a model
//! reasons, all but the end of the answer may come.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::reasoning::{Reasoning, ReasoningMarkers};
use crate::tokenizer::Tokenizer;

use super::errors::message;

/// A compiled constraint and the place in it.
pub(crate) struct Matcher {
    grammar: llguidance::Matcher,
    tokenizer: Arc<Tokenizer>,
    field: String,
    phase: Phase,
    /// Scratch: the bytes of a token.
    piece: Vec<u8>,
    /// Scratch: the logits before the mask.
    unmasked: Vec<f32>,
}

/// A part of an answer.
#[derive(Clone, Debug)]
enum Phase {
    /// The text so far may become a marker; `fits` says whether it is also the start of an answer.
    Start {
        markers: &'static ReasoningMarkers,
        text: Vec<u8>,
        fits: bool,
    },
    /// The last bytes of the text may become the closing marker.
    Reasoning {
        close: &'static str,
        tail: Vec<u8>,
    },
    Answer,
}

impl Matcher {
    pub(super) fn new(
        grammar: llguidance::Matcher,
        tokenizer: Arc<Tokenizer>,
        field: String,
        reasoning: Option<Reasoning>,
    ) -> Matcher {
        let phase = match reasoning {
            None => Phase::Answer,
            Some(Reasoning { markers, is_open: true }) => {
                Phase::Reasoning { close: markers.close, tail: Vec::new() }
            }
            Some(Reasoning { markers, .. }) => {
                Phase::Start { markers, text: Vec::new(), fits: true }
            }
        };
        let (piece, unmasked) = (Vec::new(), Vec::new());
        Matcher { grammar, tokenizer, field, phase, piece, unmasked }
    }

    /// One for another answer, if this one is at its start.
    pub(crate) fn copy(&self) -> Matcher {
        Matcher {
            grammar: self.grammar.deep_clone(),
            tokenizer: Arc::clone(&self.tokenizer),
            field: self.field.clone(),
            phase: self.phase.clone(),
            piece: Vec::new(),
            unmasked: Vec::new(),
        }
    }

    /// Whether nothing but the end may follow.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.phase, Phase::Answer) && self.grammar.is_stopped()
    }

    /// Keeps the logits, whose mask comes next. [`Matcher::unmasked`] returns them.
    pub(crate) fn keep(&mut self, logits: &[f32]) {
        self.unmasked.clear();
        self.unmasked.extend_from_slice(logits);
    }

    /// The logits before the mask.
    pub(crate) fn unmasked(&self) -> &[f32] {
        &self.unmasked
    }

    /// Sets the logits of tokens that may not come next to -inf.
    ///
    /// # Errors
    /// If a limit is exceeded, or no token is possible.
    pub(crate) fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        match &self.phase {
            Phase::Reasoning { .. } => {
                for &id in self.tokenizer.ends_of_generation() {
                    if let Some(logit) = logits.get_mut(id as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Phase::Start { markers, text, fits } => {
                let mask = fits.then(|| self.grammar.compute_mask_or_eos());
                let mask = mask.transpose().map_err(|error| self.error(&error.to_string()))?;
                let mask = mask.as_ref().map_or(&[][..], |mask| mask.as_slice());
                let (piece, tokenizer) = (&mut self.piece, &*self.tokenizer);
                for (id, logit) in logits.iter_mut().enumerate() {
                    let is_allowed =
                        mask.get(id / 32).is_some_and(|bits| bits >> (id % 32) & 1 != 0);
                    let piece = shown(tokenizer, id as u32, piece);
                    if !is_allowed && (piece.is_empty() || !begins(markers, text, piece)) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Phase::Answer => {
                let mask = self.grammar.compute_mask();
                let mask = mask.map_err(|error| self.error(&error.to_string()))?;
                apply(mask.as_slice(), logits);
            }
        }
        match logits.iter().any(|logit| logit.is_finite()) {
            true => Ok(()),
            false => Err(self.error("the model gives no probability to any token that may follow")),
        }
    }

    /// The error of an answer whose possible tokens are all excluded by biases or penalties.
    pub(crate) fn excluded(&self) -> Error {
        self.error("the request's biases or penalties exclude all tokens that may follow")
    }

    /// Goes on behind a token that the mask allowed.
    ///
    /// # Errors
    /// If a limit is exceeded.
    pub(crate) fn accept(&mut self, id: u32) -> Result<()> {
        shown(&self.tokenizer, id, &mut self.piece);
        match &mut self.phase {
            Phase::Answer => self.consume(&[id]),
            Phase::Reasoning { close, tail } => {
                tail.append(&mut self.piece);
                let at = tail.windows(close.len()).position(|bytes| bytes == close.as_bytes());
                let Some(at) = at else {
                    let keep = close.len() - 1;
                    tail.drain(..tail.len().saturating_sub(keep));
                    return Ok(());
                };
                // Bytes behind the marker are a part of its token.
                let rest = tail[at + close.len()..].trim_ascii_start().to_vec();
                self.phase = Phase::Answer;
                self.consume_bytes(&rest)
            }
            Phase::Start { markers, text, fits } => {
                text.extend_from_slice(&self.piece);
                let (markers, text) = (*markers, std::mem::take(text));
                let mut fits = *fits;
                if fits {
                    let consumed = self.grammar.try_consume_tokens(&[id]);
                    fits = consumed.map_err(|error| self.error(&error.to_string()))? == 1;
                }
                self.begin(markers, text, fits)
            }
        }
    }

    /// Goes on behind the first bytes of an answer.
    fn begin(
        &mut self,
        markers: &'static ReasoningMarkers,
        text: Vec<u8>,
        fits: bool,
    ) -> Result<()> {
        let rest = |marker: &str| text.strip_prefix(marker.as_bytes()).map(<[u8]>::to_vec);
        if let Some(rest) = rest(markers.open) {
            self.reset()?;
            self.phase = Phase::Reasoning { close: markers.close, tail: rest };
        } else if let Some(rest) = markers.answer.and_then(rest) {
            self.reset()?;
            self.phase = Phase::Answer;
            return self.consume_bytes(rest.trim_ascii_start());
        } else if begins(markers, &text, &[]) {
            self.phase = Phase::Start { markers, text, fits };
        } else if fits {
            self.phase = Phase::Answer;
        } else {
            return Err(self.error("a token does not follow from those before it"));
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.grammar.reset().map_err(|error| self.error(&error.to_string()))
    }

    fn consume(&mut self, ids: &[u32]) -> Result<()> {
        self.grammar.consume_tokens(ids).map_err(|error| self.error(&error.to_string()))
    }

    /// Goes on behind bytes that were sampled together with a marker.
    fn consume_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let tokens = self.grammar.tok_env().map(|env| env.tokenize_bytes(bytes));
        let tokens = tokens.map_err(|error| self.error(&error.to_string()))?;
        self.consume(&tokens)
    }

    fn error(&self, error: &str) -> Error {
        Error::Constraint { field: self.field.clone(), message: message(error) }
    }
}

/// The bytes of a token as the stream of the answer's text shows them.
fn shown<'a>(tokenizer: &Tokenizer, id: u32, piece: &'a mut Vec<u8>) -> &'a [u8] {
    piece.clear();
    tokenizer.push_piece(id, tokenizer.is_marker(id), piece);
    piece
}

/// Whether a text and the bytes behind it are the start of a marker, or begin with one.
fn begins(markers: &ReasoningMarkers, text: &[u8], piece: &[u8]) -> bool {
    let mut all = [Some(markers.open), markers.answer].into_iter().flatten();
    let is_empty = text.is_empty() && piece.is_empty();
    !is_empty
        && all.any(|marker| {
            let (start, rest) = marker.as_bytes().split_at(text.len().min(marker.len()));
            text.starts_with(start) && (rest.starts_with(piece) || piece.starts_with(rest))
        })
}

/// Sets the logits of tokens whose bit is not set to -inf, and those of tokens without a bit.
fn apply(mask: &[u32], logits: &mut [f32]) {
    let bits = mask.iter().copied().chain(std::iter::repeat(0));
    for (logits, bits) in logits.chunks_mut(32).zip(bits) {
        if bits == 0 {
            logits.fill(f32::NEG_INFINITY);
            continue;
        }
        for (i, logit) in logits.iter_mut().enumerate() {
            if bits >> i & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}
