//! Causal convolutions and state-space scans, on some columns or one head. A sequence gets the same
//! bits however its prefill is chunked.
//!
//! Conv, per token and column: reads `kernel` inputs and taps, does `kernel` fused multiply-adds;
//! bound by L1.
//!
//! Scan, per token, head and element of the state: one product and two fused multiply-adds. In
//! prefill, chunks of [`SCAN_TOKENS`] tokens pass over a head's state together: each vector of it
//! is read and written once for all of them and stays in a register in between. The order of
//! operations on an element is that of single tokens, so chunks change no bit and may begin
//! anywhere. (The chunked matmul form of Mamba 2 sums in another order, which decode could not
//! follow.) The arithmetic alone is 1.5 cycles for each vector and token with two units; latencies
//! make it two to three times that. One token alone reads and writes the whole state, `8 * head_dim
//! * state` bytes, and is bound by L2.
//!
//! With decays by channel, each element of the state takes an exponential of its own, which bounds
//! the scan, so tokens pass one by one.

use bodkin_model::Scan;

use crate::isa::Isa;
use crate::vector::{LANES, Vector, dispatch, exp, softplus};

/// Some columns of a convolution.
pub(crate) struct ConvPart<'a> {
    /// `[kernel][columns]`: the taps, the oldest first, that on the present token last.
    pub(crate) taps: &'a [&'a [f32]],
    /// `[columns]`.
    pub(crate) bias: Option<&'a [f32]>,
}

