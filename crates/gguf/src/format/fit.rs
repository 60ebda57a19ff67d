//! Searches for the scale, or the scale and minimum, with which a run of values loses least when it
//! is stored in few bits, and for steps in which to store these. The loss is the squared error. It
//! must not know how codes are packed.

use super::{Block, scale, stored_scale};

/// How many scales are tried on either side of the plain one.
const STEPS: i32 = 9;

/// The inverse of a scale; 0 for a scale of 0, so that everything becomes the code nearest to 0.
pub(super) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The value that is farthest from zero, with its sign.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &value| if value.abs() > best.abs() { value } else { best })
}

/// Rounds to the nearest code in a range, and halves to even.
pub(super) fn round(value: f32, low: i8, high: i8) -> i8 {
    // Floats of this size are whole numbers, so that adding it rounds. Baseline x86-64 has no
    // instruction for rounding, and quantising is mostly this.
    const WHOLE: f32 = 12_582_912.0;
    let clamped = value.clamp(f32::from(low), f32::from(high));
    (clamped + WHOLE - WHOLE) as i8
}

/// How many of the borders between neighbouring levels a value lies above: the place of the level
/// that is nearest to it, where levels are in order.
pub(super) fn place<const N: usize>(borders: &[f32; N], value: f32) -> u8 {
    borders.iter().map(|&border| u8::from(value > border)).sum()
}

/// What storing the values in this block loses.
pub(super) fn squared_error<B: Block>(block: &B, values: &[f32]) -> f32 {
    let mut stored = [0.0; 256];
    let stored = &mut stored[..values.len()];
    block.dequantize(stored);
    values.iter().zip(stored).map(|(value, stored)| (value - *stored).powi(2)).sum()
}

/// The scale `s` for which `s * q`, with codes from `-count` to `count - 1`, is nearest to the
/// values. It may be negative: the largest value takes the side that has one code more.
pub(super) fn symmetric_scale(values: &[f32], count: i8) -> f32 {
    let side = -f32::from(count);
    best_scale(values, side, 0.1, |value| f32::from(round(value, -count, count - 1)))
}

/// What is lost with this scale and codes from `-count` to `count - 1`.
pub(super) fn symmetric_error(values: &[f32], scale: f32, count: i8) -> f32 {
    let inverse = inverse(scale);
    let stored = |value: f32| scale * f32::from(round(value * inverse, -count, count - 1));
    values.iter().map(|&value| (value - stored(value)).powi(2)).sum()
}

/// Tries to put the largest value at `side` and at places `step` apart around it, lets `level` say
/// what each value would be stored as, and takes the scale that fits these levels best. With the
/// best scale for given levels, `xl / ll`, the squared error is `xx - xl * xl / ll`.
pub(super) fn best_scale(values: &[f32], side: f32, step: f32, level: impl Fn(f32) -> f32) -> f32 {
    let largest = largest(values);
    let mut best = (0.0, 0.0);
    for tried in -STEPS..=STEPS {
        let inverse = inverse(largest / (side + step * tried as f32));
        let (mut xl, mut ll) = (0.0, 0.0);
        for &value in values {
            let level = level(value * inverse);
            xl += value * level;
            ll += level * level;
        }
        // Divided first, so that squares of tiny values do not vanish.
        let gain = if ll > 0.0 { xl / ll * xl } else { 0.0 };
        if gain > best.0 {
            best = (gain, xl / ll);
        }
    }
    best.1
}

/// The scale `s` and minimum `m`, neither negative, for which `s * q - m`, with codes from 0 to
/// `top`, is nearest to the values.
pub(super) fn affine(values: &[f32], top: i8) -> (f32, f32) {
    let low = values.iter().copied().fold(0.0, f32::min);
    let high = values.iter().copied().fold(low, f32::max);
    if high == low {
        return (0.0, -low);
    }
    let mut best = Line { scale: 0.0, minimum: -low, gain: f32::NEG_INFINITY };
    for tried in -STEPS..=STEPS {
        let inverse = inverse((high - low) / (f32::from(top) + 0.1 * tried as f32));
        let line = line(values, |value| f32::from(round((value - low) * inverse, 0, top)));
        if line.gain > best.gain {
            best = line;
        }
    }
    (best.scale, best.minimum)
}

/// What is lost with this scale and minimum and codes from 0 to `top`.
pub(super) fn affine_error(values: &[f32], scale: f32, minimum: f32, top: i8) -> f32 {
    let inverse = inverse(scale);
    let stored = |x: f32| scale * f32::from(round((x + minimum) * inverse, 0, top)) - minimum;
    values.iter().map(|&x| (x - stored(x)).powi(2)).sum()
}

/// A line `scale * q - minimum` and by how much it is nearer to the values, in squares, than zero.
struct Line {
    scale: f32,
    minimum: f32,
    gain: f32,
}

