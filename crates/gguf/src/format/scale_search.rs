//! The search for quantisation scales and minima that minimise the weighted squared error of a
//! group of values, and for their own quantised steps. It must not know how codes are packed.

use super::block::{Block, scale, stored_scale};

/// Candidate scales on either side of the one that fits the largest value.
const CANDIDATES: i32 = 9;

/// The inverse of a scale; 0 for a scale of 0, so that every value gets the code nearest to 0.
pub(super) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The value of largest magnitude, with its sign.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &value| if value.abs() > best.abs() { value } else { best })
}

/// Clamps a value to a range and rounds it to the nearest integer, ties to even.
pub(super) fn nearest(value: f32, low: f32, high: f32) -> f32 {
    // 1.5 * 2^23: floats of this size are integers, so the addition rounds. Baseline x86-64 has no
    // rounding instruction, and this function dominates the time of quantisation.
    const ROUNDING: f32 = 12_582_912.0;
    value.max(low).min(high) + ROUNDING - ROUNDING
}

/// [`nearest`] as a code.
pub(super) fn round(value: f32, low: i8, high: i8) -> i8 {
    nearest(value, f32::from(low), f32::from(high)) as i8
}

/// The index of the entry of an ascending codebook that is nearest to a value, given the midpoints
/// between neighbouring entries.
pub(super) fn nearest_index<const N: usize>(midpoints: &[f32; N], value: f32) -> u8 {
    midpoints.iter().map(|&midpoint| u8::from(value > midpoint)).sum()
}

/// Partial sums of a sum, for SIMD. The length of a run is a multiple of it.
const LANES: usize = 8;

/// Values and the weights of their squared errors, of equal length.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    /// The values to quantise.
    pub(super) values: &'a [f32],
    /// Not negative.
    pub(super) weights: &'a [f32],
}

impl<'a> Run<'a> {
    /// Consecutive runs of `len` values.
    fn chunks(self, len: usize) -> impl Iterator<Item = Run<'a>> {
        let chunks = self.values.chunks_exact(len).zip(self.weights.chunks_exact(len));
        chunks.map(|(values, weights)| Run { values, weights })
    }

    /// The sums over all values of the `N` results of `terms(value, weight)`.
    fn sums<const N: usize>(self, terms: impl Fn(f32, f32) -> [f32; N]) -> [f32; N] {
        let mut sums = [[0.0; LANES]; N];
        let (values, _) = self.values.as_chunks::<LANES>();
        let (weights, _) = self.weights.as_chunks::<LANES>();
        for (values, weights) in values.iter().zip(weights) {
            for lane in 0..LANES {
                let terms = terms(values[lane], weights[lane]);
                for (sum, term) in sums.iter_mut().zip(terms) {
                    sum[lane] += term;
                }
            }
        }
        sums.map(|lanes| lanes.iter().sum())
    }

    /// The weighted squared error if `quantized` returns the dequantised code of a value.
    pub(super) fn loss(self, quantized: impl Fn(f32) -> f32) -> f32 {
        let [loss] = self.sums(|x, w| {
            let error = x - quantized(x);
            [w * error * error]
        });
        loss
    }
}

/// The weighted squared error of a quantised block.
pub(super) fn block_loss<B: Block>(block: &B, run: Run) -> f32 {
    let mut stored = [0.0; 256];
    let stored = &mut stored[..run.values.len()];
    block.dequantize(stored);
    let errors = run.values.iter().zip(stored).map(|(value, stored)| value - *stored);
    errors.zip(run.weights).map(|(error, weight)| weight * error * error).sum()
}

/// The best scale `s` of `s * q` for codes from `-half` to `half - 1`. It may be negative: the
/// value of largest magnitude takes the side with one more code.
pub(super) fn symmetric_scale(run: Run, half: i8) -> f32 {
    let lowest = -f32::from(half);
    best_scale(run, lowest, 0.1, |value| nearest(value, lowest, -lowest - 1.0))
}

/// The loss with this scale and codes from `-half` to `half - 1`.
fn symmetric_loss(run: Run, scale: f32, half: i8) -> f32 {
    let (inverse, lowest) = (inverse(scale), -f32::from(half));
    run.loss(|value| scale * nearest(value * inverse, lowest, -lowest - 1.0))
}

