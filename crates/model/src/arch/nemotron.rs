//! Nemotron-H and Nemotron 3: each block is either a Mamba 2 mixer, attention without rotary
//! embedding, or a squared-ReLU feed-forward network, possibly with experts.

use super::hybrid_attention_layers;
use crate::builder::{AttentionLayer, Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Gating};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = match m.f32("attention.layer_norm_rms_epsilon")? {
        Some(eps) => eps,
        None => m.layer_eps()?,
    };
    let layers = m.layers()?;
    let mixer = MambaMixer::new(m, eps)?;
    let attention = hybrid_attention_layers(m, layers)?;
    let hidden = m
        .counts("feed_forward_length", layers)?
        .ok_or_else(|| m.error("feed_forward_length", "missing"))?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = match (hidden, attention) {
            (0, None) => b.mixer(h, mixer)?,
            (0, Some(attention)) => {
                b.attention(h, AttentionLayer::new(attention, None, eps))?
            }
            _ if b.has("ffn_gate_inp") => {
                b.experts(h, m.routing(i, Gating::Sigmoid, false)?, Act::ReluSquared)?
            }
            _ => b.feed_forward(h, Act::ReluSquared, hidden)?,
        };
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}
