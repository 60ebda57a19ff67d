//! Hunyuan, dense and with experts: as Llama, with NeoX RoPE before the QK norms. NTK scaling
//! raises the base of the RoPE.

use super::llama::Decoder;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::RopeStyle;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Neox)?;
    // The converter scales the base itself for models with experts.
    let alpha = m.f32("rope.scaling.alpha")?.filter(|&alpha| alpha > 0.0);
    let alpha = alpha.filter(|_| m.architecture() == "hunyuan-dense");
    for layer in decoder.attention() {
        layer.norm_after_rope = true;
        let dim = layer.attention.key_dim as f32;
        if let (Some(rope), Some(alpha)) = (&mut layer.rope, alpha) {
            rope.base *= alpha.powf(dim / (dim - 2.0));
            if !(rope.base.is_finite() && rope.base > 1.0) {
                let problem = format!("a base of {} is not more than 1", rope.base);
                return Err(m.error("rope.scaling.alpha", problem));
            }
        }
    }
    decoder.build(g)
}
