//! Apertus: as Llama, with NeoX RoPE, QK norms, and an ungated feed-forward network with xIELU, of
//! each layer with parameters of its own.

use super::{attention_layers, hidden_sizes, rope};
use crate::builder::{AttentionLayer, Builder};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Xielu};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let eps = m.rms_eps()?;
    let attention = attention_layers(m)?;
    let rope = Some(rope(m, g, RopeStyle::Neox, attention[0].key_dim)?);
    let (hidden, acts) = (hidden_sizes(m, false)?, xielus(m)?);
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for (i, (attention, hidden)) in attention.into_iter().zip(hidden).enumerate() {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.attention(h, AttentionLayer::new(attention, rope, eps))?;
        x = b.add(x, h);
        let h = b.rms_norm(x, "ffn_norm", eps)?;
        let h = b.feed_forward(h, Act::Xielu(acts[i]), hidden)?;
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}

/// The activation of each layer. The file has what training learned: the softplus of the factors.
fn xielus(m: &HyperParameters<'_>) -> Result<Vec<Xielu>> {
    let layers = m.layers()?;
    let [positive, negative, beta, eps] = ["alpha_p", "alpha_n", "beta", "eps"]
        .map(|name| m.unprefixed_numbers(&format!("xielu.{name}"), layers));
    let (positive, negative, beta, eps) = (positive?, negative?, beta?, eps?);
    let softplus = |x: f32| f64::from(x).exp().ln_1p() as f32;
    let layer = |i: usize| Xielu {
        positive: softplus(positive[i]),
        negative: beta[i] + softplus(negative[i]),
        beta: beta[i],
        eps: eps[i],
    };
    Ok((0..layers).map(layer).collect())
}
