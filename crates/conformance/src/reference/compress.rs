//! The compression of blocks of tokens of the reference interpreter.

use bodkin_backend::Batch;
use bodkin_model::Compression;

use super::state::StateSlots;

/// The softmax of one column over the tokens so far: maximum, denominator and numerator.
type ColumnSoftmax = [f32; 3];

const EMPTY: ColumnSoftmax = [f32::NEG_INFINITY, 0.0, 0.0];

/// `x` and `scores` are the operands of [`bodkin_model::Op::Compress`]; a slot holds the softmax of
/// each column of the current block, then those for the next one if blocks overlap.
pub(super) fn compress(
    slots: &mut StateSlots,
    batch: &Batch,
    c: Compression,
    [x, scores]: [&[f32]; 2],
) -> Vec<f32> {
    let width = x.len() / batch.tokens.len();
    let mut rows = x.chunks_exact(width).zip(scores.chunks_exact(width));
    let mut out = Vec::with_capacity(batch.tokens.len() * c.dim);
    for span in &batch.spans {
        let (columns, _) = slots.before(span).as_chunks_mut::<3>();
        for position in span.position..span.position + span.len {
            let (x, scores) = rows.next().expect("a row for each token");
            let (current, next) = columns.split_at_mut(c.dim);
            if position.is_multiple_of(c.ratio) {
                match c.overlaps && position > 0 {
                    true => current.copy_from_slice(next),
                    false => current.fill(EMPTY),
                }
                next.fill(EMPTY);
            }
            let own = if c.overlaps { c.dim } else { 0 };
            let add = |softmax: &mut [ColumnSoftmax], first: usize| {
                let terms = scores[first..].iter().zip(&x[first..]);
                softmax.iter_mut().zip(terms).for_each(|(s, (&score, &x))| *s = with(*s, score, x));
            };
            add(current, own);
            add(next, 0);
            let is_last = (position + 1).is_multiple_of(c.ratio);
            let result = |[_, sum, value]: &ColumnSoftmax| if is_last { value / sum } else { 0.0 };
            out.extend(current.iter().map(result));
        }
    }
    out
}

/// A softmax with one token more.
fn with([max, sum, value]: ColumnSoftmax, score: f32, x: f32) -> ColumnSoftmax {
    let new_max = max.max(score);
    let (keep, add) = (f64::from(max - new_max).exp(), f64::from(score - new_max).exp());
    let sum = (f64::from(sum) * keep + add) as f32;
    let value = (f64::from(value) * keep + f64::from(x) * add) as f32;
    [new_max, sum, value]
}
