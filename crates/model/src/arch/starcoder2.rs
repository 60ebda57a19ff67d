//! StarCoder 2: layer norms, an ungated GELU feed-forward network, biases everywhere. The file's
//! sliding window is ignored, as in llama.cpp.

use super::{attention_layers, hidden_sizes, rope};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Act;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.layer_eps()?;
    let attention = attention_layers(m)?;
    let rope = Some(rope(m, g, RopeStyle::Neox, attention[0].key_dim)?);
    let hidden = hidden_sizes(m, false)?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.layer_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, AttentionLayer::new(attention, rope, eps))?;
        x = b.add(x, h);
        let h = b.layer_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward(h, Act::GeluTanh, hidden)?;
        x = b.add(x, h);
    }
    g.layer_norm_logits(x, "output_norm", eps, &["output", "token_embd"])
}
