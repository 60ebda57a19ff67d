//! Gemma 3n: attention and layer inputs as in Gemma 4; several residual streams (AltUp), a low-rank
//! residual (LAuReL), and sparse gates in the first layers. The last layers attend to the keys and
//! values of earlier ones.

use std::f32::consts::FRAC_1_SQRT_2;

use super::gemma4::{attentions, sources};
use super::hidden_sizes;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::{SlotId, Value};
use crate::op::Act;

/// The layers with keys and values of their own, unless the file says otherwise.
const OWN_KV_LAYERS: usize = 20;
/// The layers with sparse gates, likewise.
const SPARSE_LAYERS: usize = 10;
/// The standard deviations between a gate's mean and its cutoff, likewise: above it lie 5 % of a
/// normal distribution.
const DEVIATIONS: f32 = 1.644_853_5;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let (width, eps) = (m.size("embedding_length")?, m.rms_eps()?);
    let layers = attentions(m, g, &m.local_layers(5)?, eps)?;
    let count = layers.len();
    let sources = sources(m, &layers, count.saturating_sub(OWN_KV_LAYERS))?;
    let (hidden, sparsity) = (hidden_sizes(m, false)?, sparsity(m, count)?);
    let input_width = m.size_or("embedding_length_per_layer_input", 256)?;
    let x = g.embed("token_embd", width)?;
    let x = g.scale(x, Some((width as f32).sqrt()));
    let inputs = g.layer_inputs(x, count, input_width, eps)?;
    let mut streams = g.altup_streams(x, stream_count(m)?)?;
    let mut slots: Vec<SlotId> = Vec::new();
    for (i, layer) in layers.into_iter().enumerate() {
        let b = g.block(i);
        let predicted = b.altup_predict(&streams, eps)?;
        let h = b.rms_norm(predicted[0], "attn_norm", eps)?;
        let laurel = b.laurel(h, eps)?;
        let (h, slot) = b.normed_attention(h, layer, sources[i].map(|source| slots[source]))?;
        slots.push(slot);
        let h = b.rms_norm(h, "post_attention_norm", eps)?;
        let h = b.add(predicted[0], h);
        let h = b.add(h, laurel);
        let x = b.scale(h, Some(FRAC_1_SQRT_2));
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = b.sparse_feed_forward(h, Act::GeluTanh, hidden[i], sparsity[i])?;
        let h = b.rms_norm(h, "post_ffw_norm", eps)?;
        let x = b.add(x, h);
        streams = b.altup_correct(&predicted, x, eps)?;
        let h = b.scale_by(streams[0], "altup_correct_scale", width)?;
        let h = b.layer_input(h, inputs, (i, input_width), eps)?;
        streams[1..].iter_mut().for_each(|stream| *stream = b.add(*stream, h));
    }
    let x = g.leave_blocks().altup_merge(&streams)?;
    let logits = g.logits(x, "output_norm", eps, &["output", "token_embd"])?;
    let name = "final_logit_softcapping";
    let cap = if m.has(name) { m.cap(name)? } else { Some(30.0) };
    Ok(g.softcap(logits, cap))
}

/// The number of residual streams. Blocks compute with the first one.
fn stream_count(m: &HyperParameters<'_>) -> Result<usize> {
    if let Some(active) = m.u32("altup.active_idx")?.filter(|&active| active > 0) {
        return Err(m.error("altup.active_idx", format!("expected 0, found {active}")));
    }
    match m.size_or("altup.num_inputs", 4)? {
        1 => Err(m.error("altup.num_inputs", "expected at least 2, found 1")),
        count => Ok(count),
    }
}

/// For each layer with a sparse gate, the standard deviations between mean and cutoff.
fn sparsity(m: &HyperParameters<'_>, layers: usize) -> Result<Vec<Option<f32>>> {
    let scales = m.thresholds("activation_sparsity_scale", layers)?;
    let scale = |i: usize| match &scales {
        Some(scales) => Some(scales[i]).filter(|scale| scale.is_finite()),
        None => (i < SPARSE_LAYERS).then_some(DEVIATIONS),
    };
    Ok((0..layers).map(scale).collect())
}
