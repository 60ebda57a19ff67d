//! StableLM: layer norms, partial RoPE, a gated feed-forward network. Layers without a feed-forward
//! norm, as in StableLM 2 12B, run it parallel to attention on the same normed input; their QK
//! norms are layer norms.

use super::{attention_layers, hidden_sizes, rope};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, NormKind};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.layer_eps()?;
    let attention = attention_layers(m)?;
    let rope = Some(rope(m, g, RopeStyle::Neox, attention[0].key_dim)?);
    let hidden = hidden_sizes(m, false)?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let normed = b.layer_norm(x, "attn_norm", eps)?;
        let norm = (NormKind::Layer, eps);
        let layer = AttentionLayer { norm, ..AttentionLayer::new(attention, rope, eps) };
        let h = b.attention(normed, layer)?;
        x = b.add(x, h);
        let h = if b.has("ffn_norm") { b.layer_norm(x, "ffn_norm", eps)? } else { normed };
        let h = b.feed_forward(h, Act::Silu, hidden)?;
        x = b.add(x, h);
    }
    g.layer_norm_logits(x, "output_norm", eps, &["output", "token_embd"])
}
