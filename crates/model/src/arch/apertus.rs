//! Apertus: as Llama, with NeoX RoPE, QK norms, and an ungated feed-forward network with xIELU, of
//! each layer with parameters of its own.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::op::{Act, Xielu};
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    decoder.acts = xielus(m)?.into_iter().map(Act::Xielu).collect();
    decoder.build(g)
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
