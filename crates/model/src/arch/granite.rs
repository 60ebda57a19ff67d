//! Granite 3 and 4, dense and with experts, but for the hybrids: as Llama, with a factor on the
//! embeddings, on what each half of a block adds, on the scores and on the logits. Models trained
//! without a rotation are marked by a scaling that is not finetuned.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::keys::Keys;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &Keys<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Norm)?;
    decoder.embedding_scale = factor(m, "embedding_scale")?;
    decoder.residual_scale = factor(m, "residual_scale")?;
    let attention_scale = factor(m, "attention.scale")?;
    let is_rotated = m.bool("rope.scaling.finetuned")?.unwrap_or(true);
    for layer in &mut decoder.layers {
        layer.attention.scale = attention_scale.unwrap_or(layer.attention.scale);
        layer.rope = layer.rope.filter(|_| is_rotated);
    }
    let logits = decoder.build(g)?;
    Ok(g.scale(logits, factor(m, "logit_scale")?.map(f32::recip)))
}

/// A factor, where zero stands for none: that is what files without one may hold.
fn factor(m: &Keys<'_>, name: &str) -> Result<Option<f32>> {
    Ok(m.f32(name)?.filter(|x| x.is_normal()))
}
