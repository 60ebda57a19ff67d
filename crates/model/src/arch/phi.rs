//! Phi 3, 3.5 and 4: as Llama, with NeoX RoPE, often on a part of each head; the tensors determine
//! fused projections and LongRoPE factors. The file's sliding window is ignored, as in llama.cpp:
//! the metadata do not specify which layers have it.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    m.ignore(&["attention.sliding_window"]);
    Decoder::new(m, g, RopeStyle::Neox)?.build(g)
}
