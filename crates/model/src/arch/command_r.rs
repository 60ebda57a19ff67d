//! Command R, Command R+ and Aya: layer norms, attention and feed-forward network parallel on the
//! same normed input, logits times a factor. Command R+ has a norm of its own for each head of
//! queries and keys.

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
    let rope = Some(rope(m, g, RopeStyle::Norm, attention[0].key_dim)?);
    let hidden = hidden_sizes(m, false)?;
    let logit_scale = m.f32("logit_scale")?.filter(|&scale| scale != 0.0);
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let normed = b.layer_norm(x, "attn_norm", eps)?;
        let norm = (NormKind::Layer, eps);
        let layer = AttentionLayer { norm, ..AttentionLayer::new(attention, rope, eps) };
        let attended = b.attention(normed, layer)?;
        let h = b.feed_forward(normed, Act::Silu, hidden)?;
        x = b.add(h, x);
        x = b.add(x, attended);
    }
    let logits = g.layer_norm_logits(x, "output_norm", eps, &["output", "token_embd"])?;
    Ok(g.scale(logits, logit_scale))
}
