//! Mellum 2: as Qwen 3 with experts, with sliding-window layers.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    if let Some(window) = m.sliding_window()? {
        decoder.set_sliding_window(&m.local_layers(4)?, window, m.rope_base("rope.freq_base_swa")?);
    }
    decoder.build(g)
}
