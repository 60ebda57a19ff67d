//! Falcon-H1: as Llama, with a Mamba 2 mixer parallel to the attention of every layer. The
//! converter folds the multipliers of the original into the weights.

use super::llama::{Decoder, TokenMixer};
use crate::builder::{Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    let mixer = MambaMixer::new(m, m.rms_eps()?)?;
    for layer in &mut decoder.layers {
        if let TokenMixer::Attention(attention) = *layer {
            *layer = TokenMixer::AttentionAndMamba(attention, mixer);
        }
    }
    decoder.build(g)
}
