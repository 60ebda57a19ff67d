//! GPT-OSS: sliding-window attention in every other layer, attention sinks, biases everywhere, and
//! experts with clamped gates.

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
    decoder.routings = routings(m, g, Gating::SoftmaxOfChosen, false)?;
    decoder.acts.fill(Act::ClampedSwish);
    decoder.ffn_norm = "post_attention_norm";
    let (window, base) = (m.sliding_window()?, m.rope_base("rope.freq_base_swa")?);
    let layers = decoder.attention().zip(m.local_layers(2)?);
    for (layer, _) in layers.filter(|(_, is_local)| *is_local) {
        // Unlike in other models, sliding-window layers keep the RoPE scaling.
        layer.attention.window = window;
        if let (Some(rope), Some(base)) = (&mut layer.rope, base) {
            rope.base = base;
        }
    }
    decoder.build(g)
}
