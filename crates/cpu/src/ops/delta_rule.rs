//! The gated delta rule, one token and some columns of one head's state. The state is read from
//! memory once and written once: a block of [`COLUMNS`] columns fits L1, where the second pass over
//! it finds it. Columns are independent, and sums run over the rows of a block in a fixed order, so
//! bits depend neither on chunks nor on how columns are divided.
//!
//! Per element of the state: one fused multiply-add that retrieves k's value, then a product and
//! two fused multiply-adds that update it and apply q. Rows alternate between two sums, which hides
//! the latency. Decode is bound by the memory of the state, `8 * head_dim^2` bytes a head.

use crate::isa::Isa;
use crate::vector::{LANES, Vector, dispatch, exp, softplus};

use super::rows::{Binary, map, total, update};

/// Vectors in a row of a block.
const VECTORS: usize = 2;
/// Columns of a state that are computed together.
pub(crate) const COLUMNS: usize = VECTORS * LANES;

/// Elements of some columns of a head's state in memory: `[blocks of columns][head_dim][COLUMNS]`.
pub(crate) fn state_len(head_dim: usize, columns: usize) -> usize {
    head_dim * columns.next_multiple_of(COLUMNS)
}

/// Elements of the scratch for [`delta_rule`].
pub(crate) fn scratch_len(head_dim: usize) -> usize {
    4 * head_dim
}

/// The inputs and the output of one token for some columns of one head.
pub(crate) struct RuleToken<'a> {
    /// `[head_dim]`.
    pub(crate) q: &'a [f32],
    /// `[head_dim]`.
    pub(crate) k: &'a [f32],
    /// `[columns]`.
    pub(crate) v: &'a [f32],
    /// `[1]`, or `[head_dim]` by channel.
    pub(crate) decay: &'a [f32],
    /// As long as `decay`.
    pub(crate) dt_bias: &'a [f32],
    pub(crate) a: f32,
    pub(crate) beta: f32,
    pub(crate) eps: f32,
    /// `[columns]`.
    pub(crate) out: &'a mut [f32],
}

/// What a token does to every column, `[head_dim]` each.
struct Factors<'a> {
    /// Normalised and scaled.
    q: &'a [f32],
    /// Normalised.
    k: &'a [f32],
    decay: &'a [f32],
    /// `decay * k`.
    decayed_k: &'a [f32],
    /// After the sigmoid.
    beta: f32,
}

/// One token; `state` is [`state_len`] long, `scratch` [`scratch_len`].
pub(crate) fn delta_rule(isa: Isa, token: RuleToken<'_>, state: &mut [f32], scratch: &mut [f32]) {
    dispatch!(isa, apply(token: RuleToken<'_>, state: &mut [f32], scratch: &mut [f32]));
}

#[inline(always)]
unsafe fn apply<V: Vector>(token: RuleToken<'_>, state: &mut [f32], scratch: &mut [f32]) {
    let dim = token.k.len();
    assert_eq!(state.len(), state_len(dim, token.v.len()), "the columns of a head");
    // SAFETY: the caller keeps the contract of `Vector`; a block of the state has `dim` rows.
    unsafe {
        let factors = factors::<V>(&token, scratch);
        let parts = token.v.chunks(COLUMNS).zip(token.out.chunks_mut(COLUMNS));
        for ((v, out), block) in parts.zip(state.chunks_exact_mut(dim * COLUMNS)) {
            block_of_columns::<V>(&factors, v, block, out);
        }
    }
}

#[inline(always)]
unsafe fn factors<'s, V: Vector>(token: &RuleToken<'_>, scratch: &'s mut [f32]) -> Factors<'s> {
    let dim = token.k.len();
    let (q, rest) = scratch.split_at_mut(dim);
    let (k, rest) = rest.split_at_mut(dim);
    let (decay, decayed_k) = rest.split_at_mut(dim);
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        normalise::<V>(token.q, token.eps, 1.0 / (dim as f32).sqrt(), q);
        normalise::<V>(token.k, token.eps, 1.0, k);
        let decays = &mut decay[..token.decay.len()];
        decays.copy_from_slice(token.decay);
        update::<V>(decays, token.dt_bias, Decay { a: token.a });
        // One decay is that of all rows.
        if token.decay.len() < dim {
            let decay_of_head = decay[0];
            decay.fill(decay_of_head);
        }
        decayed_k.copy_from_slice(k);
        update::<V>(decayed_k, decay, Product);
    }
    let beta = 1.0 / (1.0 + (-token.beta).exp());
    Factors { q, k, decay, decayed_k, beta }
}

/// `factor * x / sqrt(x . x + eps)`.
#[inline(always)]
unsafe fn normalise<V: Vector>(x: &[f32], eps: f32, factor: f32, out: &mut [f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let square = total::<V>(x, |x| x.mul(x));
        out.copy_from_slice(x);
        map::<V>(out, Times { factor: factor / (square + eps).sqrt() });
    }
}

/// `exp(a * softplus(x + bias))`.
#[derive(Clone, Copy)]
struct Decay {
    a: f32,
}

impl Binary for Decay {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, bias: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { exp(softplus(x.add(bias)).mul(V::splat(self.a))) }
    }
}

