//! Row-local operations. A stage runs a list of them back to back on each row, so that the row
//! stays in L1. Each reads and writes a few kilobytes and is bound by the latency of its
//! arithmetic.

use bodkin_model::{NormKind, RopeStyle};

use super::attention::softcap;
use crate::isa::Isa;
use crate::vector::{LANES, Vector, dispatch};

/// The whole-vector part of a length.
fn whole(len: usize) -> usize {
    len / LANES * LANES
}

/// A function of two vectors. Not a closure: closures are compiled without the target features of
/// the enclosing function, and one too large to be inlined calls every intrinsic.
pub(super) trait Binary: Copy {
    /// # Safety
    ///
    /// As for [`Vector`].
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V;
}

/// `out[i] = f(a[i], b[i])` by vectors, with a padded vector for the rest.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn zip<V: Vector>(a: &[f32], b: &[f32], out: &mut [f32], f: impl Binary) {
    assert!(a.len() == out.len() && b.len() == out.len());
    // SAFETY: the three are equally long.
    unsafe { apply::<V>(a.as_ptr(), b.as_ptr(), out.as_mut_ptr(), out.len(), f) }
}

/// `a[i] = f(a[i], b[i])`.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn update<V: Vector>(a: &mut [f32], b: &[f32], f: impl Binary) {
    assert!(a.len() == b.len());
    // SAFETY: both are equally long.
    unsafe { apply::<V>(a.as_mut_ptr(), b.as_ptr(), a.as_mut_ptr(), a.len(), f) }
}

/// `a[i] = f(a[i], a[i])`.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn map<V: Vector>(a: &mut [f32], f: impl Binary) {
    let start = a.as_mut_ptr();
    // SAFETY: the slice is as long as itself.
    unsafe { apply::<V>(start, start, start, a.len(), f) }
}

/// # Safety
///
/// As for [`Vector`]; each pointer is valid for `len` elements, and they are equal or do not
/// overlap.
#[inline(always)]
unsafe fn apply<V: Vector>(
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    len: usize,
    f: impl Binary,
) {
    let n = whole(len);
    // SAFETY: whole vectors stay within the length, the rest goes through padded arrays; a vector
    // is read before its place is written.
    unsafe {
        for i in (0..n).step_by(LANES) {
            f.apply(V::load(a.add(i)), V::load(b.add(i))).store(out.add(i));
        }
        if n < len {
            let (mut x, mut y) = ([0.0; LANES], [0.0; LANES]);
            a.add(n).copy_to_nonoverlapping(x.as_mut_ptr(), len - n);
            b.add(n).copy_to_nonoverlapping(y.as_mut_ptr(), len - n);
            f.apply(V::load(x.as_ptr()), V::load(y.as_ptr())).store(x.as_mut_ptr());
            out.add(n).copy_from_nonoverlapping(x.as_ptr(), len - n);
        }
    }
}

/// The sum of `f(x)` over a slice.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn total<V: Vector>(x: &[f32], f: impl Fn(V) -> V) -> f32 {
    let n = whole(x.len());
    // SAFETY: whole vectors stay within the slice, the rest goes through a padded array.
    unsafe {
        let mut sum = V::splat(0.0);
        for i in (0..n).step_by(LANES) {
            sum = sum.add(f(V::load(x.as_ptr().add(i))));
        }
        let mut lanes = [0.0; LANES];
        apply_rest::<V>(&x[n..], f, &mut lanes);
        sum.sum() + lanes[..x.len() - n].iter().sum::<f32>()
    }
}

/// Applies `f` to less than a vector.
#[inline(always)]
unsafe fn apply_rest<V: Vector>(x: &[f32], f: impl Fn(V) -> V, lanes: &mut [f32; LANES]) {
    if x.is_empty() {
        return;
    }
    let mut padded = [0.0; LANES];
    padded[..x.len()].copy_from_slice(x);
    // SAFETY: both arrays are as long as a vector.
    unsafe { f(V::load(padded.as_ptr())).store(lanes.as_mut_ptr()) }
}

/// How a row is normalised.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) kind: NormKind,
    /// For a part, or for all parts one after the other.
    pub(crate) weight: Option<&'a [f32]>,
    /// As long as the weight.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) eps: f32,
    /// Equal parts of a row, each normalised on its own.
    pub(crate) groups: usize,
}

