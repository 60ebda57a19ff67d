//! Llama 4: three layers with attention in chunks and rotary embedding, then one over all tokens
//! without it (iRoPE); experts, in some of the blocks, whose weights multiply their input.

use super::{hidden_sizes, rope, routings};
use crate::builder::{AttentionLayer, Builder, ExpertLayer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Attention, Gating, Temperature};
use crate::rope::{Rope, RopeStyle};

/// Every fourth layer has no rotary embedding.
const NOPE_PERIOD: usize = 4;
/// Tokens of a chunk, and those after which the temperature grows: in no key of the file.
const CHUNK: usize = 8192;
/// The temperature of layers without rotary embedding.
const TEMPERATURE: Temperature = Temperature { growth: 0.1, length: CHUNK as u32, offset: 1 };
/// The experts of Maverick, whose queries and keys have no norms.
const EXPERTS_WITHOUT_QK_NORM: usize = 128;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let layers = attention_layers(m, g, eps)?;
    let routings = routings(m, g, Gating::Sigmoid, false)?;
    let hidden = hidden_sizes(m, !routings.is_empty())?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (layer, hidden)) in layers.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, layer)?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = match routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            Some(&routing) => {
                let plain = ExpertLayer::new(routing, Act::Silu);
                b.expert_layer(h, &ExpertLayer { weighs_input: true, ..plain })?
            }
            None => b.feed_forward(h, Act::Silu, hidden)?,
        };
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}

/// The attention of every layer.
fn attention_layers(
    m: &HyperParameters<'_>,
    g: &mut Builder<'_>,
    eps: f32,
) -> Result<Vec<AttentionLayer>> {
    let attention = super::attention_layers(m)?;
    let head_dim = attention.first().map_or(0, |a| a.key_dim);
    let rope = rope(m, g, RopeStyle::Norm, head_dim)?;
    // A window of zero means neither chunks nor layers without rotary embedding.
    let is_plain = m.u32("attention.sliding_window")? == Some(0);
    let base = m.rope_base("rope.freq_base_swa")?.unwrap_or(rope.base);
    let has_norm = m.u32("expert_count")?.map(|n| n as usize) != Some(EXPERTS_WITHOUT_QK_NORM);
    let layers = attention.into_iter().zip(m.local_layers(NOPE_PERIOD)?).enumerate();
    let layer = |(i, (mut attention, is_local)): (usize, (Attention, bool))| {
        let has_rope = is_plain || (i + 1) % NOPE_PERIOD != 0;
        let is_local = is_local && !is_plain;
        if is_local {
            (attention.window, attention.chunked) = (Some(CHUNK), true);
        }
        attention.temperature = (!has_rope).then_some(TEMPERATURE);
        let rope = Rope { base: if is_local { base } else { rope.base }, ..rope };
        let plain = AttentionLayer::new(attention, has_rope.then_some(rope), eps);
        AttentionLayer { weightless_norm: has_rope && has_norm, norm_after_rope: true, ..plain }
    };
    Ok(layers.map(layer).collect())
}