/// `x * y`.
#[derive(Clone, Copy)]
struct Product;

impl Binary for Product {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, y: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { x.mul(y) }
    }
}

/// `factor * x`.
#[derive(Clone, Copy)]
struct Times {
    factor: f32,
}

impl Binary for Times {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, x: V, _: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { x.mul(V::splat(self.factor)) }
    }
}

/// Up to [`COLUMNS`] columns; `block` is `[head_dim][COLUMNS]`.
#[inline(always)]
unsafe fn block_of_columns<V: Vector>(
    f: &Factors<'_>,
    v: &[f32],
    block: &mut [f32],
    out: &mut [f32],
) {
    let dim = f.k.len();
    assert!(block.len() == dim * COLUMNS && f.q.len() == dim);
    assert!(f.decay.len() == dim && f.decayed_k.len() == dim);
    let pairs = dim / 2 * 2;
    let mut lanes = [0.0; COLUMNS];
    lanes[..v.len()].copy_from_slice(v);
    // SAFETY: rows lie in the block, and elements of factors in the factors, whose lengths were
    // checked; the vectors of `lanes` in the array.
    unsafe {
        let start = block.as_mut_ptr();
        let mut seen = [[V::splat(0.0); VECTORS]; 2];
        for i in (0..pairs).step_by(2) {
            retrieve(f, i, start, &mut seen[0]);
            retrieve(f, i + 1, start, &mut seen[1]);
        }
        if pairs < dim {
            retrieve(f, pairs, start, &mut seen[0]);
        }
        let mut delta = [V::splat(0.0); VECTORS];
        for (i, delta) in delta.iter_mut().enumerate() {
            let v = V::load(lanes.as_ptr().add(i * LANES));
            *delta = v.sub(seen[0][i].add(seen[1][i])).mul(V::splat(f.beta));
        }
        let mut y = [[V::splat(0.0); VECTORS]; 2];
        for i in (0..pairs).step_by(2) {
            renew(f, i, start, &delta, &mut y[0]);
            renew(f, i + 1, start, &delta, &mut y[1]);
        }
        if pairs < dim {
            renew(f, pairs, start, &delta, &mut y[0]);
        }
        let [even, odd] = y;
        for (i, (even, odd)) in even.into_iter().zip(odd).enumerate() {
            even.add(odd).store(lanes.as_mut_ptr().add(i * LANES));
        }
    }
    out.copy_from_slice(&lanes[..out.len()]);
}

/// Adds what row `i` contributes to k's value.
///
/// # Safety
///
/// As for [`Vector`]; the block and the factors have the row.
#[inline(always)]
unsafe fn retrieve<V: Vector>(
    f: &Factors<'_>,
    i: usize,
    block: *const f32,
    seen: &mut [V; VECTORS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let k = V::splat(*f.decayed_k.get_unchecked(i));
        for (j, seen) in seen.iter_mut().enumerate() {
            *seen = V::load(block.add(i * COLUMNS + j * LANES)).mul_add(k, *seen);
        }
    }
}

/// Updates row `i`, and adds what it contributes to the result.
///
/// # Safety
///
/// As for [`Vector`]; the block and the factors have the row.
#[inline(always)]
unsafe fn renew<V: Vector>(
    f: &Factors<'_>,
    i: usize,
    block: *mut f32,
    delta: &[V; VECTORS],
    y: &mut [V; VECTORS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let decay = V::splat(*f.decay.get_unchecked(i));
        let (k, q) = (V::splat(*f.k.get_unchecked(i)), V::splat(*f.q.get_unchecked(i)));
        for (j, (delta, y)) in delta.iter().zip(y).enumerate() {
            let at = block.add(i * COLUMNS + j * LANES);
            let s = k.mul_add(*delta, V::load(at).mul(decay));
            s.store(at);
            *y = s.mul_add(q, *y);
        }
    }
}
