//! Trinity: scaled embeddings, post-norms besides the pre-norms, attention with an output gate, and
//! experts routed by sigmoids. Only sliding-window layers have rotary embedding.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Gating;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.routings = routings(m, g, Gating::Sigmoid, false)?;
    decoder.embedding_scale = Some((decoder.width as f32).sqrt());
    decoder.norm_after = true;
    let window = m.size("attention.sliding_window")?;
    decoder.set_sliding_window_and_nope(&m.local_layers(4)?, window);
    decoder.build(g)
}
