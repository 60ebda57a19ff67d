//! Llama, and the models with its architecture name: Mistral, Mixtral, TinyLlama, SmolLM2; and
//! ERNIE 4.5, whose tensors determine the bias of the routers and the shared experts. Most other
//! decoders change a few settings of this one: their files start from [`Decoder::new`], or, with
//! different token mixers in different layers, from [`Decoder::hybrid`].

use super::{attention_layers, hidden_sizes, hybrid_attention_layers, rope, routings};
use crate::builder::{AttentionLayer, Builder, DeltaMixer, MambaMixer, SelectiveMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Attention, Gating, Routing};
use crate::rope::{RopeScaling, RopeStyle};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    Decoder::new(m, g, RopeStyle::Norm)?.build(g)
}

/// The token mixer of a layer.
#[derive(Clone, Copy)]
pub(super) enum TokenMixer {
    /// Attention.
    Attention(AttentionLayer),
    /// Attention with output gates.
    GatedAttention(AttentionLayer),
    /// A Mamba 1 mixer.
    Selective(SelectiveMixer),
    /// A Mamba 2 mixer.
    Mamba(MambaMixer),
    /// Linear attention by the gated delta rule.
    Delta(DeltaMixer),
    /// Both on the same input, added.
    AttentionAndMamba(AttentionLayer, MambaMixer),
    /// A gated short convolution with this number of taps.
    ShortConv(usize),
}

/// A decoder of residual blocks: a token mixer, then a gated feed-forward network or experts.
pub(super) struct Decoder {
    /// The width of the residual stream.
    pub(super) width: usize,
    /// The token mixer of each layer.
    pub(super) layers: Vec<TokenMixer>,
    /// The hidden width of each layer's feed-forward network.
    hidden: Vec<usize>,
    /// The routing of each layer; empty without experts.
    pub(super) routings: Vec<Routing>,
    /// The epsilon of all norms.
    eps: f32,
    /// The activation of each layer's feed-forward network or experts.
    pub(super) acts: Vec<Act>,
    /// The tensor of the norm before the feed-forward network.
    pub(super) ffn_norm: &'static str,
    /// Whether blocks norm the input of token mixer and feed-forward network (pre-norm).
    pub(super) norm_before: bool,
    /// Whether blocks norm their output before the residual addition (post-norm).
    pub(super) norm_after: bool,
    /// Multiplies the token embeddings.
    pub(super) embedding_scale: Option<f32>,
    /// Multiplies the output of token mixer and feed-forward network.
    pub(super) residual_scale: Option<f32>,
    /// The tensor of the final norm.
    pub(super) output_norm: &'static str,
}

impl Decoder {
    /// Llama's settings, with the sizes that the metadata gives.
    pub(super) fn new(
        m: &HyperParameters<'_>,
        g: &mut Builder<'_>,
        style: RopeStyle,
    ) -> Result<Decoder> {
        let attention = attention_layers(m)?.into_iter().map(Some).collect();
        Decoder::with(m, g, style, attention, None)
    }

    /// As [`Decoder::new`]; layers without KV heads have the token mixer `other`.
    pub(super) fn hybrid(
        m: &HyperParameters<'_>,
        g: &mut Builder<'_>,
        style: RopeStyle,
        other: TokenMixer,
    ) -> Result<Decoder> {
        let attention = hybrid_attention_layers(m, m.layers()?)?;
        Decoder::with(m, g, style, attention, Some(other))
    }

    /// As [`Decoder::new`], with the attention of some layers and the token mixer of the others.
    pub(super) fn with(
        m: &HyperParameters<'_>,
        g: &mut Builder<'_>,
        style: RopeStyle,
        attention: Vec<Option<Attention>>,
        other: Option<TokenMixer>,
    ) -> Result<Decoder> {
        let eps = m.rms_eps()?;
        let routings = routings(m, g, Gating::Softmax, true)?;
        let head_dim = attention.iter().flatten().next().map(|a| a.key_dim);
        let rope = head_dim.map(|head_dim| rope(m, g, style, head_dim)).transpose()?;
        let layer = |attention| match attention {
            Some(attention) => TokenMixer::Attention(AttentionLayer::new(attention, rope, eps)),
            None => other.expect("only hybrids have layers without attention"),
        };
        Ok(Decoder {
            width: m.size("embedding_length")?,
            layers: attention.into_iter().map(layer).collect(),
            hidden: hidden_sizes(m, !routings.is_empty())?,
            routings,
            eps,
            acts: vec![Act::Silu; m.layers()?],
            ffn_norm: "ffn_norm",
            norm_before: true,
            norm_after: false,
            embedding_scale: None,
            residual_scale: None,
            output_norm: "output_norm",
        })
    }

