//! BERT and Nomic BERT: post-norm encoders. Positions are learned embeddings or rotary; the tensors
//! determine gates and experts.

use super::{attention_layers, hidden_sizes, rope, routings};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Attention, Gating};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let (width, eps) = (m.size("embedding_length")?, m.layer_eps()?);
    let attention = attention_layers(m)?;
    let causal = m.bool("attention.causal")?.unwrap_or(false);
    let routings = routings(m, g, Gating::Softmax, false)?;
    let mut x = g.embed("token_embd", width)?;
    if g.has("token_types") {
        let kind = g.first_embed("token_types", width)?;
        x = g.add(x, kind);
    }
    let rope = if m.architecture() == "bert" {
        let position = g.position_embed("position_embd", width, m.context_length()?)?;
        x = g.add(x, position);
        None
    } else {
        Some(rope(m, g, RopeStyle::Neox, attention[0].key_dim)?)
    };
    x = g.layer_norm(x, "token_embd_norm", eps)?;
    let hidden = hidden_sizes(m, !routings.is_empty())?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let attention = Attention { causal, ..attention };
        let h = b.attention(x, AttentionLayer::new(attention, rope, eps))?;
        let h = b.add(h, x);
        x = b.layer_norm(h, "attn_output_norm", eps)?;
        let act = if b.has("ffn_gate") { Act::Silu } else { Act::Gelu };
        let h = match routings.get(i).filter(|_| b.has("ffn_gate_inp")) {
            Some(&routing) => b.experts(x, routing, act)?,
            None => b.feed_forward(x, act, hidden)?,
        };
        let h = b.add(h, x);
        x = b.layer_norm(h, "layer_output_norm", eps)?;
    }
    g.embedding(x, m.pooling()?)
}