/// Normalises the parts of `x`.
pub(crate) fn norm<'a>(isa: Isa, x: &[f32], norm: Norm<'a>, out: &mut [f32]) {
    let Norm { kind, weight, bias, eps, groups } = norm;
    let len = x.len() / groups;
    let parts = x.chunks_exact(len).zip(out.chunks_exact_mut(len));
    for (i, (part, out)) in parts.enumerate() {
        let of_part = |x: &'a [f32]| &x[if x.len() == len { 0 } else { i * len }..][..len];
        let weight = weight.map(of_part);
        dispatch!(isa, norm_part(
            part: &[f32], kind: NormKind, weight: Option<&[f32]>, eps: f32, out: &mut [f32],
        ));
        if let Some(bias) = bias {
            out.iter_mut().zip(of_part(bias)).for_each(|(y, b)| *y += b);
        }
    }
}

#[inline(always)]
unsafe fn norm_part<V: Vector>(
    x: &[f32],
    kind: NormKind,
    weight: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) {
    let n = x.len() as f32;
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let mean = match kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => total::<V>(x, |x| x) / n,
        };
        let centre = V::splat(mean);
        let square = total::<V>(x, |x| x.sub(centre).mul(x.sub(centre)));
        let scale = 1.0 / (square / n + eps).sqrt();
        match weight {
            Some(weight) => zip::<V>(x, weight, out, Normed { mean, scale }),
            None => zip::<V>(x, x, out, Centred { mean, scale }),
        }
    }
}

/// `(x - mean) * scale * weight`.
#[derive(Clone, Copy)]
struct Normed {
    mean: f32,
    scale: f32,
}

impl Binary for Normed {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, weight: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { x.sub(V::splat(self.mean)).mul(V::splat(self.scale)).mul(weight) }
    }
}

/// `(x - mean) * scale`.
#[derive(Clone, Copy)]
struct Centred {
    mean: f32,
    scale: f32,
}

impl Binary for Centred {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, _: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { x.sub(V::splat(self.mean)).mul(V::splat(self.scale)) }
    }
}

/// `a + b`.
#[derive(Clone, Copy)]
struct Sum;

impl Binary for Sum {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { a.add(b) }
    }
}

/// `a += b`.
pub(crate) fn add(isa: Isa, a: &mut [f32], b: &[f32]) {
    dispatch!(isa, add_rows(a: &mut [f32], b: &[f32]));
}

#[inline(always)]
unsafe fn add_rows<V: Vector>(a: &mut [f32], b: &[f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { update::<V>(a, b, Sum) }
}

/// `x * weight`, which has one number for each element or for all.
pub(crate) fn multiply(isa: Isa, x: &[f32], weight: &[f32], out: &mut [f32]) {
    if let [factor] = *weight {
        out.iter_mut().zip(x).for_each(|(y, x)| *y = x * factor);
    } else {
        dispatch!(isa, multiply_rows(x: &[f32], weight: &[f32], out: &mut [f32]));
    }
}

#[inline(always)]
unsafe fn multiply_rows<V: Vector>(x: &[f32], weight: &[f32], out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { zip::<V>(x, weight, out, Product) }
}

/// `a * b`.
#[derive(Clone, Copy)]
struct Product;

impl Binary for Product {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { a.mul(b) }
    }
}

/// Each part of `x`, as long as `like`, times what gives it the length of that.
pub(crate) fn rescale(isa: Isa, x: &[f32], like: &[f32], out: &mut [f32]) {
    dispatch!(isa, rescale_parts(x: &[f32], like: &[f32], out: &mut [f32]));
}

#[inline(always)]
unsafe fn rescale_parts<V: Vector>(x: &[f32], like: &[f32], out: &mut [f32]) {
    let parts = x.chunks_exact(like.len()).zip(out.chunks_exact_mut(like.len()));
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let wanted = total::<V>(like, |x| x.mul(x)).sqrt();
        for (part, out) in parts {
            let found = total::<V>(part, |x| x.mul(x)).sqrt();
            let scale = wanted / found.max(f32::MIN_POSITIVE);
            zip::<V>(part, part, out, Centred { mean: 0.0, scale });
        }
    }
}

/// What exceeds the mean of `x` by some standard deviations, in place.
pub(crate) fn cutoff(isa: Isa, x: &mut [f32], deviations: f32) {
    dispatch!(isa, cutoff_row(x: &mut [f32], deviations: f32));
}

#[inline(always)]
unsafe fn cutoff_row<V: Vector>(x: &mut [f32], deviations: f32) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let mean = total::<V>(x, |x| x) / x.len() as f32;
        let centre = V::splat(mean);
        let square = total::<V>(x, |x| x.sub(centre).mul(x.sub(centre)));
        let cutoff = mean + deviations * (square / (x.len() - 1) as f32).sqrt();
        map::<V>(x, Above { cutoff });
    }
}

/// `max(x - cutoff, 0)`.
#[derive(Clone, Copy)]
struct Above {
    cutoff: f32,
}

impl Binary for Above {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, _: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { x.sub(V::splat(self.cutoff)).max(V::splat(0.0)) }
    }
}

