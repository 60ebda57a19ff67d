//! ModernBERT: a pre-norm encoder with rotary positions. Every third layer has global attention,
//! the others attend to half a window on each side.

use bodkin_gguf::quoted;

use super::{attention_layers, hidden_sizes, rope};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Attention};
use crate::pooling::Pooling;
use crate::rope::{Rope, RopeScaling, RopeStyle};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let (width, eps) = (m.size("embedding_length")?, m.layer_eps()?);
    let attention = attention_layers(m)?;
    let act = match m.str("hidden_activation")? {
        None | Some("gelu" | "geglu") => Act::Gelu,
        Some("silu" | "swish" | "swiglu") => Act::Silu,
        Some(other) => {
            let problem = format!("expected gelu or silu, found {}", quoted(other));
            return Err(m.error("hidden_activation", problem));
        }
    };
    let global_rope = rope(m, g, RopeStyle::Neox, attention[0].key_dim)?;
    let base = m.rope_base("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let local_rope = Rope { base, scaling: RopeScaling::None, ..global_rope };
    let (window, local) = (m.sliding_window()?, m.local_layers_after_global(3)?);
    let hidden = hidden_sizes(m, false)?;
    let x = g.embed("token_embd", width)?;
    let mut x = g.layer_norm(x, "token_embd_norm", eps)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let window = window.filter(|_| local[i]);
        let rope = Some(if window.is_some() { local_rope } else { global_rope });
        let attention = Attention { causal: false, window, ..attention };
        // The norm of the embeddings is that of the first block.
        let h = if i > 0 || b.has("attn_norm") { b.layer_norm(x, "attn_norm", eps)? } else { x };
        let h = b.attention(h, AttentionLayer::new(attention, rope, eps))?;
        x = b.add(x, h);
        let h = b.layer_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward(h, act, hidden)?;
        x = b.add(x, h);
    }
    let x = g.leave_blocks().layer_norm(x, "output_norm", eps)?;
    match m.pooling()? {
        Pooling::Rank => Err(m.error("pooling_type", "expected mean, cls or last, found rank")),
        pooling => g.embedding(x, pooling),
    }
}
