//! Granite 3 and 4, dense and with experts: as Llama, with factors on embeddings, residual
//! additions, attention scores and logits. `rope.scaling.finetuned = false` marks models without
//! rotary embedding (NoPE). The hybrids have a Mamba 2 mixer in layers without KV heads.

use super::llama::{Decoder, TokenMixer};
use crate::builder::{Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let style = RopeStyle::Norm;
    let mut decoder = match m.u32("ssm.inner_size")? {
        Some(_) => {
            Decoder::hybrid(m, g, style, TokenMixer::Mamba(MambaMixer::new(m, m.rms_eps()?)?))?
        }
        None => Decoder::new(m, g, style)?,
    };
    decoder.embedding_scale = factor(m, "embedding_scale")?;
    decoder.residual_scale = factor(m, "residual_scale")?;
    let attention_scale = factor(m, "attention.scale")?;
    let is_rotated = m.bool("rope.scaling.finetuned")?.unwrap_or(true);
    for layer in decoder.attention() {
        layer.attention.scale = attention_scale.unwrap_or(layer.attention.scale);
        layer.rope = layer.rope.filter(|_| is_rotated);
    }
    let logits = decoder.build(g)?;
    Ok(g.scale(logits, factor(m, "logit_scale")?.map(f32::recip)))
}

/// A factor; some converters write zero for none.
fn factor(m: &HyperParameters<'_>, name: &str) -> Result<Option<f32>> {
    Ok(m.f32(name)?.filter(|x| x.is_normal()))
}
