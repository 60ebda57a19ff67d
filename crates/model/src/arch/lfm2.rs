//! LFM2: as Llama, with QK norms, and a gated short convolution in layers without KV heads. The
//! tensors determine which layers have experts.

use super::llama::{Decoder, TokenMixer};
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    if m.bool("attention.causal")? == Some(false) {
        let what = format!("a {} model with non-causal convolutions", m.architecture());
        return Err(Error::Unsupported(what));
    }
    let kernel = m.kernel("shortconv.l_cache")?;
    let mut decoder = Decoder::hybrid(m, g, RopeStyle::Neox, TokenMixer::ShortConv(kernel))?;
    decoder.output_norm = "token_embd_norm";
    let window = m.sliding_window()?;
    decoder.attention().for_each(|layer| layer.attention.window = window);
    decoder.build(g)
}