    /// The attention of the layers that have it.
    pub(super) fn attention(&mut self) -> impl Iterator<Item = &mut AttentionLayer> {
        self.layers.iter_mut().filter_map(TokenMixer::attention)
    }

    /// Gives layers sliding-window attention of `window` tokens, with an optional RoPE base of
    /// their own and without RoPE scaling.
    pub(super) fn set_sliding_window(&mut self, local: &[bool], window: usize, base: Option<f32>) {
        let layers = self.layers.iter_mut().zip(local).filter(|(_, is_local)| **is_local);
        for layer in layers.filter_map(|(layer, _)| layer.attention()) {
            layer.attention.window = Some(window);
            if let Some(rope) = &mut layer.rope {
                rope.base = base.unwrap_or(rope.base);
                rope.scaling = RopeScaling::None;
            }
        }
    }

    /// Gives layers sliding-window attention of `window` tokens, and the others no rotary embedding
    /// (NoPE).
    pub(super) fn set_sliding_window_and_nope(&mut self, local: &[bool], window: usize) {
        for (layer, is_local) in self.attention().zip(local) {
            match is_local {
                true => layer.attention.window = Some(window),
                false => layer.rope = None,
            }
        }
    }

    /// The whole model, from token embeddings to logits.
    pub(super) fn build(self, g: &mut Builder<'_>) -> Result<Value> {
        let (norm, eps) = (self.output_norm, self.eps);
        let x = self.blocks(g)?;
        g.logits(x, norm, eps, &["output", "token_embd"])
    }

    /// The normed hidden states, of a model without an output head.
    pub(super) fn hidden_states(self, g: &mut Builder<'_>) -> Result<Value> {
        let (norm, eps) = (self.output_norm, self.eps);
        let x = self.blocks(g)?;
        g.leave_blocks().rms_norm(x, norm, eps)
    }

    fn blocks(self, g: &mut Builder<'_>) -> Result<Value> {
        let eps = self.eps;
        let x = g.embed("token_embd", self.width)?;
        let mut x = g.scale(x, self.embedding_scale);
        for (i, (layer, hidden)) in self.layers.into_iter().zip(self.hidden).enumerate() {
            let (b, act) = (g.block(i), self.acts[i]);
            let h = if self.norm_before { b.rms_norm(x, "attn_norm", eps)? } else { x };
            let h = layer.apply(b, h)?;
            let h = if self.norm_after { b.rms_norm(h, "post_attention_norm", eps)? } else { h };
            let h = b.scale(h, self.residual_scale);
            x = b.add(x, h);
            let h = if self.norm_before { b.rms_norm(x, self.ffn_norm, eps)? } else { x };
            let h = match self.routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
                Some(&routing) => b.experts(h, routing, act)?,
                None => b.feed_forward(h, act, hidden)?,
            };
            let h = if self.norm_after { b.rms_norm(h, "post_ffw_norm", eps)? } else { h };
            let h = b.scale(h, self.residual_scale);
            x = b.add(x, h);
        }
        Ok(x)
    }
}

impl TokenMixer {
    fn attention(&mut self) -> Option<&mut AttentionLayer> {
        match self {
            TokenMixer::Attention(layer)
            | TokenMixer::GatedAttention(layer)
            | TokenMixer::AttentionAndMamba(layer, _) => Some(layer),
            TokenMixer::Selective(_)
            | TokenMixer::Mamba(_)
            | TokenMixer::Delta(_)
            | TokenMixer::ShortConv(_) => None,
        }
    }

    fn apply(self, b: &mut Builder<'_>, input: Value) -> Result<Value> {
        match self {
            TokenMixer::Attention(layer) => b.attention(input, layer),
            TokenMixer::GatedAttention(layer) => b.gated_attention(input, layer),
            TokenMixer::Selective(mixer) => b.selective_mixer(input, mixer),
            TokenMixer::Mamba(mixer) => b.mixer(input, mixer),
            TokenMixer::Delta(mixer) => b.delta_mixer(input, mixer),
            TokenMixer::AttentionAndMamba(layer, mixer) => {
                let attended = b.attention(input, layer)?;
                let scanned = b.mixer(input, mixer)?;
                Ok(b.add(attended, scanned))
            }
            TokenMixer::ShortConv(kernel) => b.short_conv(input, kernel),
        }
    }
}
