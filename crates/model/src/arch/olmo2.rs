//! OLMo 2 and 3: norms after each half of a block and not before it. OLMo 3, stored under the same
//! name, has local layers with a window between global ones.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.norm_before = false;
    decoder.norm_after = true;
    if let Some(window) = m.sliding_window()? {
        decoder.localize(&m.local_layers(4)?, window, m.rope_base("rope.freq_base_swa")?);
    }
    decoder.build(g)
}
