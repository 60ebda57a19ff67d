//! Llama, and what is stored under its name: Mistral, TinyLlama, SmolLM2.

use super::{attention_layers, hidden_sizes, refuse_experts};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::keys::Keys;
use crate::plan::{Act, Value};
use crate::rope::RopeStyle;

pub(super) fn build(m: &Keys<'_>, g: &mut Builder<'_>) -> Result<Value> {
    refuse_experts(m)?;
    let eps = m.rms_eps()?;
    let layers = attention_layers(m)?;
    let hidden = hidden_sizes(m)?;
    let head_dim = layers[0].key_dim;
    let factors = g.vector("rope_freqs", head_dim / 2)?;
    let rope = Some(m.rope(RopeStyle::Norm, head_dim, factors)?);

    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, attention) in layers.into_iter().enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, AttentionLayer { attention, rope, eps })?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward(h, Act::Silu, hidden[i])?;
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}
