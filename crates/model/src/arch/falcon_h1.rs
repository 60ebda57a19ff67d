//! Falcon-H1: as Llama, with a Mamba 2 mixer beside the attention of every layer. The many factors
//! of the original are folded into the weights.

use super::llama::{Decoder, Mix};
use crate::builder::{Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    let mixer = MambaMixer::new(m, m.rms_eps()?)?;
    for layer in &mut decoder.layers {
        if let Mix::Attention(attention) = *layer {
            *layer = Mix::AttentionAndMamba(attention, mixer);
        }
    }
    decoder.build(g)
}
