//! Llama, and what is stored under its name: Mistral, Mixtral, TinyLlama, SmolLM2. Most other
//! decoders are this one with a few settings changed: their files start from [`Decoder::new`].

use super::{attention_layers, hidden_sizes, rope, routings};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::keys::Keys;
use crate::op::{Act, Gating, Routing};
use crate::plan::Value;
use crate::rope::{RopeScaling, RopeStyle};

pub(super) fn build(m: &Keys<'_>, g: &mut Builder<'_>) -> Result<Value> {
    Decoder::new(m, g, RopeStyle::Norm)?.build(g)
}

/// Blocks of attention and a gated feed-forward layer or experts, each added to what went into it.
pub(super) struct Decoder {
    /// The width of embeddings and of what blocks take and give.
    pub(super) width: usize,
    /// The attention of each layer.
    pub(super) layers: Vec<AttentionLayer>,
    /// The width within the feed-forward part of each layer.
    hidden: Vec<usize>,
    /// How each layer chooses experts, if the model has any.
    pub(super) routings: Vec<Routing>,
    /// The epsilon of all norms.
    eps: f32,
    /// The activation of the gate.
    pub(super) act: Act,
    /// The norm before the feed-forward part.
    pub(super) ffn_norm: &'static str,
    /// Whether attention and feed-forward part work on normed values.
    pub(super) norm_before: bool,
    /// Whether their results are normed before they are added.
    pub(super) norm_after: bool,
    /// Multiplies the rows of the token table.
    pub(super) embedding_scale: Option<f32>,
    /// Multiplies what attention and feed-forward part add.
    pub(super) residual_scale: Option<f32>,
}

impl Decoder {
    /// Llama's settings, with the sizes that the metadata gives.
    pub(super) fn new(m: &Keys<'_>, g: &mut Builder<'_>, style: RopeStyle) -> Result<Decoder> {
        let eps = m.rms_eps()?;
        let attention = attention_layers(m)?;
        let routings = routings(m, g, Gating::Softmax, true)?;
        let rope = Some(rope(m, g, style, attention[0].key_dim)?);
        let layer = |attention| AttentionLayer { attention, rope, eps };
        Ok(Decoder {
            width: m.size("embedding_length")?,
            layers: attention.into_iter().map(layer).collect(),
            hidden: hidden_sizes(m, !routings.is_empty())?,
            routings,
            eps,
            act: Act::Silu,
            ffn_norm: "ffn_norm",
            norm_before: true,
            norm_after: false,
            embedding_scale: None,
            residual_scale: None,
        })
    }

    /// Makes layers local: they see `window` tokens, and rotate with a base of their own, if there
    /// is one, and without the scaling of longer contexts.
    pub(super) fn localize(&mut self, local: &[bool], window: usize, base: Option<f32>) {
        let layers = self.layers.iter_mut().zip(local);
        for (layer, _) in layers.filter(|(_, is_local)| **is_local) {
            layer.attention.window = Some(window);
            if let Some(rope) = &mut layer.rope {
                rope.base = base.unwrap_or(rope.base);
                rope.scaling = RopeScaling::None;
            }
        }
    }

    /// The whole model, from the token table to the logits.
    pub(super) fn build(self, g: &mut Builder<'_>) -> Result<Value> {
        let eps = self.eps;
        let x = g.embed("token_embd", self.width)?;
        let mut x = g.scale(x, self.embedding_scale);
        for (i, (layer, hidden)) in self.layers.into_iter().zip(self.hidden).enumerate() {
            let b = g.block(i);
            let h = if self.norm_before { b.rms_norm(x, "attn_norm", eps)? } else { x };
            let h = b.attention(h, layer)?;
            let h = if self.norm_after { b.rms_norm(h, "post_attention_norm", eps)? } else { h };
            let h = b.scale(h, self.residual_scale);
            x = b.add(x, h);
            let h = if self.norm_before { b.rms_norm(x, self.ffn_norm, eps)? } else { x };
            let h = match self.routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
                Some(&routing) => b.experts(h, routing, self.act)?,
                None => b.feed_forward(h, self.act, hidden)?,
            };
            let h = if self.norm_after { b.rms_norm(h, "post_ffw_norm", eps)? } else { h };
            let h = b.scale(h, self.residual_scale);
            x = b.add(x, h);
        }
        g.logits(x, "output_norm", eps, &["output", "token_embd"])
    }
}