/// One token: `inputs` are the columns of the last `kernel` tokens, the oldest first.
pub(crate) fn conv(isa: Isa, part: &ConvPart<'_>, inputs: &[&[f32]], out: &mut [f32]) {
    assert_eq!(part.taps.len(), inputs.len(), "an input for each tap");
    match part.bias {
        Some(bias) => out.copy_from_slice(bias),
        None => out.fill(0.0),
    }
    for (taps, input) in part.taps.iter().zip(inputs) {
        dispatch!(isa, add_products(taps: &[f32], input: &[f32], out: &mut [f32]));
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

/// Tokens that are applied to a head's state together: as many as leave registers for operands on
/// every instruction set.
pub(crate) const SCAN_TOKENS: usize = 4;

/// The inputs and the output of one token for one head of a scan.
#[derive(Default)]
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
    /// `[head_dim]`.
    pub(crate) out: &'a mut [f32],
}

/// Elements of a head's state in memory: `[state][head_dim rounded up to whole vectors]`, so
/// that a vector holds sixteen elements of x and needs no sum across its lanes.
pub(crate) fn head_len(scan: &Scan) -> usize {
    scan.state * scan.head_dim.next_multiple_of(LANES)
}

/// Tokens of one head, one after the other; `state` is [`head_len`] long.
pub(crate) fn scan(isa: Isa, tokens: &mut [ScanToken<'_>], state: &mut [f32]) {
    dispatch!(isa, scan_head(tokens: &mut [ScanToken<'_>], state: &mut [f32]));
}

#[inline(always)]
unsafe fn scan_head<V: Vector>(tokens: &mut [ScanToken<'_>], state: &mut [f32]) {
    let (chunks, rest) = tokens.as_chunks_mut::<SCAN_TOKENS>();
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        chunks.iter_mut().for_each(|chunk| scan_chunk::<V, SCAN_TOKENS>(chunk, state));
        rest.iter_mut().for_each(|token| scan_chunk::<V, 1>(std::array::from_mut(token), state));
    }
}

#[inline(always)]
unsafe fn scan_chunk<V: Vector, const N: usize>(
    tokens: &mut [ScanToken<'_>; N],
    state: &mut [f32],
) {
    let (head_dim, states) = (tokens[0].x.len(), tokens[0].b.len());
    let stride = head_dim.next_multiple_of(LANES);
    assert_eq!(state.len(), states * stride, "the state of a head");
    for token in tokens.iter() {
        assert!(token.x.len() == head_dim && token.out.len() == head_dim);
        assert!(token.b.len() == states && token.c.len() == states);
    }
    for first in (0..head_dim).step_by(LANES) {
        let count = LANES.min(head_dim - first);
        let mut lanes = [0.0; LANES];
        // SAFETY: the vectors lie in the state, whose length was checked, and in the array; so do
        // the elements of `b` and `c`.
        unsafe {
            let zero = V::splat(0.0);
            let (mut dt_x, mut decay, mut y) = ([zero; N], [zero; N], [zero; N]);
            // Loaded once: the compiler cannot know that the state does not alias the tokens.
            let (mut b, mut c) = ([std::ptr::null(); N], [std::ptr::null(); N]);
            for (t, token) in tokens.iter().enumerate() {
                (b[t], c[t]) = (token.b.as_ptr(), token.c.as_ptr());
                lanes[..count].copy_from_slice(&token.x[first..first + count]);
                let x = V::load(lanes.as_ptr());
                dt_x[t] = x.mul(V::splat(token.dt));
                decay[t] = V::splat(token.decay);
                y[t] = x.mul(V::splat(token.d));
            }
            for i in 0..states {
                let at = state.as_mut_ptr().add(i * stride + first);
                let mut h = V::load(at);
                for t in 0..N {
                    h = dt_x[t].mul_add(V::splat(*b[t].add(i)), h.mul(decay[t]));
                    y[t] = h.mul_add(V::splat(*c[t].add(i)), y[t]);
                }
                h.store(at);
            }
            for (token, y) in tokens.iter_mut().zip(y) {
                y.store(lanes.as_mut_ptr());
                token.out[first..first + count].copy_from_slice(&lanes[..count]);
            }
        }
    }
}

/// The inputs and the output of one token for one head of a scan by channel.
pub(crate) struct ChannelToken<'a> {
    /// `[head_dim]`.
    pub(crate) x: &'a [f32],
    /// `[state]`.
    pub(crate) b: &'a [f32],
    /// `[state]`.
    pub(crate) c: &'a [f32],
    /// `[head_dim]`, before bias and softplus.
    pub(crate) dt: &'a [f32],
    /// `[head_dim]`.
    pub(crate) dt_bias: &'a [f32],
    /// `[state][channels]`, from this head's first channel on.
    pub(crate) a: &'a [f32],
    /// Of all heads.
    pub(crate) channels: usize,
    /// `[head_dim]`.
    pub(crate) d: &'a [f32],
    /// `[head_dim]`.
    pub(crate) out: &'a mut [f32],
}

/// One token of one head; `state` is [`head_len`] long.
pub(crate) fn scan_channels(isa: Isa, token: ChannelToken<'_>, state: &mut [f32]) {
    dispatch!(isa, channels_of_head(token: ChannelToken<'_>, state: &mut [f32]));
}

#[inline(always)]
unsafe fn channels_of_head<V: Vector>(token: ChannelToken<'_>, state: &mut [f32]) {
    let (head_dim, states) = (token.x.len(), token.b.len());
    let stride = head_dim.next_multiple_of(LANES);
    assert_eq!(state.len(), states * stride, "the state of a head");
    for first in (0..head_dim).step_by(LANES) {
        let part = first..head_dim.min(first + LANES);
        // SAFETY: the caller keeps the contract of `Vector`; the vectors lie in the state, whose
        // length was checked.
        unsafe {
            let x: V = load_part(&token.x[part.clone()]);
            let dt: V = load_part(&token.dt[part.clone()]);
            let dt = softplus(dt.add(load_part(&token.dt_bias[part.clone()])));
            let dt_x = dt.mul(x);
            let mut y = x.mul(load_part(&token.d[part.clone()]));
            for (i, (&b, &c)) in token.b.iter().zip(token.c).enumerate() {
                let a: V = load_part(&token.a[i * token.channels..][part.clone()]);
                let at = state.as_mut_ptr().add(i * stride + first);
                let h = dt_x.mul_add(V::splat(b), V::load(at).mul(exp(dt.mul(a))));
                h.store(at);
                y = h.mul_add(V::splat(c), y);
            }
            let mut lanes = [0.0; LANES];
            y.store(lanes.as_mut_ptr());
            token.out[part.clone()].copy_from_slice(&lanes[..part.len()]);
        }
    }
}

/// Up to a vector, padded with zeros.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
unsafe fn load_part<V: Vector>(from: &[f32]) -> V {
    let mut lanes = [0.0; LANES];
    // SAFETY: the caller keeps the contract of `Vector`; a whole vector is there, or the array.
    unsafe {
        if from.len() == LANES {
            return V::load(from.as_ptr());
        }
        lanes[..from.len()].copy_from_slice(from);
        V::load(lanes.as_ptr())
    }
}
