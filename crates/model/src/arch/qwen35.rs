//! Qwen 3.5 and Qwen 3 Next, dense and with experts: Gated DeltaNet layers, and a layer of
//! attention with output gates after every few of them.

use super::hybrid_attention_layers;
use super::llama::{Decoder, TokenMixer};
use crate::builder::{Builder, DeltaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let layers = m.layers()?;
    // The converter of Qwen 3.5 reorders value heads.
    let is_cyclic = m.architecture() != "qwen3next";
    let mixer = TokenMixer::Delta(DeltaMixer::new(m, m.rms_eps()?, is_cyclic)?);
    let attention = hybrid_attention_layers(m, layers)?.into_iter().zip(recurrent(m, layers)?);
    let attention = attention.map(|(attention, is_recurrent)| attention.filter(|_| !is_recurrent));
    let mut decoder = Decoder::with(m, g, RopeStyle::Neox, attention.collect(), Some(mixer))?;
    for layer in &mut decoder.layers {
        if let TokenMixer::Attention(attention) = *layer {
            *layer = TokenMixer::GatedAttention(attention);
        }
    }
    decoder.ffn_norm = "post_attention_norm";
    decoder.build(g)
}

/// Whether each layer is linear attention.
fn recurrent(m: &HyperParameters<'_>, layers: usize) -> Result<Vec<bool>> {
    let interval = m.size_or("full_attention_interval", 4)?;
    let by_interval = || (1..=layers).map(|layer| layer % interval != 0).collect();
    Ok(m.bools("attention.recurrent_layers", layers)?.unwrap_or_else(by_interval))
}
