//! Hyper-connections of one row: a few dozen scalar weights, and sums of whole streams.

use super::rows::weighted_sum;
use crate::isa::Isa;

/// The most parts of a row that are summed.
const MAX_PARTS: usize = 128;

/// Sums of the parts of a row: `x` is `[parts][n]`, `weights` is `[parts][results]`, and `out` is
/// `[results][n]`.
pub(crate) fn mix(isa: Isa, x: &[f32], weights: &[f32], results: usize, out: &mut [f32]) {
    let parts = weights.len() / results;
    let mut of_result = [0.0; MAX_PARTS];
    for (result, out) in out.chunks_exact_mut(x.len() / parts).enumerate() {
        let weights = weights.iter().skip(result).step_by(results);
        of_result[..parts].iter_mut().zip(weights).for_each(|(to, &weight)| *to = weight);
        weighted_sum(isa, x, &of_result[..parts], out);
    }
}

/// The weights of hyper-connections from a row of the width of `base`.
pub(crate) fn weights(
    x: &[f32],
    [scale, base]: [&[f32]; 2],
    streams: usize,
    (iterations, eps): (usize, f32),
    out: &mut [f32],
) {
    for (i, (out, (&x, &base))) in out.iter_mut().zip(x.iter().zip(base)).enumerate() {
        *out = x * scale[(i / streams).min(2)] + base;
    }
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let (reads, rest) = out.split_at_mut(streams);
    reads.iter_mut().for_each(|x| *x = sigmoid(*x) + eps);
    let (writes, square) = rest.split_at_mut(streams.min(rest.len()));
    writes.iter_mut().for_each(|x| *x = 2.0 * sigmoid(*x));
    for row in square.chunks_exact_mut(streams) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in square.chunks_exact_mut(streams) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for column in 0..streams {
            let sum = square.iter().skip(column).step_by(streams).sum::<f32>() + eps;
            square.iter_mut().skip(column).step_by(streams).for_each(|x| *x /= sum);
        }
    }
}
