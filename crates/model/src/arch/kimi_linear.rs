//! Kimi Linear: Kimi Delta Attention in layers without KV heads, latent attention without rotary
//! embedding in the others; experts with a shared expert, except in the first blocks.

use super::deepseek2::latent_layer;
use super::{hidden_sizes, routings};
use crate::builder::{Builder, DeltaMixer, LatentAttention};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating, Routing};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let latent = LatentAttention { is_rotated: false, ..latent_layer(m, eps)? };
    let mixer = DeltaMixer::kimi(m, eps)?;
    let kv_heads = m
        .counts("attention.head_count_kv", m.layers()?)?
        .ok_or_else(|| m.error("attention.head_count_kv", "missing"))?;
    let routings = routings(m, g, Gating::Sigmoid, true)?;
    let hidden = hidden_sizes(m, !routings.is_empty())?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (kv_heads, hidden)) in kv_heads.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = match kv_heads {
            0 => b.kimi_delta_mixer(h, mixer)?,
            _ => b.latent_attention(h, &latent, &mut None)?,
        };
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = match routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            // Whatever the metadata says of it, the weights are normalised.
            Some(&routing) => b.experts(h, Routing { normalize: true, ..routing }, Act::Silu)?,
            None => b.feed_forward(h, Act::Silu, hidden)?,
        };
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}
