//! Searches for the scale, or the scale and minimum, with which a run of values loses least when it
//! is stored in few bits, and for steps in which to store these. The loss is the squared error of
//! each value times its weight. It must not know how codes are packed.

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

/// The whole number in a range that is nearest to a value; of two the even one.
pub(super) fn nearest(value: f32, low: f32, high: f32) -> f32 {
    // Floats of this size are whole numbers, so that adding it rounds. Baseline x86-64 has no
    // instruction for rounding, and quantising is mostly this.
    const WHOLE: f32 = 12_582_912.0;
    value.max(low).min(high) + WHOLE - WHOLE
}

/// [`nearest`] as a code.
pub(super) fn round(value: f32, low: i8, high: i8) -> i8 {
    nearest(value, f32::from(low), f32::from(high)) as i8
}

/// How many of the borders between neighbouring levels a value lies above: the place of the level
/// that is nearest to it, where levels are in order.
pub(super) fn place<const N: usize>(borders: &[f32; N], value: f32) -> u8 {
    borders.iter().map(|&border| u8::from(value > border)).sum()
}

/// Sums are made in as many parts, so that several values are added at a time. Runs have a multiple
/// of it.
const LANES: usize = 8;

/// Values and how much the squared error of each of them counts; as many of both.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    /// What is to be stored.
    pub(super) values: &'a [f32],
    /// Not negative.
    pub(super) weights: &'a [f32],
}

impl<'a> Run<'a> {
    /// Runs of `len` that follow one another.
    fn chunks(self, len: usize) -> impl Iterator<Item = Run<'a>> {
        let chunks = self.values.chunks_exact(len).zip(self.weights.chunks_exact(len));
        chunks.map(|(values, weights)| Run { values, weights })
    }

    /// Sums over all values of the `N` terms that `terms` makes of a value and its weight.
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

    /// What is lost if `stored` says what becomes of a value.
    pub(super) fn loss(self, stored: impl Fn(f32) -> f32) -> f32 {
        let [loss] = self.sums(|x, w| {
            let error = x - stored(x);
            [w * error * error]
        });
        loss
    }
}

/// What storing the values in this block loses.
pub(super) fn block_loss<B: Block>(block: &B, run: Run) -> f32 {
    let mut stored = [0.0; 256];
    let stored = &mut stored[..run.values.len()];
    block.dequantize(stored);
    let errors = run.values.iter().zip(stored).map(|(value, stored)| value - *stored);
    errors.zip(run.weights).map(|(error, weight)| weight * error * error).sum()
}

/// The scale `s` for which `s * q`, with codes from `-count` to `count - 1`, is nearest to the
/// values. It may be negative: the largest value takes the side that has one code more.
pub(super) fn symmetric_scale(run: Run, count: i8) -> f32 {
    let side = -f32::from(count);
    best_scale(run, side, 0.1, |value| nearest(value, side, -side - 1.0))
}

/// What is lost with this scale and codes from `-count` to `count - 1`.
fn symmetric_loss(run: Run, scale: f32, count: i8) -> f32 {
    let (inverse, side) = (inverse(scale), -f32::from(count));
    run.loss(|value| scale * nearest(value * inverse, side, -side - 1.0))
}

/// Tries to put the largest value at `side` and at places `step` apart around it, lets `level` say
/// what each value would be stored as, and takes the scale that fits these levels best. With the
/// best scale for given levels, `xl / ll`, the loss is `xx - xl * xl / ll`.
pub(super) fn best_scale(run: Run, side: f32, step: f32, level: impl Fn(f32) -> f32) -> f32 {
    let largest = largest(run.values);
    let mut best = (0.0, 0.0);
    for tried in -STEPS..=STEPS {
        let inverse = inverse(largest / (side + step * tried as f32));
        let [xl, ll] = run.sums(|x, w| {
            let level = level(x * inverse);
            [w * x * level, w * level * level]
        });
        // Divided first, so that squares of tiny values do not vanish.
        let gain = if ll > 0.0 { xl / ll * xl } else { 0.0 };
        if gain > best.0 {
            best = (gain, xl / ll);
        }
    }
    best.1
}

/// Which sign the least value that codes stand for may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lowest {
    /// Zero, or below it.
    NotPositive,
    /// Any.
    Free,
}

