//! The latest tokens of a sequence, for penalties and DRY.

use std::collections::VecDeque;

/// The latest tokens of a sequence.
#[derive(Debug)]
pub(super) struct History {
    tokens: VecDeque<u32>,
    limit: usize,
}

impl History {
    /// Stores `limit` tokens and one more, so that a window finds the token that leaves it.
    pub(super) fn new(limit: usize) -> History {
        History { tokens: VecDeque::with_capacity(limit.min(4096) + 1), limit }
    }

    pub(super) fn push(&mut self, id: u32) {
        if self.limit == 0 {
            return;
        }
        if self.tokens.len() > self.limit {
            self.tokens.pop_front();
        }
        self.tokens.push_back(id);
    }

    /// The token that was pushed `age` tokens before the latest one.
    pub(super) fn tokens_ago(&self, age: usize) -> Option<u32> {
        let index = self.tokens.len().checked_sub(age.checked_add(1)?)?;
        self.tokens.get(index).copied()
    }

    /// The latest tokens, at most `window` of them, the latest first.
    pub(super) fn latest(&self, window: usize) -> impl Iterator<Item = u32> {
        self.tokens.iter().rev().take(window).copied()
    }
}
