//! What attention reads of a sequence if not all of its window.

use crate::ids::{SlotId, Value};

/// The lightning indexer (DeepSeek-V3.2, 2025), which selects what attention reads. An entry with
/// the key `k` has the score `sum over heads of weight * max(q . k, 0)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    /// Query heads, which share the key.
    pub heads: usize,
    /// Width of a query head and of a key.
    pub dim: usize,
    /// The most entries that are selected.
    pub top_k: usize,
}

/// The compression of each block of tokens to one row (DeepSeek-V4, 2026).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// Tokens of a block.
    pub ratio: usize,
    /// Width of a compressed row.
    pub dim: usize,
    /// Whether a row is also made of the block before. Then an input row is twice as wide: its
    /// first half is for the block after its own, its second half for its own.
    pub overlaps: bool,
}

/// The cached entries that attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// The tokens of the window.
    Tokens,
    /// Of those, the entries that an [`crate::Op::Select`] has selected.
    Selected(Value),
    /// The tokens of the window, and the complete blocks of another slot.
    TokensAndBlocks {
        /// `[rows, key_dim]`: the key, and the value, of the block that ends with each row. Rows
        /// that end no block are not read.
        blocks: Value,
        /// The KV cache of the blocks, with `ratio` tokens an entry.
        slot: SlotId,
        /// The blocks that an [`crate::Op::Select`] has selected; all if none.
        selected: Option<Value>,
    },
}

impl Entries {
    /// The output of the [`crate::Op::Select`] that has selected them.
    pub fn selected(self) -> Option<Value> {
        match self {
            Entries::Tokens => None,
            Entries::Selected(value) => Some(value),
            Entries::TokensAndBlocks { selected, .. } => selected,
        }
    }

    /// The values that the entries come from.
    pub(super) fn inputs(self) -> [Option<Value>; 2] {
        match self {
            Entries::Tokens => [None; 2],
            Entries::Selected(value) => [Some(value), None],
            Entries::TokensAndBlocks { blocks, selected, .. } => [Some(blocks), selected],
        }
    }
}
