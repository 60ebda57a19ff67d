//! OLMo 2 and 3: post-norm instead of pre-norm. OLMo 3, under the same architecture name,
//! alternates sliding-window and global layers.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.norm_before = false;
    decoder.norm_after = true;
    if let Some(window) = m.sliding_window()? {
        decoder.set_sliding_window(&m.local_layers(4)?, window, m.rope_base("rope.freq_base_swa")?);
    }
    decoder.build(g)
}
