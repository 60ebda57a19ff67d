//! Splits a text into windows of equal length, as llama-perplexity does. Each is a sequence of its
//! own.

use std::ops::Range;

use crate::error::{Error, Result};

/// The windows of a text. Tokens after the last full window are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// `[count * size]`.
    tokens: Vec<u32>,
    size: usize,
    first_token: Option<u32>,
}

impl Windows {
    /// Windows of `size` tokens. `first_token`, the model's BOS token if it has one, replaces the
    /// first token of each window. Fails if the text is shorter than two windows.
    pub fn of_text(tokens: Vec<u32>, size: usize, first_token: Option<u32>) -> Result<Windows> {
        if tokens.len() / 2 < size {
            return Err(Error::ShortText { tokens: tokens.len(), window: size });
        }
        Windows::new(tokens, size, first_token)
    }

    /// As [`Windows::of_text`], for any number of tokens.
    pub fn new(mut tokens: Vec<u32>, size: usize, first_token: Option<u32>) -> Result<Windows> {
        if size < 4 {
            return Err(Error::ShortWindow { found: size });
        }
        tokens.truncate(tokens.len() / size * size);
        Ok(Windows { tokens, size, first_token })
    }

    /// Keeps the first `count` windows.
    pub fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count.saturating_mul(self.size));
    }

    /// The number of windows.
    pub fn count(&self) -> usize {
        self.tokens.len() / self.size
    }

    /// Tokens of a window.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The text's tokens, window after window.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The tokens that the model reads for a window.
    pub fn input(&self, window: usize) -> Vec<u32> {
        let mut tokens = self.tokens[window * self.size..][..self.size].to_vec();
        tokens[0] = self.first_token.unwrap_or(tokens[0]);
        tokens
    }

    /// The scored positions of a window: its second half, so that each has at least half a window
    /// of context, without the last one, whose next token is in another window.
    pub fn scored(&self) -> Range<usize> {
        self.size / 2..self.size - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_and_begin_as_the_model_wants_it() {
        let windows = Windows::of_text((10..21).collect(), 5, Some(1)).unwrap();
        assert_eq!((windows.count(), windows.scored()), (2, 2..4));
        assert_eq!(windows.input(1), [1, 16, 17, 18, 19]);
        assert_eq!(windows.tokens(), (10..20).collect::<Vec<u32>>());
        let windows = Windows::of_text((10..21).collect(), 5, None).unwrap();
        assert_eq!(windows.input(1), [15, 16, 17, 18, 19]);
    }

    #[test]
    fn short_texts_and_windows_are_refused() {
        let error = Windows::of_text(vec![0; 9], 5, None).unwrap_err().to_string();
        assert_eq!(error, "the text has 9 tokens; windows of 5 need 10 at least");
        assert!(Windows::of_text(vec![0; 9], 3, None).is_err());
    }
}