/// The scale `s`, which is not negative, and the minimum `m` for which `s * q - m`, with codes from
/// 0 to `top`, is nearest to the values.
pub(super) fn affine(run: Run, top: i8, lowest: Lowest) -> (f32, f32) {
    let from = if lowest == Lowest::Free { f32::INFINITY } else { 0.0 };
    let low = run.values.iter().copied().fold(from, f32::min);
    let high = run.values.iter().copied().fold(low, f32::max);
    if high <= low {
        return (0.0, -low);
    }
    let mut best = Line { scale: 0.0, minimum: -low, gain: f32::NEG_INFINITY };
    for tried in -STEPS..=STEPS {
        let inverse = inverse((high - low) / (f32::from(top) + 0.1 * tried as f32));
        let code = |value| nearest((value - low) * inverse, 0.0, f32::from(top));
        let line = line(run, code, lowest);
        if line.gain > best.gain {
            best = line;
        }
    }
    (best.scale, best.minimum)
}

/// What is lost with this scale and minimum and codes from 0 to `top`.
pub(super) fn affine_loss(run: Run, scale: f32, minimum: f32, top: i8) -> f32 {
    let inverse = inverse(scale);
    let top = f32::from(top);
    run.loss(|x| scale * nearest((x + minimum) * inverse, 0.0, top) - minimum)
}

/// A line `scale * q - minimum` and by how much less it loses than storing zeros.
struct Line {
    scale: f32,
    minimum: f32,
    gain: f32,
}

/// The line that fits the values best in weighted squares, given their codes.
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

/// The steps, near those of a fitted scale and minimum, that lose least. Rounding the two one by
/// one is seldom best, because other codes suit other steps.
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

/// A scale for each of `N` groups of a block, in steps of one scale.
pub(super) struct Scales<const N: usize> {
    /// Scale of the scales, f16.
    pub(super) d: [u8; 2],
    /// Scale of each group, in steps.
    pub(super) steps: [i8; N],
}

/// In which steps scales are stored: from `least`, which is negative, to `-least - 1`. Steps up to
/// `reach` away from a fitted scale are tried.
pub(super) struct Steps {
    pub(super) least: i8,
    pub(super) reach: i8,
}

/// Finds a scale for each of `N` groups of a block: `fit` says which scale suits a group, `loss`
/// what a scale loses.
pub(super) fn scales<const N: usize>(
    run: Run,
    Steps { least, reach }: Steps,
    fit: impl Fn(Run) -> f32,
    loss: impl Fn(Run, f32) -> f32,
) -> Scales<N> {
    let runs = || run.chunks(run.values.len() / N);
    let mut fits = [0.0; N];
    for (group, run) in fits.iter_mut().zip(runs()) {
        *group = fit(run);
    }
    let stored = stored_scale(largest(&fits) / f32::from(least));
    let d = scale(stored);
    let (low, high) = (least, -(least + 1));
    let mut scales = Scales { d: stored, steps: [0; N] };
    for ((step, fit), run) in scales.steps.iter_mut().zip(fits).zip(runs()) {
        // The fit rounded to a step is seldom the best step: other codes suit another one.
        let rounded = round(fit * inverse(d), low, high);
        let (first, last) = (rounded.saturating_sub(reach), rounded.saturating_add(reach));
        let tried = first.max(low)..=last.min(high);
        let losses = tried.map(|tried| (loss(run, d * f32::from(tried)), tried));
        *step = losses.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(rounded, |(_, step)| step);
    }
    scales
}

/// [`scales`] of 16 groups for codes from `-count` to `count - 1`.
pub(super) fn symmetric_scales(run: Run, count: i8, steps: Steps) -> Scales<16> {
    let fit = |run: Run| symmetric_scale(run, count);
    scales(run, steps, fit, |run, scale| symmetric_loss(run, scale, count))
}

impl<const N: usize> Scales<N> {
    /// The inverse of each group's scale.
    pub(super) fn inverses(&self) -> [f32; N] {
        let d = scale(self.d);
        self.steps.map(|step| inverse(d * f32::from(step)))
    }

    /// The codes from `-count` to `count - 1`, moved up to begin at 0, with which the values of the
    /// block are stored nearest.
    pub(super) fn codes(&self, values: &[f32], count: i8) -> impl Iterator<Item = u8> {
        let runs = values.chunks_exact(values.len() / N);
        self.inverses().into_iter().zip(runs).flat_map(move |(inverse, run)| {
            run.iter().map(move |x| (round(x * inverse, -count, count - 1) + count) as u8)
        })
    }
}
