//! Runs the tokens of one sequence, with nothing beside it.

use std::ops::ControlFlow;

use bodkin_backend::{Batch, Model, Observer, OutputRequest, Step};

use crate::error::{Error, Result};
use crate::pages::{Pages, Sequence};

/// Runs `tokens` as one new sequence, whose pages are free again afterwards: in steps
/// of at most `step` tokens. Calls `each` with the positions that `wanted` accepts and the logits
/// of each step together (`[positions, vocabulary]`; there may be none).
pub(crate) fn run_sequence(
    model: &mut dyn Model,
    pages: &mut Pages,
    tokens: &[u32],
    step: usize,
    wanted: impl Fn(usize) -> bool,
    observer: Option<&mut dyn Observer>,
    each: impl FnMut(&[usize], &[f32]),
) -> Result<()> {
    let mut sequence = pages.unshared();
    let state = (&mut *pages, &mut sequence);
    let result = run_steps(model, state, tokens, step, wanted, observer, each);
    pages.release(sequence);
    result
}

fn run_steps(
    model: &mut dyn Model,
    (pages, sequence): (&mut Pages, &mut Sequence),
    tokens: &[u32],
    step: usize,
    wanted: impl Fn(usize) -> bool,
    mut observer: Option<&mut dyn Observer>,
    mut each: impl FnMut(&[usize], &[f32]),
) -> Result<()> {
    let limits = model.limits().clone();
    let step = step.min(limits.tokens);
    let rows = vec![OutputRequest::Logits; limits.outputs];
    let mut batch = Batch::default();
    let mut from = 0;
    while from < tokens.len() {
        let (len, outputs) = piece(tokens.len() - from, step, limits.outputs, |i| wanted(from + i));
        if !pages.reserve(sequence, len) {
            let limit = pages.longest_sequence();
            return Err(Error::PromptTooLong { tokens: tokens.len(), limit });
        }
        let chunk = &tokens[from..from + len];
        batch.clear();
        batch.push(sequence.span(len, true), chunk);
        batch.outputs = outputs;
        let positions: Vec<usize> = batch.outputs.iter().map(|&row| from + row as usize).collect();
        let observer: Option<&mut dyn Observer> = match &mut observer {
            Some(observer) => Some(&mut **observer),
            None => None,
        };
        let step = Step { batch: &batch, requests: &rows[..positions.len()], steps: 1, observer };
        model.step(step, &mut |output| {
            each(&positions, output.logits);
            ControlFlow::Break(())
        })?;
        pages.advance(sequence, chunk);
        from += len;
    }
    Ok(())
}

/// The length of the next step and the rows whose logits it gives: the largest number of tokens
/// without more wanted rows than a step can give.
fn piece(
    left: usize,
    step: usize,
    outputs_max: usize,
    wanted: impl Fn(usize) -> bool,
) -> (usize, Vec<u32>) {
    let mut outputs = Vec::new();
    for i in 0..left.min(step) {
        if wanted(i) {
            if outputs.len() == outputs_max {
                return (i, outputs);
            }
            outputs.push(i as u32);
        }
    }
    (left.min(step), outputs)
}
