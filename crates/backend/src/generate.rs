//! Generation where only the tokens that are chosen are wanted, not logits.

use crate::{Batch, Model, ReferenceSampler, Result, SamplingParams};

/// What [`Model::generate`] does on any backend: a step, a look at its logits, the next step.
///
/// # Errors
/// Those of [`Model::forward`].
///
/// # Panics
/// If there is not a rule for each row.
pub fn generate<M: Model + ?Sized>(
    model: &mut M,
    mut batch: Batch,
    rules: &[SamplingParams],
    steps: usize,
    each: &mut dyn FnMut(&[u32]) -> bool,
) -> Result<()> {
    assert_eq!(rules.len(), batch.outputs.len(), "a rule for each row");
    let width = model.plan().output_width();
    let mut samplers: Vec<ReferenceSampler> = rules.iter().map(ReferenceSampler::new).collect();
    let mut logits = vec![0.0; batch.outputs.len() * width];
    for _ in 0..steps {
        model.forward(&batch, &mut logits)?;
        batch.tokens.clear();
        let rows = logits.chunks_exact_mut(width).zip(&mut samplers);
        batch.tokens.extend(rows.map(|(logits, sampler)| sampler.sample(logits)));
        if !each(&batch.tokens) {
            break;
        }
        batch.spans.iter_mut().for_each(|span| span.position += 1);
    }
    Ok(())
}
