//! EXAONE 4, with post-norms instead of pre-norms, and its mixtures of experts, with pre-norms. Of
//! models with sliding-window layers only those layers have rotary embedding.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Gating;
use crate::rope::RopeStyle;

/// The layers of EXAONE 4 32B, which has sliding-window layers even if the file does not say so.
const LAYERS_32B: usize = 64;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    let mut window = m.sliding_window()?;
    if m.architecture() == "exaone4" {
        decoder.norm_before = false;
        decoder.norm_after = true;
        window = window.or((decoder.layers.len() == LAYERS_32B).then_some(4096));
    } else {
        decoder.routings = routings(m, g, Gating::Sigmoid, false)?;
    }
    if let Some(window) = window {
        decoder.set_sliding_window_and_nope(&m.local_layers(4)?, window);
    }
    decoder.build(g)
}
