//! BitNet b1.58: as Llama, with NeoX RoPE and a norm before the output projections of attention and
//! of the feed-forward network.

use super::{attention_layers, hidden_sizes, rope};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Act;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let attention = attention_layers(m)?;
    let rope = Some(rope(m, g, RopeStyle::Neox, attention[0].key_dim)?);
    let hidden = hidden_sizes(m, false)?;
    let width = m.size("embedding_length")?;
    let mut x = g.embed("token_embd", width)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, AttentionLayer::new(attention, rope, eps))?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward_hidden(h, Act::Silu, hidden)?;
        let h = b.rms_norm(h, "ffn_sub_norm", eps)?;
        let h = b.linear(h, "ffn_down", width)?;
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}
