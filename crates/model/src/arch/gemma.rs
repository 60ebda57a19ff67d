//! Gemma 2 and 3: norms before and after each half of a block, local layers with a window
//! between global ones, tied embeddings scaled by the root of the width.

use super::{attention_layers, hidden_sizes};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::keys::Keys;
use crate::plan::{Act, Attention, Value};
use crate::rope::{Rope, RopeScaling, RopeStyle};

pub(super) fn build(m: &Keys<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let width = m.size("embedding_length")?;
    let hidden = hidden_sizes(m)?;
    let variant = Variant::new(m)?;
    let layers = attention_layers(m)?;
    let global = m.rope(RopeStyle::Neox, layers[0].key_dim, None)?;
    let local = variant.local_rope(global);

    let x = g.embed("token_embd", width)?;
    let mut x = g.scale(x, (width as f32).sqrt());
    for (i, attention) in layers.into_iter().enumerate() {
        let is_local = i % variant.period < variant.period - 1;
        let window = variant.window.filter(|_| is_local);
        let rope = Some(if is_local { local } else { global });
        let scale = variant.scale(width, &attention);
        let attention = Attention { window, scale, softcap: variant.attention_softcap, ..attention };

        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, AttentionLayer { attention, rope, eps })?;
        let h = b.rms_norm(h, "post_attention_norm", eps)?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward(h, Act::GeluTanh, hidden[i])?;
        let h = b.rms_norm(h, "post_ffw_norm", eps)?;
        x = b.add(x, h);
    }
    let x = g.logits(x, "output_norm", eps, &["output", "token_embd"])?;
    Ok(g.softcap(x, variant.logit_softcap))
}

/// In what the generations differ.
struct Variant {
    /// One layer in so many is global, the last of each run.
    period: usize,
    window: Option<usize>,
    attention_softcap: Option<f32>,
    logit_softcap: Option<f32>,
    /// The base of the local layers' rotation, if they have one of their own.
    local_base: Option<f32>,
    /// The 27B models scale queries by the width per head and not by the head's own.
    scale_by_width: bool,
}

impl Variant {
    fn new(m: &Keys<'_>) -> Result<Variant> {
        let attention_softcap = m.f32("attn_logit_softcapping")?;
        let logit_softcap = m.f32("final_logit_softcapping")?;
        let (window, layers) = (m.sliding_window()?, m.layers()?);
        let period = m.u32("attention.sliding_window_pattern");
        if m.architecture() == "gemma2" {
            return Ok(Variant {
                period: 2,
                window: Some(window.unwrap_or(4096)),
                attention_softcap: Some(attention_softcap.unwrap_or(50.0)),
                logit_softcap: Some(logit_softcap.unwrap_or(30.0)),
                local_base: None,
                scale_by_width: layers == 46,
            });
        }
        Ok(Variant {
            period: period?.filter(|&p| p > 0).unwrap_or(6) as usize,
            window,
            attention_softcap,
            logit_softcap,
            local_base: Some(m.f32("rope.freq_base_swa")?.unwrap_or(10_000.0)),
            scale_by_width: layers == 62,
        })
    }

    /// Context extension applies to the global layers only.
    fn local_rope(&self, global: Rope) -> Rope {
        match self.local_base {
            Some(base) => Rope { base, scaling: RopeScaling::None, ..global },
            None => global,
        }
    }

    fn scale(&self, width: usize, a: &Attention) -> f32 {
        let dim = if self.scale_by_width { width / a.heads } else { a.key_dim };
        1.0 / (dim as f32).sqrt()
    }
}
