//! Phi 3, 3.5 and 4: as Llama, with the other rotation, often of a part of each head only; the
//! fused projections and the stretched frequencies of long contexts follow from the tensors. The
//! window that files name is not used, as in llama.cpp: what converters write there says too
//! little of which layers have one.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    Decoder::new(m, g, RopeStyle::Neox)?.build(g)
}
