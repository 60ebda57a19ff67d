//! SmolLM3: as Llama, but the last of every four layers has no rotary embedding (NoPE).

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Norm)?;
    decoder.attention().skip(3).step_by(4).for_each(|layer| layer.rope = None);
    decoder.build(g)
}
