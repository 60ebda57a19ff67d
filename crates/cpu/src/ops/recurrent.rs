//! Convolutions and state-space layers on a part of their columns or heads, token after token: a
//! sequence gets the same bits however it was cut into steps.
//!
//! Conv, per token and column: reads `kernel` inputs and taps, does as many fused multiply-adds.
//! Scan, per token and head: reads and writes the state, `4 * head_dim * state` bytes, with one
//! product and two fused multiply-adds for each element. A head's state of some 32 KB stays in the
//! second-level cache for all tokens of a step; both are bound by that cache.

use bodkin_model::Scan;

use crate::simd::Simd;
use crate::vector::{LANES, Vector, dispatch};

/// Some columns of a convolution.
pub(crate) struct ConvPart<'a> {
    /// `[kernel][columns]`: the taps, the oldest first, that on the present token last.
    pub(crate) taps: &'a [&'a [f32]],
    /// `[columns]`.
    pub(crate) bias: Option<&'a [f32]>,
}

/// One token: `inputs` are the columns of the last `kernel` tokens, the oldest first.
pub(crate) fn conv(simd: Simd, part: &ConvPart<'_>, inputs: &[&[f32]], out: &mut [f32]) {
    assert_eq!(part.taps.len(), inputs.len(), "an input for each tap");
    match part.bias {
        Some(bias) => out.copy_from_slice(bias),
        None => out.fill(0.0),
    }
    for (taps, input) in part.taps.iter().zip(inputs) {
        dispatch!(simd, add_products(taps: &[f32], input: &[f32], out: &mut [f32]));
    }
}

/// `out[i] = fma(a[i], b[i], out[i])`.
#[inline(always)]
unsafe fn add_products<V: Vector>(a: &[f32], b: &[f32], out: &mut [f32]) {
    assert!(a.len() == out.len() && b.len() == out.len());
    let whole = out.len() / LANES * LANES;
    // SAFETY: whole vectors stay within the slices; the rest goes through padded arrays.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let (a, b) = (V::load(a.as_ptr().add(i)), V::load(b.as_ptr().add(i)));
            a.mul_add(b, V::load(out.as_ptr().add(i))).store(out.as_mut_ptr().add(i));
        }
        let rest = out.len() - whole;
        if rest > 0 {
            let padded = |from: &[f32]| {
                let mut lanes = [0.0; LANES];
                lanes[..rest].copy_from_slice(&from[whole..]);
                lanes
            };
            let (a, b, mut c) = (padded(a), padded(b), padded(out));
            V::load(a.as_ptr())
                .mul_add(V::load(b.as_ptr()), V::load(c.as_ptr()))
                .store(c.as_mut_ptr());
            out[whole..].copy_from_slice(&c[..rest]);
        }
    }
}

/// What one token brings to one head of a scan.
pub(crate) struct ScanToken<'a> {
    /// `[head_dim]`.
    pub(crate) x: &'a [f32],
    /// `[state]`.
    pub(crate) b: &'a [f32],
    /// `[state]`.
    pub(crate) c: &'a [f32],
    /// After bias and softplus.
    pub(crate) dt: f32,
    /// `exp(dt * a)`.
    pub(crate) decay: f32,
    pub(crate) d: f32,
}

/// Elements of a head's state as it is kept: `[state][head_dim rounded up to whole vectors]`, so
/// that a vector holds sixteen elements of x and needs no sum across its lanes.
pub(crate) fn head_len(scan: &Scan) -> usize {
    scan.state * scan.head_dim.next_multiple_of(LANES)
}

/// One token of one head; `state` is [`head_len`] long and `out` `[head_dim]`.
pub(crate) fn scan(simd: Simd, token: &ScanToken<'_>, state: &mut [f32], out: &mut [f32]) {
    dispatch!(simd, scan_head(token: &ScanToken<'_>, state: &mut [f32], out: &mut [f32]));
}

#[inline(always)]
unsafe fn scan_head<V: Vector>(token: &ScanToken<'_>, state: &mut [f32], out: &mut [f32]) {
    let stride = out.len().next_multiple_of(LANES);
    assert!(token.x.len() == out.len() && state.len() == token.b.len() * stride);
    assert!(token.b.len() == token.c.len());
    for first in (0..out.len()).step_by(LANES) {
        let count = LANES.min(out.len() - first);
        let mut lanes = [0.0; LANES];
        lanes[..count].copy_from_slice(&token.x[first..first + count]);
        // SAFETY: the vectors lie in the state, whose length was checked, and in the array.
        unsafe {
            let x = V::load(lanes.as_ptr());
            let (dt_x, decay) = (x.mul(V::splat(token.dt)), V::splat(token.decay));
            let mut y = x.mul(V::splat(token.d));
            for (i, (&b, &c)) in token.b.iter().zip(token.c).enumerate() {
                let at = state.as_mut_ptr().add(i * stride + first);
                let h = dt_x.mul_add(V::splat(b), V::load(at).mul(decay));
                h.store(at);
                y = h.mul_add(V::splat(c), y);
            }
            y.store(lanes.as_mut_ptr());
        }
        out[first..first + count].copy_from_slice(&lanes[..count]);
    }
}
