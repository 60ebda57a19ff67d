//! Sparse attention: the lightning indexer (DeepSeek-V3.2), which selects what attention reads, and
//! the compression of blocks of tokens to one key each (DeepSeek-V4).

use crate::error::Result;
use crate::ids::{SlotId, Value};
use crate::op::{Compression, EmbedBy, Entries, Indexer, Op};
use crate::plan::{KvSlot, RecurrentState};
use crate::rope::Rope;

use super::Builder;

/// The settings of an indexer besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct IndexerLayer {
    /// Heads, width, number of entries.
    pub indexer: Indexer,
    /// The rotary embedding of the first part of each query head and of the key.
    pub rope: Rope,
    /// The epsilon of the norm of keys.
    pub eps: f32,
}

/// The settings of a compressor of tokens besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct Compressor {
    /// Tokens of a block.
    pub ratio: usize,
    /// Width of a compressed row.
    pub dim: usize,
    /// The rotary embedding of its last part, at the first position of the block.
    pub rope: Rope,
    /// The epsilon of its norm.
    pub eps: f32,
}

impl Builder<'_> {
    /// The tokens that an indexer selects, from the input of the layer and the latent query.
    pub(super) fn select_tokens(
        &mut self,
        input: Value,
        latent: Value,
        layer: &IndexerLayer,
    ) -> Result<Value> {
        let IndexerLayer { indexer: Indexer { heads, dim, .. }, rope, eps } = *layer;
        let q = self.linear(latent, "indexer.attn_q_b", heads * dim)?;
        let q = self.push(Op::Rope { input: q, heads, head_dim: dim, rope }, heads * dim);
        let k = self.linear(input, "indexer.attn_k", dim)?;
        let k = self.layer_norm(k, "indexer.k_norm", eps)?;
        let k = self.push(Op::Rope { input: k, heads: 1, head_dim: dim, rope }, dim);
        self.select(input, [q, k], 1, layer.indexer)
    }

    /// The entries of `ratio` tokens that an indexer selects, with queries and keys `qk`.
    fn select(
        &mut self,
        input: Value,
        [q, k]: [Value; 2],
        ratio: usize,
        indexer: Indexer,
    ) -> Result<Value> {
        let weights = self.linear(input, "indexer.proj", indexer.heads)?;
        let slot = self.block_slot(indexer.dim, 0, ratio);
        Ok(self.push(Op::Select { q, k, weights, indexer, slot }, indexer.top_k))
    }

    /// The blocks of tokens that attention reads besides its window: all, or those that an indexer
    /// selects if the file has one.
    pub fn compressed_entries(
        &mut self,
        input: Value,
        latent: Value,
        compressor: &Compressor,
        indexer: Indexer,
    ) -> Result<Entries> {
        let Compressor { ratio, dim, rope, .. } = *compressor;
        let selected = if self.has("indexer.proj") {
            let q = self.linear(latent, "indexer.attn_q_b", indexer.heads * indexer.dim)?;
            let q = self.rope_end(q, indexer.heads, Rope { block: 1, ..rope });
            let keys = Compressor { dim: indexer.dim, ..*compressor };
            let k = self.compress(input, "indexer_compressor", &keys)?;
            Some(self.select(input, [q, k], ratio, indexer)?)
        } else {
            None
        };
        let blocks = self.compress(input, "attn_compressor", compressor)?;
        let slot = self.block_slot(dim, dim, ratio);
        Ok(Entries::TokensAndBlocks { blocks, slot, selected })
    }

    /// The compressed row of the block that ends with each row. The tensors determine whether
    /// blocks overlap.
    fn compress(&mut self, input: Value, name: &str, c: &Compressor) -> Result<Value> {
        let kv = format!("{name}_kv");
        let overlaps = self.rows(&kv) == Some(2 * c.dim);
        let width = if overlaps { 2 * c.dim } else { c.dim };
        let rows = self.linear(input, &kv, width)?;
        let scores = self.linear(input, &format!("{name}_gate"), width)?;
        let bias = self.position_in_block(&format!("{name}_ape"), width, c.ratio)?;
        let scores = self.add(scores, bias);
        let compression = Compression { ratio: c.ratio, dim: c.dim, overlaps };
        let state = self.state(RecurrentState::Compression(compression));
        let op = Op::Compress { input: rows, scores, compression, state };
        let row = self.push(op, c.dim);
        let row = self.rms_norm(row, &format!("{name}_norm"), c.eps)?;
        Ok(self.rope_end(row, 1, c.rope))
    }

    /// The row of a table, `[width, ratio]`, that each token has by its place in its block.
    fn position_in_block(&mut self, name: &str, width: usize, ratio: usize) -> Result<Value> {
        let table = self.weight(name, width, ratio)?;
        Ok(self.push(Op::Embed { table, by: EmbedBy::PositionModulo }, width))
    }

    /// Rotates the last elements of each head.
    pub fn rope_end(&mut self, input: Value, heads: usize, rope: Rope) -> Value {
        let dim = self.width(input) / heads;
        let start = dim - rope.dims;
        if start == 0 {
            return self.push(Op::Rope { input, heads, head_dim: dim, rope }, heads * dim);
        }
        let first = self.slices(input, heads, 0, start);
        let last = self.slices(input, heads, start, rope.dims);
        let op = Op::Rope { input: last, heads, head_dim: rope.dims, rope };
        let last = self.push(op, heads * rope.dims);
        self.concat(first, last, heads, rope.dims)
    }

    /// The KV cache of one key for each `ratio` tokens.
    fn block_slot(&mut self, key_dim: usize, value_dim: usize, ratio: usize) -> SlotId {
        let slot = SlotId(self.plan.slots.len());
        self.plan.slots.push(KvSlot { kv_heads: 1, key_dim, value_dim, window: None, ratio });
        slot
    }
}
