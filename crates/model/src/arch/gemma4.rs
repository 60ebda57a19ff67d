//! Gemma 4: sliding-window and global layers with heads of different sizes. In the small models
//! each layer has an input of its own, and the last layers attend to the keys and values of earlier
//! ones; another has experts beside the feed-forward network. Tensors determine which.

use super::{attention_layers, hidden_sizes, rope, routings};
use crate::builder::{AttentionLayer, Builder};
use crate::error::{Error, Result};
use crate::hyperparameters::HyperParameters;
use crate::ids::{SlotId, Value};
use crate::op::{Act, Attention, Gating};
use crate::plan::KvSlot;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let (width, eps, act) = (m.size("embedding_length")?, m.rms_eps()?, Act::GeluTanh);
    let pattern = "attention.sliding_window_pattern";
    if !m.has(pattern) {
        return Err(m.error(pattern, "missing"));
    }
    let local = m.local_layers(1)?;
    let layers = attentions(m, g, &local, eps)?;
    if local.contains(&false) && !g.has("rope_freqs") {
        return Err(Error::MissingTensor("rope_freqs.weight".to_owned()));
    }
    let sources = sources(m, &layers, 0)?;
    let (hidden, routings) = (hidden_sizes(m, false)?, routings(m, g, Gating::Softmax, true)?);
    let x = g.embed("token_embd", width)?;
    let mut x = g.scale(x, Some((width as f32).sqrt()));
    let inputs = match m.size_or_none("embedding_length_per_layer_input")? {
        Some(width) => Some((g.layer_inputs(x, layers.len(), width, eps)?, width)),
        None => None,
    };
    let mut slots: Vec<SlotId> = Vec::new();
    for (i, layer) in layers.into_iter().enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let (h, slot) = b.normed_attention(h, layer, sources[i].map(|source| slots[source]))?;
        slots.push(slot);
        let h = b.rms_norm(h, "post_attention_norm", eps)?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let mut h = b.feed_forward(h, act, hidden[i])?;
        if let Some(routing) = routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            h = b.rms_norm(h, "post_ffw_norm_1", eps)?;
            let experts = b.experts_beside(x, routing, act, eps)?;
            h = b.add(h, experts);
        }
        let h = b.rms_norm(h, "post_ffw_norm", eps)?;
        x = b.add(x, h);
        if let Some((inputs, width)) = inputs {
            let h = b.layer_input(x, inputs, (i, width), eps)?;
            x = b.add(x, h);
        }
        if b.has("layer_output_scale") {
            x = b.scale_by(x, "layer_output_scale", 1)?;
        }
    }
    let logits = g.logits(x, "output_norm", eps, &["output", "token_embd"])?;
    Ok(g.softcap(logits, m.cap("final_logit_softcapping")?))
}

/// The attention of each layer, of which some are `local`.
pub(super) fn attentions(
    m: &HyperParameters<'_>,
    g: &mut Builder<'_>,
    local: &[bool],
    eps: f32,
) -> Result<Vec<AttentionLayer>> {
    let (layers, window) = (attention_layers(m)?, m.size("attention.sliding_window")?);
    let Attention { key_dim, value_dim, .. } = layers[0];
    let local_dims = [
        m.size_or("attention.key_length_swa", key_dim)?,
        m.size_or("attention.value_length_swa", value_dim)?,
    ];
    let global_rope = rope(m, g, RopeStyle::Neox, key_dim)?;
    let local_rope = m.sliding_window_rope(global_rope, local_dims[0], 10_000.0)?;
    let layer = |(attention, &is_local): (Attention, &bool)| {
        let attention = Attention { scale: 1.0, ..attention };
        let [key_dim, value_dim] = local_dims;
        let (attention, rope) = match is_local {
            true => {
                (Attention { key_dim, value_dim, window: Some(window), ..attention }, local_rope)
            }
            false => (attention, global_rope),
        };
        AttentionLayer::new(attention, Some(rope), eps)
    };
    Ok(layers.into_iter().zip(local).map(layer).collect())
}

/// For each layer without keys and values of its own, the layer whose it attends to: the last one
/// of the same kind that has them. `default` layers have none if the file does not say how many.
pub(super) fn sources(
    m: &HyperParameters<'_>,
    layers: &[AttentionLayer],
    default: usize,
) -> Result<Vec<Option<usize>>> {
    let name = "attention.shared_kv_layers";
    let shared = m.u32(name)?.map_or(default, |n| n as usize);
    let own = layers.len().saturating_sub(shared);
    let source = |i: usize| {
        if i < own {
            return Ok(None);
        }
        let slot = KvSlot::of(&layers[i].attention);
        match layers[..own].iter().rposition(|layer| KvSlot::of(&layer.attention) == slot) {
            Some(source) => Ok(Some(source)),
            None => {
                let problem = format!("layer {i} is unlike all {own} with keys and values");
                Err(m.error(name, problem))
            }
        }
    };
    (0..layers.len()).map(source).collect()
}
