//! LFM2: as Llama, with head norms, and a short convolution where a layer has no key heads. Which
//! layers have experts follows from the tensors.

use super::llama::{Decoder, Mix};
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::plan::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    if m.bool("attention.causal")? == Some(false) {
        let what = format!("a {} model whose convolutions look ahead", m.architecture());
        return Err(Error::Unsupported(what));
    }
    let kernel = m.kernel("shortconv.l_cache")?;
    let mut decoder = Decoder::hybrid(m, g, RopeStyle::Neox, Mix::ShortConv(kernel))?;
    decoder.output_norm = "token_embd_norm";
    let window = m.sliding_window()?;
    decoder.attention().for_each(|layer| layer.attention.window = window);
    decoder.build(g)
}
