//! Hyper-connections of the reference interpreter.

/// Sums of the parts of rows; `widths` are those of `x` and of `weights`.
pub(super) fn mix(x: &[f32], weights: &[f32], widths: [usize; 2], results: usize) -> Vec<f32> {
    let parts = widths[1] / results;
    let n = widths[0] / parts;
    let mut out = Vec::new();
    for (row, weights) in x.chunks_exact(widths[0]).zip(weights.chunks_exact(widths[1])) {
        for result in 0..results {
            out.extend((0..n).map(|column| {
                let term = |part: usize| {
                    f64::from(weights[part * results + result]) * f64::from(row[part * n + column])
                };
                (0..parts).map(term).sum::<f64>() as f32
            }));
        }
    }
    out
}

/// The weights of hyper-connections, as [`bodkin_model::Op::HyperWeights`] says.
pub(super) fn weights(
    x: &[f32],
    [scale, base]: [&[f32]; 2],
    streams: usize,
    iterations: usize,
    eps: f32,
) -> Vec<f32> {
    let eps = f64::from(eps);
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(base.len()) {
        let affine = |i: usize| {
            let part = (i / streams).min(2);
            f64::from(row[i]) * f64::from(scale[part]) + f64::from(base[i])
        };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        out.extend((0..streams).map(|i| (sigmoid(affine(i)) + eps) as f32));
        if row.len() == streams {
            continue;
        }
        out.extend((streams..2 * streams).map(|i| (2.0 * sigmoid(affine(i))) as f32));
        let mut square: Vec<f64> = (2 * streams..row.len()).map(affine).collect();
        for row in square.chunks_exact_mut(streams) {
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter_mut().for_each(|x| *x = (*x - max).exp());
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|x| *x = *x / sum + eps);
        }
        for iteration in 0..iterations {
            if iteration > 0 {
                for row in square.chunks_exact_mut(streams) {
                    let sum = row.iter().sum::<f64>() + eps;
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            }
            for column in 0..streams {
                let sum = square.iter().skip(column).step_by(streams).sum::<f64>() + eps;
                square.iter_mut().skip(column).step_by(streams).for_each(|x| *x /= sum);
            }
        }
        out.extend(square.iter().map(|&x| x as f32));
    }
    out
}
