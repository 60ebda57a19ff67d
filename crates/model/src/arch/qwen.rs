//! Qwen 2 and Qwen 3, dense and with experts, and the language models of Qwen VL: as Llama, with
//! NeoX RoPE; the tensors determine the biases and the shared expert of Qwen 2 and the QK norms of
//! Qwen 3.

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
    decoder.routings = routings(m, g, Gating::Softmax, m.architecture() != "qwen2moe")?;
    decoder.build(g)
}