/// Columns of each of `groups` equal parts of `x`, from `start` on.
pub(crate) fn slice(x: &[f32], groups: usize, start: usize, out: &mut [f32]) {
    let (from, len) = (x.len() / groups, out.len() / groups);
    for (part, out) in x.chunks_exact(from).zip(out.chunks_exact_mut(len)) {
        out.copy_from_slice(&part[start..start + len]);
    }
}

/// Each of `groups` equal parts of `a`, followed by that of `b`, or by all of `b`.
pub(crate) fn concat(a: &[f32], b: &[f32], groups: usize, out: &mut [f32]) {
    let (first, second) = (a.len() / groups, (out.len() - a.len()) / groups);
    let parts = a.chunks_exact(first).zip(b.chunks_exact(second).cycle());
    for (out, (a, b)) in out.chunks_exact_mut(first + second).zip(parts) {
        out[..first].copy_from_slice(a);
        out[first..].copy_from_slice(b);
    }
}

/// The sum of equal parts of a row, each times its weight: `parts` is `[used][out.len()]`, `route`
/// begins with the `used` weights.
pub(crate) fn weighted_sum(isa: Isa, parts: &[f32], route: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (part, &weight) in parts.chunks_exact(out.len()).zip(route) {
        dispatch!(isa, add_scaled(part: &[f32], weight: f32, out: &mut [f32]));
    }
}

#[inline(always)]
unsafe fn add_scaled<V: Vector>(x: &[f32], factor: f32, out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { update::<V>(out, x, AddScaled { factor }) }
}

/// `a + factor * b`.
#[derive(Clone, Copy)]
struct AddScaled {
    factor: f32,
}

impl Binary for AddScaled {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { b.mul_add(V::splat(self.factor), a) }
    }
}

/// `cap * tanh(x / cap)` in place.
pub(crate) fn cap_in_place(isa: Isa, x: &mut [f32], cap: f32) {
    dispatch!(isa, cap_rows(x: &mut [f32], cap: f32));
}

#[inline(always)]
unsafe fn cap_rows<V: Vector>(x: &mut [f32], cap: f32) {
    let n = whole(x.len());
    let (head, rest) = x.split_at_mut(n);
    // SAFETY: whole vectors stay within the slice, the rest goes through a padded array.
    unsafe {
        for lanes in head.chunks_exact_mut(LANES) {
            softcap(V::load(lanes.as_ptr()), V::splat(cap)).store(lanes.as_mut_ptr());
        }
        let mut lanes = [0.0; LANES];
        apply_rest::<V>(rest, |x| softcap(x, V::splat(cap)), &mut lanes);
        rest.copy_from_slice(&lanes[..rest.len()]);
    }
}

/// Rotates the first `2 * cos.len()` elements of each head by the angles with these cosines and
/// sines; copies the others.
pub(crate) fn rope(
    isa: Isa,
    style: RopeStyle,
    x: &[f32],
    head_dim: usize,
    angles: (&[f32], &[f32]),
    out: &mut [f32],
) {
    dispatch!(isa, rotate(
        style: RopeStyle, x: &[f32], head_dim: usize, angles: (&[f32], &[f32]), out: &mut [f32],
    ));
}

/// Plain loops, which the compiler vectorises with the target features.
#[inline(always)]
unsafe fn rotate<V: Vector>(
    style: RopeStyle,
    x: &[f32],
    head_dim: usize,
    (cos, sin): (&[f32], &[f32]),
    out: &mut [f32],
) {
    let pairs = cos.len();
    assert!(sin.len() == pairs && 2 * pairs <= head_dim);
    for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
        out[2 * pairs..].copy_from_slice(&x[2 * pairs..]);
        match style {
            RopeStyle::Norm => {
                let pairs = x.chunks_exact(2).zip(out.chunks_exact_mut(2));
                for ((x, y), (c, s)) in pairs.zip(cos.iter().zip(sin)) {
                    y[0] = x[0] * c - x[1] * s;
                    y[1] = x[0] * s + x[1] * c;
                }
            }
            RopeStyle::Neox => {
                let (a, b) = x[..2 * pairs].split_at(pairs);
                let (y, z) = out[..2 * pairs].split_at_mut(pairs);
                for i in 0..pairs {
                    y[i] = a[i] * cos[i] - b[i] * sin[i];
                    z[i] = a[i] * sin[i] + b[i] * cos[i];
                }
            }
        }
    }
}

/// Makes zero what is smaller in magnitude than a threshold.
pub(crate) fn mask(x: &mut [f32], threshold: f32) {
    // Without a branch, so that it vectorises. NaN stays NaN.
    x.iter_mut().for_each(|x| *x = if x.abs() < threshold { 0.0 } else { *x });
}
