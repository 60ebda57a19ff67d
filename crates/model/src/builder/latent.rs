//! Multi-head latent attention (MLA, DeepSeek-V2, 2024): keys and values of all heads are
//! projections of one latent row. With separate matrices for keys and values in the file, queries
//! absorb the key projection and the KV cache holds the latent row. With the trained fused matrix,
//! keys and values are expanded and cached.

use crate::error::Result;
use crate::ids::Value;
use crate::op::{Attention, Entries, Op, Temperature};
use crate::rope::Rope;

use super::{Builder, IndexerLayer};

/// The settings of a layer of latent attention besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention {
    /// Query heads.
    pub heads: usize,
    /// Width of a query and key head without rotary embedding (NoPE).
    pub nope_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Width of the latent row.
    pub rank: usize,
    /// The rotary embedding of the last part of each query head, and of the shared key part.
    pub rope: Rope,
    /// Whether these parts are rotated. If not, they are only as wide as the rotary embedding.
    pub is_rotated: bool,
    /// Multiplies the dot products.
    pub scale: f32,
    /// Multiplies them too, by the query's position.
    pub temperature: Option<Temperature>,
    /// The epsilon of the norms of latent rows.
    pub eps: f32,
    /// The indexer that selects the tokens to attend to, if there is one.
    pub indexer: Option<IndexerLayer>,
}

/// The projections of both forms.
struct Projections {
    /// `[rows, heads * nope_dim]`.
    q_nope: Value,
    /// `[rows, heads * rope.dims]`, rotated.
    q_rope: Value,
    /// `[rows, rank]`, normed.
    latent: Value,
    /// `[rows, rope.dims]`, rotated.
    k_rope: Value,
    /// The tokens that are attended to.
    entries: Entries,
}

impl Builder<'_> {
    /// Latent self-attention, in the form that the file's tensors determine. A layer that has an
    /// indexer replaces the selected tokens, others that have a selection use it.
    pub fn latent_attention(
        &mut self,
        input: Value,
        layer: &LatentAttention,
        selected: &mut Option<Value>,
    ) -> Result<Value> {
        let width = self.width(input);
        let projections = self.latent_projections(input, layer, selected)?;
        let heads = match self.has("attn_k_b") {
            true => self.attend_absorbed(&projections, layer)?,
            false => self.attend_expanded(&projections, layer)?,
        };
        self.linear(heads, "attn_output", width)
    }

    fn latent_projections(
        &mut self,
        input: Value,
        l: &LatentAttention,
        selected: &mut Option<Value>,
    ) -> Result<Projections> {
        let (heads, rotated) = (l.heads, l.rope.dims);
        let head_dim = l.nope_dim + rotated;
        let q = match self.has("attn_q_a") || l.indexer.is_some() {
            true => {
                let q = self.linear_of_file(input, "attn_q_a")?;
                let latent = self.rms_norm(q, "attn_q_a_norm", l.eps)?;
                if let Some(indexer) = &l.indexer {
                    *selected = Some(self.select_tokens(input, latent, indexer)?);
                }
                self.linear(latent, "attn_q_b", heads * head_dim)?
            }
            false => self.linear(input, "attn_q", heads * head_dim)?,
        };
        let q_nope = self.slices(q, heads, 0, l.nope_dim);
        let q_rope = self.slices(q, heads, l.nope_dim, rotated);
        let kv = self.linear(input, "attn_kv_a_mqa", l.rank + rotated)?;
        let latent = self.slice(kv, 0, l.rank);
        let latent = self.rms_norm(latent, "attn_kv_a_norm", l.eps)?;
        let k_rope = self.slice(kv, l.rank, rotated);
        let (head_dim, rope) = (rotated, l.rope);
        let entries = selected.map_or(Entries::Tokens, Entries::Selected);
        if !l.is_rotated {
            return Ok(Projections { q_nope, q_rope, latent, k_rope, entries });
        }
        let q_rope = self.push(Op::Rope { input: q_rope, heads, head_dim, rope }, heads * rotated);
        let k_rope = self.push(Op::Rope { input: k_rope, heads: 1, head_dim, rope }, rotated);
        Ok(Projections { q_nope, q_rope, latent, k_rope, entries })
    }

    /// The absorbed form: attention in the latent space, projected to values afterwards.
    fn attend_absorbed(&mut self, p: &Projections, l: &LatentAttention) -> Result<Value> {
        let q = self.head_linear(p.q_nope, "attn_k_b", l.heads, l.rank)?;
        let q = self.concat(q, p.q_rope, l.heads, l.rope.dims);
        let k = self.concat(p.latent, p.k_rope, 1, l.rope.dims);
        let attention = Attention { entries: p.entries, ..attention(l, 1, l.rank, l.rank) };
        let h = self.attend(q, k, p.latent, attention);
        self.head_linear(h, "attn_v_b", l.heads, l.value_dim)
    }

    /// The expanded form: keys and values of each head are projected from the latent row.
    fn attend_expanded(&mut self, p: &Projections, l: &LatentAttention) -> Result<Value> {
        let kv = self.linear(p.latent, "attn_kv_b", l.heads * (l.nope_dim + l.value_dim))?;
        let k = self.slices(kv, l.heads, 0, l.nope_dim);
        let v = self.slices(kv, l.heads, l.nope_dim, l.value_dim);
        let k = self.concat(k, p.k_rope, l.heads, l.rope.dims);
        let q = self.concat(p.q_nope, p.q_rope, l.heads, l.rope.dims);
        let attention = attention(l, l.heads, l.nope_dim, l.value_dim);
        Ok(self.attend(q, k, v, Attention { entries: p.entries, ..attention }))
    }

    /// A matmul of each head's part of the input with that head's matrix.
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

    /// Concatenates each head of `a` with `dims` elements of `b`: its own, or the shared ones.
    pub(super) fn concat(&mut self, a: Value, b: Value, heads: usize, dims: usize) -> Value {
        self.push(Op::Concat { a, b, groups: heads }, self.width(a) + heads * dims)
    }
}

fn attention(l: &LatentAttention, kv_heads: usize, nope_dim: usize, value_dim: usize) -> Attention {
    Attention {
        heads: l.heads,
        kv_heads,
        key_dim: nope_dim + l.rope.dims,
        value_dim,
        scale: l.scale,
        temperature: l.temperature,
        softcap: None,
        window: None,
        chunked: false,
        causal: true,
        sinks: None,
        entries: Entries::Tokens,
    }
}
