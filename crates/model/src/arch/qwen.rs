//! Qwen 2 and Qwen 3, dense and with experts: as Llama, with the other rotation; the biases of 2,
//! the head norms of 3 and the shared expert of 2 follow from the tensors.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::op::Gating;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.routings = routings(m, g, Gating::Softmax, m.architecture() != "qwen2moe")?;
    decoder.build(g)
}
