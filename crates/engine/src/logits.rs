//! Logits of a fixed text: what perplexity, parity checks and `bodkin logits` read.

use bodkin_backend::{Model, Observer, are_samplable};

use crate::error::Result;
use crate::nonfinite;
use crate::pages::Pages;
use crate::single_sequence::run_sequence;

/// Runs `tokens` as one new sequence in steps of at most `step` tokens, and calls `each` with the
/// index and the logits (`[vocabulary]`) of every position that `wanted` accepts, in order.
pub fn logits(
    model: &mut dyn Model,
    tokens: &[u32],
    step: usize,
    wanted: impl Fn(usize) -> bool,
    mut each: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let vocabulary = model.plan().output_width();
    steps(model, tokens, step, wanted, None, |positions, rows| {
        let rows = rows.chunks_exact(vocabulary);
        positions.iter().zip(rows).for_each(|(&position, row)| each(position, row));
    })
}

/// As [`logits`], with the positions and the logits of each step together (`[positions,
/// vocabulary]`; there may be none), and with an observer of the matmuls, which may be there to
/// count logits that are not finite: then they are no error.
pub fn steps(
    model: &mut dyn Model,
    tokens: &[u32],
    step: usize,
    wanted: impl Fn(usize) -> bool,
    observer: Option<&mut dyn Observer>,
    mut each: impl FnMut(&[usize], &[f32]),
) -> Result<()> {
    let (width, is_observed) = (model.plan().output_width(), observer.is_some());
    let mut broken = None;
    let pages = &mut Pages::of(model);
    run_sequence(model, pages, tokens, step, wanted, observer, |positions, rows| {
        let mut finite = positions.iter().zip(rows.chunks_exact(width));
        let found = finite.find(|(_, row)| !is_observed && !are_samplable(row));
        match broken.or(found.map(|(&position, _)| position)) {
            None => each(positions, rows),
            position => broken = position,
        }
    })?;
    match broken {
        None => Ok(()),
        Some(position) => Err(nonfinite::error(model, pages, &tokens[..=position])),
    }
}
