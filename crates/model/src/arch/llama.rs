//! Llama, and what is stored under its name: Mistral, Mixtral, TinyLlama, SmolLM2. Most other
//! decoders are this one with a few settings changed: their files start from [`Decoder::new`], or,
//! where layers mix the tokens of a sequence in different ways, from [`Decoder::hybrid`].

use super::{attention_layers, hidden_sizes, hybrid_attention_layers, rope, routings};
use crate::builder::{AttentionLayer, Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::op::{Act, Attention, Gating, Routing};
use crate::plan::Value;
use crate::rope::{RopeScaling, RopeStyle};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    Decoder::new(m, g, RopeStyle::Norm)?.build(g)
}

/// What mixes the tokens of a sequence in a layer.
#[derive(Clone, Copy)]
pub(super) enum Mix {
    /// Attention.
    Attention(AttentionLayer),
    /// A Mamba 2 mixer.
    Mamba(MambaMixer),
    /// Both on the same input, added.
    AttentionAndMamba(AttentionLayer, MambaMixer),
    /// A short convolution with so many taps.
    ShortConv(usize),
}

/// Blocks of attention, or another mix, and a gated feed-forward layer or experts, each added to
/// what went into it.
pub(super) struct Decoder {
    /// The width of embeddings and of what blocks take and give.
    pub(super) width: usize,
    /// How each layer mixes tokens.
    pub(super) layers: Vec<Mix>,
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
    /// The tensor of the last norm.
    pub(super) output_norm: &'static str,
}

impl Decoder {
    /// Llama's settings, with the sizes that the metadata gives.
    pub(super) fn new(m: &HyperParameters<'_>, g: &mut Builder<'_>, style: RopeStyle) -> Result<Decoder> {
        let attention = attention_layers(m)?.into_iter().map(Some).collect();
        Decoder::with(m, g, style, attention, None)
    }

    /// As [`Decoder::new`], with layers that have no key heads: those mix by `other`.
    pub(super) fn hybrid(
        m: &HyperParameters<'_>,
        g: &mut Builder<'_>,
        style: RopeStyle,
        other: Mix,
    ) -> Result<Decoder> {
        let attention = hybrid_attention_layers(m, m.layers()?)?;
        Decoder::with(m, g, style, attention, Some(other))
    }

    fn with(
        m: &HyperParameters<'_>,
        g: &mut Builder<'_>,
        style: RopeStyle,
        attention: Vec<Option<Attention>>,
        other: Option<Mix>,
    ) -> Result<Decoder> {
        let eps = m.rms_eps()?;
        let routings = routings(m, g, Gating::Softmax, true)?;
        let head_dim = attention.iter().flatten().next().map(|a| a.key_dim);
        let rope = head_dim.map(|head_dim| rope(m, g, style, head_dim)).transpose()?;
        let layer = |attention| match attention {
            Some(attention) => Mix::Attention(AttentionLayer { attention, rope, eps }),
            None => other.expect("only hybrids have layers without attention"),
        };
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
            output_norm: "output_norm",
        })
    }

    /// The attention of each layer that has one.
    pub(super) fn attention(&mut self) -> impl Iterator<Item = &mut AttentionLayer> {
        self.layers.iter_mut().filter_map(Mix::attention)
    }

    /// Makes layers local: they see `window` tokens, and rotate with a base of their own, if there
    /// is one, and without the scaling of longer contexts.
    pub(super) fn localize(&mut self, local: &[bool], window: usize, base: Option<f32>) {
        let layers = self.layers.iter_mut().zip(local).filter(|(_, is_local)| **is_local);
        for layer in layers.filter_map(|(layer, _)| layer.attention()) {
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
            let h = layer.apply(b, h)?;
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
        g.logits(x, self.output_norm, eps, &["output", "token_embd"])
    }
}

impl Mix {
    fn attention(&mut self) -> Option<&mut AttentionLayer> {
        match self {
            Mix::Attention(layer) | Mix::AttentionAndMamba(layer, _) => Some(layer),
            Mix::Mamba(_) | Mix::ShortConv(_) => None,
        }
    }

    fn apply(self, b: &mut Builder<'_>, input: Value) -> Result<Value> {
        match self {
            Mix::Attention(layer) => b.attention(input, layer),
            Mix::Mamba(mixer) => b.mixer(input, mixer),
            Mix::AttentionAndMamba(layer, mixer) => {
                let attended = b.attention(input, layer)?;
                let scanned = b.mixer(input, mixer)?;
                Ok(b.add(attended, scanned))
            }
            Mix::ShortConv(kernel) => b.short_conv(input, kernel),
        }
    }
}
