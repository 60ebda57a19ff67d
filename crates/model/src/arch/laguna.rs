//! Laguna: heads by layer, attention with a softplus gate of each head or element, experts routed
//! by sigmoids, and sliding-window layers with a rotary embedding of their own.

use super::llama::Decoder;
use super::routings;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.routings = routings(m, g, Gating::Sigmoid, false)?;
    let local = m.local_layers_after_global(4)?;
    let window = m.sliding_window()?;
    for (layer, is_local) in decoder.attention().zip(local) {
        layer.gate = Act::Softplus;
        if is_local && window.is_some() {
            layer.attention.window = window;
            let dim = layer.attention.key_dim;
            let rope = layer.rope.map(|rope| m.sliding_window_rope(rope, dim, rope.base));
            layer.rope = rope.transpose()?;
        }
    }
    decoder.build(g)
}
