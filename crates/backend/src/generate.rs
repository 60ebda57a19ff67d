//! Generation where only the tokens that are chosen are wanted, not logits.

use crate::{Batch, Chooser, Model, Result, Rule};

/// The place of the largest of a row's logits, the first of equals; what is no number is never
/// chosen, and if nothing is left, 0 is.
pub fn likeliest(logits: &[f32]) -> u32 {
    // Independent lanes let the compiler use vectors.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let most = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == most).unwrap_or(0) as u32
}

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
    rules: &[Rule],
    steps: usize,
    each: &mut dyn FnMut(&[u32]) -> bool,
) -> Result<()> {
    assert_eq!(rules.len(), batch.outputs.len(), "a rule for each row");
    let width = model.plan().output_width();
    let mut choosers: Vec<Chooser> = rules.iter().map(Chooser::new).collect();
    let mut logits = vec![0.0; batch.outputs.len() * width];
    for _ in 0..steps {
        model.forward(&batch, &mut logits)?;
        batch.tokens.clear();
        let rows = logits.chunks_exact_mut(width).zip(&mut choosers);
        batch.tokens.extend(rows.map(|(logits, chooser)| chooser.choose(logits)));
        if !each(&batch.tokens) {
            break;
        }
        batch.spans.iter_mut().for_each(|span| span.position += 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_is_the_likeliest() {
        assert_eq!(likeliest(&[0.5, f32::NAN, 2.0, -1.0, 2.0]), 2);
        assert_eq!(likeliest(&[f32::NAN, f32::NEG_INFINITY]), 1);
        assert_eq!(likeliest(&[f32::NAN]), 0);
        // Beyond one vector, and with equals in several.
        let mut many = [-1.0; 40];
        (many[3], many[21], many[22], many[39]) = (f32::NAN, 4.0, 4.0, 4.0);
        assert_eq!(likeliest(&many), 21);
        many[39] = 5.0;
        assert_eq!(likeliest(&many), 39);
    }
}