/// Tries scales that map the value of largest magnitude to `target` and to points `step` apart
/// around it. For each, `level` quantises the scaled values and least squares refits the scale: for
/// levels `l` of values `x` it is `xl / ll`, with the loss `xx - xl * xl / ll`.
pub(super) fn best_scale(run: Run, target: f32, step: f32, level: impl Fn(f32) -> f32) -> f32 {
    let largest = largest(run.values);
    let mut best = (0.0, 0.0);
    for tried in -CANDIDATES..=CANDIDATES {
        let inverse = inverse(largest / (target + step * tried as f32));
        let [xl, ll] = run.sums(|x, w| {
            let level = level(x * inverse);
            [w * x * level, w * level * level]
        });
        // Divided first, so that squares of tiny values do not underflow.
        let gain = if ll > 0.0 { xl / ll * xl } else { 0.0 };
        if gain > best.0 {
            best = (gain, xl / ll);
        }
    }
    best.1
}

/// The sign that the lowest representable value may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lowest {
    /// Zero or negative.
    NotPositive,
    /// Any sign.
    Free,
}

/// The best scale `s`, which is not negative, and minimum `m` of `s * q - m` for codes from 0 to
/// `top`.
pub(super) fn affine(run: Run, top: i8, lowest: Lowest) -> (f32, f32) {
    let from = if lowest == Lowest::Free { f32::INFINITY } else { 0.0 };
    let low = run.values.iter().copied().fold(from, f32::min);
    let high = run.values.iter().copied().fold(low, f32::max);
    if high <= low {
        return (0.0, -low);
    }
    let mut best = Line { scale: 0.0, minimum: -low, gain: f32::NEG_INFINITY };
    for tried in -CANDIDATES..=CANDIDATES {
        let inverse = inverse((high - low) / (f32::from(top) + 0.1 * tried as f32));
        let code = |value| nearest((value - low) * inverse, 0.0, f32::from(top));
        let line = line(run, code, lowest);
        if line.gain > best.gain {
            best = line;
        }
    }
    (best.scale, best.minimum)
}

/// The loss with this scale and minimum and codes from 0 to `top`.
pub(super) fn affine_loss(run: Run, scale: f32, minimum: f32, top: i8) -> f32 {
    let inverse = inverse(scale);
    let top = f32::from(top);
    run.loss(|x| scale * nearest((x + minimum) * inverse, 0.0, top) - minimum)
}

/// A line `scale * q - minimum`. Its gain is the loss of all zeros less its own loss.
struct Line {
    scale: f32,
    minimum: f32,
    gain: f32,
}

/// The weighted least-squares line through the values, given their codes.
fn line(run: Run, code: impl Fn(f32) -> f32, lowest: Lowest) -> Line {
    let [n, sum_q, sum_qq, sum_x, sum_xq] = run.sums(|x, w| {
        let q = code(x);
        let (wq, wx) = (w * q, w * x);
        [w, wq, wq * q, wx, wx * q]
    });
    let determinant = n * sum_qq - sum_q * sum_q;
    if determinant > 0.0 {
        let scale = (n * sum_xq - sum_x * sum_q) / determinant;
        let minimum = (scale * sum_q - sum_x) / n;
        if (lowest == Lowest::Free || minimum >= 0.0) && scale > 0.0 {
            return Line { scale, minimum, gain: scale * sum_xq - minimum * sum_x };
        }
    }
    let scale = if sum_qq > 0.0 { (sum_xq / sum_qq).max(0.0) } else { 0.0 };
    Line { scale, minimum: 0.0, gain: scale * sum_xq }
}

/// Quantised scales and minima of the groups of a block.
pub(super) struct Groups<const N: usize> {
    /// Scale of the scales, f16.
    pub(super) d: [u8; 2],
    /// Scale of the minima, f16.
    pub(super) dmin: [u8; 2],
    /// Scale and minimum of each group, in multiples of `d` and `dmin`.
    pub(super) steps: [(u8, u8); N],
}

/// Fits scale and minimum to each of `N` groups of a block, for codes from 0 to `top`, and
/// quantises them to steps from 0 to `max_step`.
pub(super) fn groups<const N: usize>(run: Run, top: i8, max_step: i8) -> Groups<N> {
    let runs = || run.chunks(run.values.len() / N);
    let mut fits = [(0.0f32, 0.0f32); N];
    for (fit, run) in fits.iter_mut().zip(runs()) {
        *fit = affine(run, top, Lowest::NotPositive);
    }
    let largest = fits.iter().fold((0f32, 0f32), |l, f| (l.0.max(f.0), l.1.max(f.1)));
    let d = stored_scale(largest.0 / f32::from(max_step));
    let dmin = stored_scale(largest.1 / f32::from(max_step));
    let mut groups = Groups { d, dmin, steps: [(0, 0); N] };
    for ((steps, fit), run) in groups.steps.iter_mut().zip(fits).zip(runs()) {
        *steps = best_steps(run, fit, (scale(d), scale(dmin)), top, max_step);
    }
    groups
}

