//! Mamba 2: blocks of one mixer each, no attention and no feed-forward layers.

use crate::builder::{Builder, MambaMixer};
use crate::error::Result;
use crate::hyperparameters::HyperParameters;
use crate::ids::Value;

pub(super) fn build(m: &HyperParameters<'_>, g: &mut Builder<'_>) -> Result<Value> {
    m.ignore(&["attention.head_count", "feed_forward_length"]);
    let (eps, layers) = (m.rms_eps()?, m.layers()?);
    let mixer = MambaMixer::new(m, eps)?;
    let mut x = g.embed("token_embd", m.size("embedding_length")?)?;
    for i in 0..layers {
        let b = g.block(i);
        let h = b.rms_norm(x, "attn_norm", eps)?;
        let h = b.mixer(h, mixer)?;
        x = b.add(x, h);
    }
    g.logits(x, "output_norm", eps, &["output", "token_embd"])
}
