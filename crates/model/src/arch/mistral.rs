//! Ministral 3 and Mistral Small 3: as Llama, with YaRN, and with a temperature of attention by
//! position.

use super::llama::Decoder;
use super::temperature;
use crate::builder::Builder;
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;
use crate::rope::{RopeScaling, RopeStyle, yarn_mscale};

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    let mut decoder = Decoder::new(m, g, RopeStyle::Norm)?;
    let temperature = temperature(m, m.original_context()?)?;
    let name = "rope.scaling.yarn_log_multiplier";
    let growth = m.f32(name)?.filter(|&growth| growth != 0.0);
    for layer in decoder.attention() {
        layer.attention.temperature = temperature;
        let Some(rope) = &mut layer.rope else { continue };
        if let RopeScaling::Yarn { factor, attn_factor, .. } = &mut rope.scaling
            && let Some(growth) = growth.filter(|_| *factor > 1.0)
        {
            let divisor = yarn_mscale(*factor, growth);
            if !(divisor.is_finite() && divisor > 0.0) {
                return Err(m.error(name, format!("expected a small number, found {growth}")));
            }
            *attn_factor /= divisor;
        }
    }
    decoder.build(g)
}
