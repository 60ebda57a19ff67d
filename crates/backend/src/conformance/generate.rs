//! Generation: the tokens of [`crate::Model::generate`] are those that logits say, also where it
//! was ended and went on.

use super::case::Case;
use super::feed::{Pages, Sequence};
use super::{load, state};
use crate::error::Result;
use crate::{Backend, Batch, Span};

const STEPS: usize = 7;

/// Checks plans with keys and values, and with recurrent state.
pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    for case in state::cases() {
        let name = case.name.clone();
        let found = tokens(backend, &case, true).and_then(|found| {
            let wanted = tokens(backend, &case, false)?;
            Ok((found, wanted))
        });
        match found {
            Ok((found, wanted)) if found == wanted => {}
            Ok((found, wanted)) => {
                failures.push(format!("{name}: generated {found:?}, logits say {wanted:?}"));
            }
            Err(error) => failures.push(format!("{name}: generation: {error}")),
        }
    }
}

/// What two sequences generate after prompts: by the backend, with an end after some steps, or from
/// logits.
fn tokens(backend: &dyn Backend, case: &Case, is_own: bool) -> Result<Vec<u32>> {
    let mut model = load(backend, case)?;
    let mut pages = Pages::new(model.as_ref(), false);
    let mut sequences = [pages.start(0), pages.start(0)];
    let mut prompts = Batch::default();
    for (sequence, tokens) in sequences.iter_mut().zip(case.tokens.chunks(5)) {
        pages.append(sequence, tokens, &mut prompts);
        prompts.outputs.push(prompts.tokens.len() as u32 - 1);
    }
    let mut logits = vec![0.0; 2 * case.plan.output_width()];
    model.forward(&prompts, &mut logits)?;
    let mut batch = first_step(&mut pages, &mut sequences, &case.tokens[10..12]);
    let mut found = Vec::new();
    if !is_own {
        crate::generate(model.as_mut(), batch, STEPS, &mut |chosen| {
            found.extend(chosen);
            true
        })?;
        return Ok(found);
    }
    let ended = 3;
    model.generate(batch.clone(), STEPS, &mut |chosen| {
        found.extend(chosen);
        found.len() < 2 * ended
    })?;
    batch.tokens = found[2 * ended - 2..].to_vec();
    batch.spans.iter_mut().for_each(|span| span.position += ended);
    model.generate(batch, STEPS - ended, &mut |chosen| {
        found.extend(chosen);
        true
    })?;
    Ok(found)
}

/// A step of one token of each sequence, with pages for all steps.
fn first_step(pages: &mut Pages, sequences: &mut [Sequence; 2], tokens: &[u32]) -> Batch {
    let mut all = Batch::default();
    let positions = sequences.each_ref().map(|sequence| sequence.position);
    for sequence in sequences {
        pages.append(sequence, &[0; STEPS], &mut all);
    }
    let spans = all.spans.into_iter().zip(positions);
    let spans = spans.map(|(span, position)| Span { len: 1, position, ..span }).collect();
    Batch { tokens: tokens.to_vec(), spans, outputs: vec![0, 1] }
}
