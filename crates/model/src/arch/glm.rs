//! GLM 4, with post-norms besides the pre-norms, and its mixtures of experts, GLM 4.5 to 4.7,
//! without them. The metadata say that a part of each head is rotated.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Gating;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    if m.architecture() == "glm4" {
        let mut decoder = Decoder::new(m, g, RopeStyle::Norm)?;
        decoder.norm_after = true;
        return decoder.build(g);
    }
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.routings = routings(m, g, Gating::Sigmoid, false)?;
    decoder.ffn_norm = "post_attention_norm";
    decoder.build(g)
}
