//! DeepSeek V2, V3 and R1, and Kimi K2 and GLM 4.7 Flash under their name: latent attention, and
//! experts with a shared expert, except in the first blocks. The Lite models have no latent row for
//! queries. Mistral 4 adds a temperature by position. DeepSeek V3.2 and GLM 5 attend only to the
//! tokens that an indexer selects.

use super::{hidden_sizes, routings, temperature};
use crate::builder::{Builder, IndexerLayer, LatentAttention};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating, Indexer};
use crate::rope::{Rope, RopeScaling, RopeStyle, yarn_mscale};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let layer = latent_layer(m, eps)?;
    let indexers = indexers(m, layer.rope)?;
    let gating = if m.architecture() == "glm-dsa" { Gating::Sigmoid } else { Gating::Softmax };
    let routings = routings(m, g, gating, false)?;
    let hidden = hidden_sizes(m, !routings.is_empty())?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    let mut selected = None;
    for (i, hidden) in hidden.into_iter().enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let layer = LatentAttention { indexer: indexers[i], ..layer };
        let h = b.latent_attention(h, &layer, &mut selected)?;
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
    // YaRN scales the scores of the whole key here, not only those of the rotary part.
    let name = "rope.scaling.yarn_log_multiplier";
    if let RopeScaling::Yarn { factor, attn_factor, .. } = &mut rope.scaling
        && let Some(growth) = m.f32(name)?.filter(|&growth| growth != 0.0 && *factor > 1.0)
    {
        // The key is a tenth of `mscale_all_dim`. No key has `mscale`: as in llama.cpp, it is the
        // same in DeepSeek 2 and 3, and 1 in others.
        let all_dims = 10.0 * growth;
        let mscale = if m.architecture() == "deepseek2" { all_dims } else { 1.0 };
        let rotary = yarn_mscale(*factor, mscale) / yarn_mscale(*factor, all_dims);
        *attn_factor *= rotary / yarn_mscale(*factor, 1.0);
        scale *= yarn_mscale(*factor, mscale).powi(2);
        if !(scale.is_finite() && attn_factor.is_finite()) {
            return Err(m.error(name, format!("expected a small number, found {growth}")));
        }
    }
    let rank = m.size("attention.kv_lora_rank")?;
    let (is_rotated, indexer) = (true, None);
    let temperature = match m.f32("attention.temperature_scale")? {
        None | Some(0.0) => None,
        Some(_) => temperature(m, m.size("attention.temperature_length")?)?,
    };
    Ok(LatentAttention {
        heads,
        nope_dim,
        value_dim,
        rank,
        rope,
        is_rotated,
        scale,
        temperature,
        eps,
        indexer,
    })
}

/// The sizes of the lightning indexer, of whose keys `rotary` elements are rotated.
pub(super) fn indexer(m: &HyperParameters<'_>, rotary: usize) -> Result<Indexer> {
    let indexer = Indexer {
        heads: m.size("attention.indexer.head_count")?,
        dim: m.size("attention.indexer.key_length")?,
        top_k: m.size("attention.indexer.top_k")?,
    };
    if indexer.dim < rotary {
        let problem = format!("expected at least {rotary}, found {}", indexer.dim);
        return Err(m.error("attention.indexer.key_length", problem));
    }
    Ok(indexer)
}

/// The indexer of each layer. Layers without one attend to the tokens that an earlier one selected,
/// if there is one.
fn indexers(m: &HyperParameters<'_>, rope: Rope) -> Result<Vec<Option<IndexerLayer>>> {
    let layers = m.layers()?;
    let style = match m.architecture() {
        "deepseek32" => RopeStyle::Neox,
        "glm-dsa" => RopeStyle::Norm,
        _ => return Ok(vec![None; layers]),
    };
    let indexer = indexer(m, rope.dims)?;
    let layer = IndexerLayer { indexer, rope: Rope { style, ..rope }, eps: 1e-6 };
    let name = "attention.indexer.types";
    let mut has_indexer = m.bools(name, layers)?;
    if has_indexer.is_none() {
        let counts = m.counts(name, layers)?;
        has_indexer = counts.map(|counts| counts.iter().map(|&count| count > 0).collect());
    }
    // GLM 5.2, which has this context, shares selections among four layers; its first files lack
    // the key.
    let shares = m.architecture() == "glm-dsa" && m.context_length()? >= 1 << 20;
    let by_default = || (0..layers).map(|i| !shares || i < 2 || (i - 2) % 4 == 0).collect();
    let has_indexer: Vec<bool> = has_indexer.unwrap_or_else(by_default);
    if !has_indexer[0] {
        return Err(m.error(name, "expected true for the first layer, found false"));
    }
    Ok(has_indexer.into_iter().map(|has_indexer| has_indexer.then_some(layer)).collect())
}
