//! Jamba: as Llama without rotary embedding, with a Mamba 1 mixer in layers without KV heads. The
//! tensors determine which layers have experts.

use super::llama::{Decoder, TokenMixer};
use super::routings;
use crate::builder::{Builder, SelectiveMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Gating;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mixer = TokenMixer::Selective(SelectiveMixer::new(m, m.rms_eps()?)?);
    let mut decoder = Decoder::hybrid(m, g, RopeStyle::Norm, mixer)?;
    decoder.routings = routings(m, g, Gating::Softmax, false)?;
    decoder.attention().for_each(|layer| layer.rope = None);
    decoder.build(g)
}