/// The steps of least loss near a fitted scale and minimum. Rounding each of the two is seldom
/// best, because other steps imply other codes.
fn best_steps(run: Run, fit: (f32, f32), (d, dmin): (f32, f32), top: i8, max_step: i8) -> (u8, u8) {
    let near = |fit: f32, d: f32| {
        let rounded = round(fit * inverse(d), 0, max_step);
        [-1, 0, 1].map(|step| (rounded + step).clamp(0, max_step) as u8)
    };
    let (mut best, mut least) = ((0, 0), f32::INFINITY);
    for sc in near(fit.0, d) {
        for m in near(fit.1, dmin) {
            let loss = affine_loss(run, d * f32::from(sc), dmin * f32::from(m), top);
            if loss < least {
                (best, least) = ((sc, m), loss);
            }
        }
    }
    best
}

impl<const N: usize> Groups<N> {
    /// The nearest codes, 0 to `top`, of the values of the block.
    pub(super) fn codes<'a>(&'a self, values: &'a [f32], top: i8) -> impl Iterator<Item = u8> + 'a {
        let (d, dmin) = (scale(self.d), scale(self.dmin));
        let runs = values.chunks_exact(values.len() / N);
        self.steps.iter().zip(runs).flat_map(move |(&(sc, m), run)| {
            let (inverse, minimum) = (inverse(d * f32::from(sc)), dmin * f32::from(m));
            run.iter().map(move |value| round((value + minimum) * inverse, 0, top) as u8)
        })
    }
}

/// Quantised scales of the `N` groups of a block.
pub(super) struct Scales<const N: usize> {
    /// Scale of the scales, f16.
    pub(super) d: [u8; 2],
    /// Scale of each group, in multiples of `d`.
    pub(super) steps: [i8; N],
}

/// The steps of quantised scales, and the search among them.
pub(super) struct Steps {
    /// The lowest step, negative; the highest is `-lowest - 1`.
    pub(super) lowest: i8,
    /// The search tries steps up to this far from the rounded fit.
    pub(super) radius: i8,
}

/// Finds the quantised scale of each of `N` groups of a block: `fit` returns the best scale of a
/// group, `loss` the loss of a group with a scale.
pub(super) fn scales<const N: usize>(
    run: Run,
    Steps { lowest, radius }: Steps,
    fit: impl Fn(Run) -> f32,
    loss: impl Fn(Run, f32) -> f32,
) -> Scales<N> {
    let runs = || run.chunks(run.values.len() / N);
    let mut fits = [0.0; N];
    for (group, run) in fits.iter_mut().zip(runs()) {
        *group = fit(run);
    }
    let stored = stored_scale(largest(&fits) / f32::from(lowest));
    let d = scale(stored);
    let highest = -(lowest + 1);
    let mut scales = Scales { d: stored, steps: [0; N] };
    for ((step, fit), run) in scales.steps.iter_mut().zip(fits).zip(runs()) {
        // The rounded fit is seldom the best step: other steps imply other codes.
        let rounded = round(fit * inverse(d), lowest, highest);
        let (first, last) = (rounded.saturating_sub(radius), rounded.saturating_add(radius));
        let tried = first.max(lowest)..=last.min(highest);
        let losses = tried.map(|tried| (loss(run, d * f32::from(tried)), tried));
        *step = losses.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(rounded, |(_, step)| step);
    }
    scales
}

/// [`scales`] of 16 groups for codes from `-half` to `half - 1`.
pub(super) fn symmetric_scales(run: Run, half: i8, steps: Steps) -> Scales<16> {
    let fit = |run: Run| symmetric_scale(run, half);
    scales(run, steps, fit, |run, scale| symmetric_loss(run, scale, half))
}

impl<const N: usize> Scales<N> {
    /// The inverse of each group's scale.
    pub(super) fn inverses(&self) -> [f32; N] {
        let d = scale(self.d);
        self.steps.map(|step| inverse(d * f32::from(step)))
    }

    /// The nearest codes of the values of the block, from `-half` to `half - 1`, plus `half`.
    pub(super) fn codes(&self, values: &[f32], half: i8) -> impl Iterator<Item = u8> {
        let runs = values.chunks_exact(values.len() / N);
        self.inverses().into_iter().zip(runs).flat_map(move |(inverse, run)| {
            run.iter().map(move |x| (round(x * inverse, -half, half - 1) + half) as u8)
        })
    }
}
