//! Mixtures of experts as Qwen 3's, with routing by sigmoids: MiniMax M2, dots.llm1, Ling 2.0 and
//! Hunyuan 3. The tensors determine dense layers, shared experts and whether QK norms are over
//! heads or whole rows; the metadata say whether a part of each head is rotated.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Gating;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.routings = routings(m, g, Gating::Sigmoid, m.architecture() == "minimax-m2")?;
    decoder.build(g)
}
