//! Gemma 1, 2, 3 and EmbeddingGemma: tied embeddings scaled by the root of the width. Gemma 2 and 3
//! add post-norms and alternate sliding-window and global layers. EmbeddingGemma is a Gemma 3
//! without causality, whose pooled states may pass through two more matmuls.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::Act;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    let variant = Variant::new(m)?;
    let width = decoder.width as f32;
    decoder.acts.fill(Act::GeluTanh);
    decoder.embedding_scale = Some(width.sqrt());
    decoder.norm_after = variant.norm_after;
    for layer in decoder.attention() {
        let attention = &mut layer.attention;
        attention.softcap = variant.attention_softcap;
        if variant.scale_by_width {
            attention.scale = (attention.heads as f32 / width).sqrt();
        }
    }
    if let Some(window) = variant.window {
        let local = m.local_layers(variant.period)?;
        decoder.set_sliding_window(&local, window, variant.local_base);
    }
    if m.architecture() == "gemma-embedding" {
        return embedding(m, g, decoder);
    }
    let logits = decoder.build(g)?;
    Ok(g.softcap(logits, variant.logit_softcap))
}

/// EmbeddingGemma's end.
fn embedding(m: &HyperParameters<'_>, g: &mut Builder<'_>, mut decoder: Decoder) -> Result<Value> {
    decoder.attention().for_each(|layer| layer.attention.causal = false);
    let x = decoder.hidden_states(g)?;
    let x = g.embedding_projections(x)?;
    g.embedding(x, m.pooling()?)
}

/// The differences between the generations.
#[derive(Default)]
struct Variant {
    norm_after: bool,
    /// The tokens of the sliding window.
    window: Option<usize>,
    /// The period of global layers, unless the file lists them.
    period: usize,
    /// The RoPE base of sliding-window layers, if different.
    local_base: Option<f32>,
    attention_softcap: Option<f32>,
    logit_softcap: Option<f32>,
    /// Whether queries are scaled by the model's width per head, as in the 27B models, instead of
    /// the head's width.
    scale_by_width: bool,
}

impl Variant {
    fn new(m: &HyperParameters<'_>) -> Result<Variant> {
        let attention_softcap = m.cap("attn_logit_softcapping")?;
        let logit_softcap = m.cap("final_logit_softcapping")?;
        let (window, layers) = (m.sliding_window()?, m.layers()?);
        let local_base = m.rope_base("rope.freq_base_swa")?;
        Ok(match m.architecture() {
            "gemma" => Variant::default(),
            "gemma2" => Variant {
                norm_after: true,
                window: Some(window.unwrap_or(4096)),
                period: 2,
                local_base,
                attention_softcap: Some(attention_softcap.unwrap_or(50.0)),
                logit_softcap: Some(logit_softcap.unwrap_or(30.0)),
                scale_by_width: layers == 46,
            },
            _ => Variant {
                norm_after: true,
                window,
                period: 6,
                local_base: Some(local_base.unwrap_or(10_000.0)),
                attention_softcap,
                logit_softcap,
                scale_by_width: layers == 62 && m.architecture() == "gemma3",
            },
        })
    }
}
