//! Command R7B and Command A, and their mixtures of experts: attention and feed-forward network are
//! parallel, on the same normed input. Sliding-window layers have rotary embedding, global layers
//! have none, apart from leading dense layers of models with experts.

use super::{attention_layers, hidden_sizes, rope, routings};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let has_experts = m.architecture() == "cohere2moe";
    let routings = if has_experts { routings(m, g, Gating::Sigmoid, false)? } else { Vec::new() };
    let local = if has_experts { m.local_layers_after_global(4)? } else { m.local_layers(4)? };
    let dense = if has_experts { m.count("leading_dense_block_count")? } else { 0 };
    // Of these architectures, only models with experts may have RMS norms.
    let rms_eps = m.f32("attention.layer_norm_rms_epsilon")?.filter(|&x| has_experts && x != 0.0);
    let eps = rms_eps.map_or_else(|| m.layer_eps(), Ok)?;
    let window = m.size("attention.sliding_window")?;
    let logit_scale = m.f32("logit_scale")?.ok_or_else(|| m.error("logit_scale", "missing"))?;
    let attention = attention_layers(m)?;
    let rope = rope(m, g, RopeStyle::Norm, attention[0].key_dim)?;
    let hidden = hidden_sizes(m, has_experts)?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (mut attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let normed = match rms_eps {
            Some(eps) => b.rms_norm(x, "attn_norm", eps)?,
            None => b.layer_norm(x, "attn_norm", eps)?,
        };
        attention.window = local[i].then_some(window);
        let rope = (local[i] || i < dense).then_some(rope);
        let attended = b.attention(normed, AttentionLayer::new(attention, rope, eps))?;
        let h = match routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            Some(&routing) => {
                let sum = b.experts(normed, routing, Act::Silu)?;
                b.scale(sum, b.has("ffn_up_shexp").then_some(0.5))
            }
            None => b.feed_forward(normed, Act::Silu, hidden)?,
        };
        x = b.add(h, x);
        x = b.add(x, attended);
    }
    let heads = ["output", "token_embd"];
    let logits = match rms_eps {
        Some(eps) => g.logits(x, "output_norm", eps, &heads)?,
        None => g.layer_norm_logits(x, "output_norm", eps, &heads)?,
    };
    Ok(g.scale(logits, Some(logit_scale).filter(|&scale| scale != 0.0)))
}
