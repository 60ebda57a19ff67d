//! Operations that look at one row alone. A stage runs a list of them back to back on each row,
//! so that the row stays in the first-level cache; each reads and writes a few kilobytes and is
//! bound by the latency of its arithmetic, not by memory.

use bodkin_model::{Act, NormKind, RopeStyle};

use super::attention::softcap;
use crate::simd::Simd;
use crate::vector::{LANES, Vector, dispatch, exp};

/// The whole-vector part of a length.
fn whole(len: usize) -> usize {
    len / LANES * LANES
}

/// A function of two vectors. Not a closure: those are compiled without the instructions of the
/// function that they stand in, and one too large to be inlined calls every intrinsic.
trait Binary: Copy {
    /// # Safety
    ///
    /// As for [`Vector`].
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V;
}

/// `out[i] = f(a[i], b[i])` by vectors, with a padded vector for the rest.
#[inline(always)]
unsafe fn zip<V: Vector>(a: &[f32], b: &[f32], out: &mut [f32], f: impl Binary) {
    assert!(a.len() == out.len() && b.len() == out.len());
    let n = whole(out.len());
    // SAFETY: whole vectors stay within the slices, the rest goes through padded arrays.
    unsafe {
        for i in (0..n).step_by(LANES) {
            let (a, b) = (V::load(a.as_ptr().add(i)), V::load(b.as_ptr().add(i)));
            f.apply(a, b).store(out.as_mut_ptr().add(i));
        }
        if n < out.len() {
            let rest = out.len() - n;
            let (mut x, mut y) = ([0.0; LANES], [0.0; LANES]);
            x[..rest].copy_from_slice(&a[n..]);
            y[..rest].copy_from_slice(&b[n..]);
            f.apply(V::load(x.as_ptr()), V::load(y.as_ptr())).store(x.as_mut_ptr());
            out[n..].copy_from_slice(&x[..rest]);
        }
    }
}

/// The sum of `f(x)` over a slice.
#[inline(always)]
unsafe fn total<V: Vector>(x: &[f32], f: impl Fn(V) -> V) -> f32 {
    let n = whole(x.len());
    // SAFETY: whole vectors stay within the slice, the rest goes through a padded array.
    unsafe {
        let mut sum = V::splat(0.0);
        for i in (0..n).step_by(LANES) {
            sum = sum.add(f(V::load(x.as_ptr().add(i))));
        }
        let mut lanes = [0.0; LANES];
        f_rest::<V>(&x[n..], f, &mut lanes);
        sum.sum() + lanes[..x.len() - n].iter().sum::<f32>()
    }
}

/// `f` of fewer elements than a vector has.
#[inline(always)]
unsafe fn f_rest<V: Vector>(x: &[f32], f: impl Fn(V) -> V, lanes: &mut [f32; LANES]) {
    if x.is_empty() {
        return;
    }
    let mut padded = [0.0; LANES];
    padded[..x.len()].copy_from_slice(x);
    // SAFETY: both arrays are as long as a vector.
    unsafe { f(V::load(padded.as_ptr())).store(lanes.as_mut_ptr()) }
}

/// Normalises each part of `x` that is as long as `weight`.
pub(crate) fn norm(
    simd: Simd,
    x: &[f32],
    kind: NormKind,
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) {
    let parts = x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len()));
    for (part, out) in parts {
        dispatch!(simd, norm_part(
            part: &[f32], kind: NormKind, weight: &[f32], eps: f32, out: &mut [f32],
        ));
        if let Some(bias) = bias {
            out.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
}

#[inline(always)]
unsafe fn norm_part<V: Vector>(
    x: &[f32],
    kind: NormKind,
    weight: &[f32],
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
        zip::<V>(x, weight, out, Normed { mean, scale });
    }
}

/// `act(gate) * up`.
pub(crate) fn glu(simd: Simd, act: Act, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match act {
        Act::Silu => dispatch!(simd, silu(gate: &[f32], up: &[f32], out: &mut [f32])),
        Act::GeluTanh => dispatch!(simd, gelu_tanh(gate: &[f32], up: &[f32], out: &mut [f32])),
        _ => unimplemented!("{act:?}"),
    }
}

#[inline(always)]
unsafe fn silu<V: Vector>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { zip::<V>(gate, up, out, Silu) }
}

#[inline(always)]
unsafe fn gelu_tanh<V: Vector>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { zip::<V>(gate, up, out, GeluTanh) }
}

/// `silu(gate) * up`.
#[derive(Clone, Copy)]
struct Silu;

impl Binary for Silu {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, gate: V, up: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { gated(gate, gate).mul(up) }
    }
}

/// `gelu(gate) * up`.
#[derive(Clone, Copy)]
struct GeluTanh;

impl Binary for GeluTanh {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, gate: V, up: V) -> V {
        // 0.5 (1 + tanh y) is the logistic function of 2 y.
        const LINEAR: f32 = 2.0 * 0.797_884_6;
        const CUBIC: f32 = LINEAR * 0.044_715;
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe {
            let slope = gate.mul(gate).mul_add(V::splat(CUBIC), V::splat(LINEAR));
            gated(gate, gate.mul(slope)).mul(up)
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

/// `x` times the logistic function of `y`.
#[inline(always)]
unsafe fn gated<V: Vector>(x: V, y: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { x.div(V::splat(1.0).add(exp(V::splat(0.0).sub(y)))) }
}

/// `a + b`.
pub(crate) fn add(simd: Simd, a: &[f32], b: &[f32], out: &mut [f32]) {
    dispatch!(simd, add_rows(a: &[f32], b: &[f32], out: &mut [f32]));
}

#[inline(always)]
unsafe fn add_rows<V: Vector>(a: &[f32], b: &[f32], out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { zip::<V>(a, b, out, Sum) }
}

/// `cap * tanh(x / cap)` in place.
pub(crate) fn cap_in_place(simd: Simd, x: &mut [f32], cap: f32) {
    dispatch!(simd, cap_rows(x: &mut [f32], cap: f32));
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
        f_rest::<V>(rest, |x| softcap(x, V::splat(cap)), &mut lanes);
        rest.copy_from_slice(&lanes[..rest.len()]);
    }
}

/// Rotates the first `2 * cos.len()` elements of each head; copies the others.
pub(crate) fn rope(
    style: RopeStyle,
    x: &[f32],
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
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