/// The line that fits the values best in squares, given their codes, with a minimum that is not
/// negative.
fn line(values: &[f32], code: impl Fn(f32) -> f32) -> Line {
    let n = values.len() as f32;
    let (mut sum_q, mut sum_qq, mut sum_x, mut sum_xq) = (0.0, 0.0, 0.0, 0.0);
    for &x in values {
        let q = code(x);
        (sum_q, sum_qq) = (sum_q + q, sum_qq + q * q);
        (sum_x, sum_xq) = (sum_x + x, sum_xq + x * q);
    }
    let determinant = n * sum_qq - sum_q * sum_q;
    if determinant > 0.0 {
        let scale = (n * sum_xq - sum_x * sum_q) / determinant;
        let minimum = (scale * sum_q - sum_x) / n;
        if minimum >= 0.0 && scale > 0.0 {
            return Line { scale, minimum, gain: scale * sum_xq - minimum * sum_x };
        }
    }
    let scale = if sum_qq > 0.0 { (sum_xq / sum_qq).max(0.0) } else { 0.0 };
    Line { scale, minimum: 0.0, gain: scale * sum_xq }
}

/// Scales and minima of the groups of a block, in steps of one scale for each of both.
pub(super) struct Groups<const N: usize> {
    /// Scale of the scales, f16.
    pub(super) d: [u8; 2],
    /// Scale of the minima, f16.
    pub(super) dmin: [u8; 2],
    /// Scale and minimum of each group, in steps.
    pub(super) steps: [(u8, u8); N],
}

/// Fits scale and minimum to each of `N` groups of a block, for codes from 0 to `top`, and stores
/// them in steps from 0 to `max_step`.
pub(super) fn groups<const N: usize>(values: &[f32], top: i8, max_step: i8) -> Groups<N> {
    let runs = || values.chunks_exact(values.len() / N);
    let mut fits = [(0.0f32, 0.0f32); N];
    for (fit, run) in fits.iter_mut().zip(runs()) {
        *fit = affine(run, top);
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

/// The steps, near those of a fitted scale and minimum, that lose least. Rounding the two one by
/// one is seldom best, because other codes suit other steps.
fn best_steps(
    values: &[f32],
    fit: (f32, f32),
    (d, dmin): (f32, f32),
    top: i8,
    max_step: i8,
) -> (u8, u8) {
    let near = |fit: f32, d: f32| {
        let rounded = round(fit * inverse(d), 0, max_step);
        [-1, 0, 1].map(|step| (rounded + step).clamp(0, max_step) as u8)
    };
    let (mut best, mut least) = ((0, 0), f32::INFINITY);
    for sc in near(fit.0, d) {
        for m in near(fit.1, dmin) {
            let loss = affine_error(values, d * f32::from(sc), dmin * f32::from(m), top);
            if loss < least {
                (best, least) = ((sc, m), loss);
            }
        }
    }
    best
}

impl<const N: usize> Groups<N> {
    /// The codes, 0 to `top`, with which the values of the block are stored nearest.
    pub(super) fn codes<'a>(&'a self, values: &'a [f32], top: i8) -> impl Iterator<Item = u8> + 'a {
        let (d, dmin) = (scale(self.d), scale(self.dmin));
        let runs = values.chunks_exact(values.len() / N);
        self.steps.iter().zip(runs).flat_map(move |(&(sc, m), run)| {
            let (inverse, minimum) = (inverse(d * f32::from(sc)), dmin * f32::from(m));
            run.iter().map(move |value| round((value + minimum) * inverse, 0, top) as u8)
        })
    }
}

/// A scale for each of 16 groups of a block, in steps of one scale.
pub(super) struct Scales {
    /// Scale of the scales, f16.
    pub(super) d: [u8; 2],
    /// Scale of each group, in steps.
    pub(super) steps: [i8; 16],
    /// Codes reach from `-count` to `count - 1`.
    count: i8,
}

/// Fits a scale to each of 16 groups of a block, for codes from `-count` to `count - 1`, and stores
/// them in steps from `min_step` to `-min_step - 1`. Steps up to `reach` away from the fit are
/// tried.
pub(super) fn scales(values: &[f32], count: i8, min_step: i8, reach: i8) -> Scales {
    let mut fits = [0.0; 16];
    for (fit, run) in fits.iter_mut().zip(values.chunks_exact(16)) {
        *fit = symmetric_scale(run, count);
    }
    let stored = stored_scale(largest(&fits) / f32::from(min_step));
    let d = scale(stored);
    let (low, high) = (min_step, -(min_step + 1));
    let mut scales = Scales { d: stored, steps: [0; 16], count };
    for ((step, fit), run) in scales.steps.iter_mut().zip(fits).zip(values.chunks_exact(16)) {
        // The fit rounded to a step is seldom the best step: other codes suit another one.
        let rounded = round(fit * inverse(d), low, high);
        let (first, last) = (rounded.saturating_sub(reach), rounded.saturating_add(reach));
        let tried = first.max(low)..=last.min(high);
        let losses = tried.map(|tried| (symmetric_error(run, d * f32::from(tried), count), tried));
        *step = losses.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(rounded, |(_, step)| step);
    }
    scales
}

impl Scales {
    /// The codes, moved up to begin at 0, with which the values of the block are stored nearest.
    pub(super) fn codes<'a>(&'a self, values: &'a [f32]) -> impl Iterator<Item = u8> + 'a {
        let (d, count) = (scale(self.d), self.count);
        self.steps.iter().zip(values.chunks_exact(16)).flat_map(move |(&step, run)| {
            let inverse = inverse(d * f32::from(step));
            run.iter().map(move |x| (round(x * inverse, -count, count - 1) + count) as u8)
        })
    }
}
