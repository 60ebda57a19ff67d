//! Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made from one
//! narrow row, and that row is what is kept. Files hold the matrices from it apart, so that queries
//! meet the narrow row itself, or in one, as they were trained; then keys and values are expanded.

use crate::error::Result;
use crate::op::{Attention, Op};
use crate::plan::Value;
use crate::rope::Rope;

use super::Builder;

/// What a layer of latent attention needs to know besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention {
    /// Query heads.
    pub heads: usize,
    /// Width of a head of queries and keys without the rotated part.
    pub plain_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Width of the narrow row.
    pub rank: usize,
    /// The rotation of the last part of each query, and of the one key part that heads share.
    pub rope: Rope,
    /// What the dot products are multiplied with.
    pub scale: f32,
    /// The epsilon of the norms of narrow rows.
    pub eps: f32,
}

/// What both forms begin with.
struct Parts {
    /// `[rows, heads * plain_dim]`.
    q_plain: Value,
    /// `[rows, heads * rope.dims]`, rotated.
    q_rotated: Value,
    /// `[rows, rank]`, normed.
    narrow: Value,
    /// `[rows, rope.dims]`, rotated.
    k_rotated: Value,
}

impl Builder<'_> {
    /// Self-attention whose keys and values come from one narrow row.
    pub fn latent_attention(&mut self, input: Value, layer: &LatentAttention) -> Result<Value> {
        let width = self.width(input);
        let parts = self.latent_parts(input, layer)?;
        let heads = match self.has("attn_k_b") {
            true => self.attend_narrow(&parts, layer)?,
            false => self.attend_expanded(&parts, layer)?,
        };
        self.linear(heads, "attn_output", width)
    }

    fn latent_parts(&mut self, input: Value, l: &LatentAttention) -> Result<Parts> {
        let (heads, rotated) = (l.heads, l.rope.dims);
        let head_dim = l.plain_dim + rotated;
        let q = match self.rows("attn_q_a") {
            Some(rank) => {
                let q = self.linear(input, "attn_q_a", rank)?;
                let q = self.rms_norm(q, "attn_q_a_norm", l.eps)?;
                self.linear(q, "attn_q_b", heads * head_dim)?
            }
            None => self.linear(input, "attn_q", heads * head_dim)?,
        };
        let q_plain = self.slices(q, heads, 0, l.plain_dim);
        let q_rotated = self.slices(q, heads, l.plain_dim, rotated);
        let kv = self.linear(input, "attn_kv_a_mqa", l.rank + rotated)?;
        let narrow = self.slice(kv, 0, l.rank);
        let narrow = self.rms_norm(narrow, "attn_kv_a_norm", l.eps)?;
        let k_rotated = self.slice(kv, l.rank, rotated);
        let (head_dim, rope) = (rotated, l.rope);
        let q_rotated =
            self.push(Op::Rope { input: q_rotated, heads, head_dim, rope }, heads * rotated);
        let k_rotated = self.push(Op::Rope { input: k_rotated, heads: 1, head_dim, rope }, rotated);
        Ok(Parts { q_plain, q_rotated, narrow, k_rotated })
    }

    /// Queries are taken to the narrow width, head by head, and results from it.
    fn attend_narrow(&mut self, p: &Parts, l: &LatentAttention) -> Result<Value> {
        let q = self.head_linear(p.q_plain, "attn_k_b", l.heads, l.rank)?;
        let q = self.concat(q, p.q_rotated, l.heads, l.rope.dims);
        let k = self.concat(p.narrow, p.k_rotated, 1, l.rope.dims);
        let h = self.attend(q, k, p.narrow, attention(l, 1, l.rank, l.rank));
        self.head_linear(h, "attn_v_b", l.heads, l.value_dim)
    }

    /// HyperParameters and values are made from the narrow row, for every head its own.
    fn attend_expanded(&mut self, p: &Parts, l: &LatentAttention) -> Result<Value> {
        let kv = self.linear(p.narrow, "attn_kv_b", l.heads * (l.plain_dim + l.value_dim))?;
        let k = self.slices(kv, l.heads, 0, l.plain_dim);
        let v = self.slices(kv, l.heads, l.plain_dim, l.value_dim);
        let k = self.concat(k, p.k_rotated, l.heads, l.rope.dims);
        let q = self.concat(p.q_plain, p.q_rotated, l.heads, l.rope.dims);
        Ok(self.attend(q, k, v, attention(l, l.heads, l.plain_dim, l.value_dim)))
    }

    /// Each part of the input times a matrix of its own.
    fn head_linear(
        &mut self,
        input: Value,
        name: &str,
        heads: usize,
        rows: usize,
    ) -> Result<Value> {
        let weight = self.expert_matrices(name, self.width(input) / heads, rows, heads)?;
        let op = Op::ExpertLinear { input, route: None, weight, bias: None, experts: heads };
        Ok(self.push(op, heads * rows))
    }

    /// Each head of `a`, followed by `dims` more elements: that part of `b`, or all of it.
    fn concat(&mut self, a: Value, b: Value, heads: usize, dims: usize) -> Value {
        self.push(Op::Concat { a, b, groups: heads }, self.width(a) + heads * dims)
    }
}

fn attention(
    l: &LatentAttention,
    kv_heads: usize,
    plain_dim: usize,
    value_dim: usize,
) -> Attention {
    Attention {
        heads: l.heads,
        kv_heads,
        key_dim: plain_dim + l.rope.dims,
        value_dim,
        scale: l.scale,
        softcap: None,
        window: None,
        causal: true,
        sinks: None,
    }
}
