//! DeepSeek V2, V3 and R1, and Kimi K2 under their name: latent attention, and experts with a
//! shared expert, except in the first blocks. The Lite models have no latent row for queries.

use super::{hidden_sizes, routings};
use crate::builder::{Builder, LatentAttention};
use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating};
use crate::rope::{RopeScaling, RopeStyle};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    if m.f32("attention.temperature_scale")?.is_some_and(|scale| scale != 0.0) {
        return Err(Error::Unsupported("attention with a temperature by position".to_owned()));
    }
    let eps = m.rms_eps()?;
    let layer = latent_layer(m, eps)?;
    let routings = routings(m, g, Gating::Softmax, false)?;
    let hidden = hidden_sizes(m, !routings.is_empty())?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, hidden) in hidden.into_iter().enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.latent_attention(h, &layer)?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = match routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            Some(&routing) => b.experts(h, routing, Act::Silu)?,
            None => b.feed_forward(h, Act::Silu, hidden)?,
        };
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}

/// The settings of latent attention that the metadata gives.
pub(super) fn latent_layer(m: &HyperParameters<'_>, eps: f32) -> Result<LatentAttention> {
    let heads = m.size("attention.head_count")?;
    // In files with separate matrices, the lengths without `mla` are those of the latent row.
    let length = |kind: &str| match m.u32(&format!("attention.{kind}_length_mla"))? {
        None | Some(0) => m.size(&format!("attention.{kind}_length")),
        Some(_) => m.size(&format!("attention.{kind}_length_mla")),
    };
    let (key_dim, value_dim) = (length("key")?, length("value")?);
    let dims = m.size("rope.dimension_count")?;
    let Some(nope_dim) = key_dim.checked_sub(dims).filter(|&dim| dim > 0) else {
        let problem = format!("expected fewer than the {key_dim} elements of a key, found {dims}");
        return Err(m.error("rope.dimension_count", problem));
    };
    let mut rope = m.rope(RopeStyle::Norm, dims)?;
    let mut scale = 1.0 / (key_dim as f32).sqrt();
    // YaRN's scaling of the scores applies to the whole key here, so the rotary part has none.
    let name = "rope.scaling.yarn_log_multiplier";
    if let RopeScaling::Yarn { factor, attn_factor, .. } = &mut rope.scaling
        && let Some(growth) = m.f32(name)?.filter(|&growth| growth != 0.0 && *factor > 1.0)
    {
        *attn_factor /= 1.0 + 0.1 * factor.ln();
        scale *= (1.0 + growth * factor.ln()).powi(2);
        if !scale.is_finite() {
            return Err(m.error(name, format!("expected a small number, found {growth}")));
        }
    }
    let rank = m.size("attention.kv_lora_rank")?;
    Ok(LatentAttention { heads, nope_dim, value_dim, rank, rope, is_rotated: true, scale, eps })
}
