//! OLMoE: as Llama with experts whose weights stay as they are, with the other rotation; norms over
//! all queries and all keys follow from the tensors.

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
    decoder.routings = routings(m, g, Gating::Softmax, false)?;
    decoder.build(g)
}
