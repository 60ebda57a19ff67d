//! The micro-kernels of dense panels, for every packed layout and instruction set: integer dot
//! products with int8 activations, and fused multiply-adds with f32 ones. Bound by memory with one
//! token, by arithmetic with many; `layout` states the costs of each. Weights are prefetched in any
//! case: without that, even sixteen tokens wait for them longer than they compute.

use std::sync::atomic::{Ordering, compiler_fence};

use super::tile::{PREFETCH_BYTES, Tile, finish, partial_sums_ptr};
use crate::linear::activations::{BLOCK_COLS, Block};
use crate::linear::lanes::{Lanes, PANEL_ROWS};
use crate::linear::layout::{Codes, FloatLayout, IntegerLayout};
use crate::unroll::unrolled;

/// How far ahead integer weights are prefetched into L2, so that misses of L1 are short and hold
/// its few line-fill buffers for less time. Gains where weights come from memory; costs a little
/// where a small model stays in L3.
const L2_PREFETCH_BYTES: usize = 4096;

/// One panel times `T` tokens, for the panel rows that `L` covers: all 16, or with narrow registers
/// 8 or 4, so that callers run it for each half or quarter.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a panel of `cols` columns, `x` for `T` tokens of
/// `cols / 32` blocks, `out` and `bias` for `rows` rows. The instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: IntegerLayout, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the panel and the tokens' blocks, as the caller vouches.
    unsafe {
        let mut sums = [L::float(0.0); T];
        let (mut span, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols / K::COLS {
            let factors = K::factors::<L>(span);
            for block in 0..K::COLS / BLOCK_COLS {
                let bytes = K::BYTES * BLOCK_COLS / K::COLS;
                // Spreads the prefetches of a span over its blocks.
                let prefetch_at = span.wrapping_add(block * bytes);
                for line in 0..bytes.div_ceil(64) {
                    L::prefetch_l2(prefetch_at.wrapping_add(L2_PREFETCH_BYTES + 64 * line));
                }
                L::prefetch_lines::<PREFETCH_BYTES>(prefetch_at, bytes.div_ceil(64));
                let weights = Weights::of::<K>(span, &factors, block);
                add_blocks::<L, K, T>(&weights, x.cast(), &mut sums);
                x = x.add(tile.x_stride);
            }
            span = span.add(K::BYTES);
        }
        finish::<L, T>(tile, 0, sums);
    }
}

/// A block of weights in registers.
pub(super) struct Weights<L: Lanes> {
    pub(super) codes: [L::Bytes; 8],
    /// One per group; both are the same if there is one group.
    pub(super) scales: [L::Floats; 2],
    pub(super) mins: [L::Floats; 2],
}

impl<L: Lanes> Weights<L> {
    /// # Safety
    /// As the functions of [`IntegerLayout`].
    #[inline(always)]
    pub(super) unsafe fn of<K: IntegerLayout>(
        span: *const u8,
        factors: &[L::Floats; 2],
        block: usize,
    ) -> Weights<L> {
        let last = K::GROUPS - 1;
        // SAFETY: passed on.
        unsafe {
            let mut codes = K::codes::<L>(span, block);
            if let Codes::Centred { bits, offset } = K::CODES {
                for codes in &mut codes {
                    *codes = L::centre(*codes, bits, offset);
                }
            }
            let scales =
                [K::scale::<L>(span, factors, block, 0), K::scale::<L>(span, factors, block, last)];
            let mins =
                [K::min::<L>(span, factors, block, 0), K::min::<L>(span, factors, block, last)];
            Weights { codes, scales, mins }
        }
    }
}

/// Adds the dot products of one block of 32 columns with the blocks of all tokens.
#[inline(always)]
unsafe fn add_blocks<L: Lanes, K: IntegerLayout, const T: usize>(
    weights: &Weights<L>,
    x: *const Block,
    sums: &mut [L::Floats; T],
) {
    // SAFETY: inside the tokens' blocks, as the caller of the tile vouches.
    unsafe {
        unrolled!(T, t => {
            sums[t] = add_block::<L, K>(weights, &*x.add(t), sums[t]);
            if t % 4 == 3 {
                // Keeps the compiler from interleaving more tokens, which would spill registers.
                compiler_fence(Ordering::SeqCst);
            }
        });
    }
}

/// The integer dot product of half a block, as floats. Not a closure: one that is not inlined is
/// compiled without the target features.
#[inline(always)]
unsafe fn half_dot<L: Lanes, K: IntegerLayout, const COL_HALF: usize>(
    weights: &Weights<L>,
    x: &Block,
) -> L::Floats {
    const STEPS: usize = 4;
    // SAFETY: the caller vouches for the instructions; a half's codes lie inside the block.
    unsafe {
        let codes = &weights.codes[COL_HALF * STEPS..(COL_HALF + 1) * STEPS];
        let x_codes = x.codes.as_ptr().add(4 * COL_HALF * STEPS);
        L::to_floats(match K::CODES {
            Codes::Unsigned { bits } => L::dot(L::int(0), codes, bits, x_codes),
            Codes::Centred { bits, offset } => {
                L::centred_dot(x.starts[COL_HALF], codes, bits, offset, x_codes)
            }
        })
    }
}

/// Adds the dot product of a block of weights with a block of one token.
#[inline(always)]
unsafe fn add_block<L: Lanes, K: IntegerLayout>(
    weights: &Weights<L>,
    x: &Block,
    sum: L::Floats,
) -> L::Floats {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let halves = [half_dot::<L, K, 0>(weights, x), half_dot::<L, K, 1>(weights, x)];
        add_scaled::<L, K>(halves, &weights.scales, &weights.mins, x, sum)
    }
}

/// Adds the dot products of both halves of a block, each times its scale, and subtracts the
/// minimums times the sums of the activations.
#[inline(always)]
pub(super) unsafe fn add_scaled<L: Lanes, K: IntegerLayout>(
    halves: [L::Floats; 2],
    scales: &[L::Floats; 2],
    mins: &[L::Floats; 2],
    x: &Block,
    mut sum: L::Floats,
) -> L::Floats {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        if K::GROUPS == 1 {
            sum = add_halves::<L>(halves, x, scales[0], sum);
        } else {
            for (group, &half) in halves.iter().enumerate() {
                let scale = L::mul(scales[group], L::float(x.scales[group]));
                sum = L::fma(half, scale, sum);
            }
        }
        if K::HAS_MINS && K::GROUPS == 1 {
            sum = L::fma(mins[0], L::float(x.minus_scaled_sum), sum);
        } else if K::HAS_MINS {
            for (group, &min) in mins.iter().enumerate() {
                // `starts` is -128 times the sum of the group's codes.
                let scaled = x.scales[group] * (x.starts[group] >> 7) as f32;
                sum = L::fma(min, L::float(scaled), sum);
            }
        }
    }
    sum
}

/// Adds the dot products of the halves of a block whose weights have one scale.
#[inline(always)]
pub(super) unsafe fn add_halves<L: Lanes>(
    halves: [L::Floats; 2],
    x: &Block,
    scale: L::Floats,
    sum: L::Floats,
) -> L::Floats {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let x_scales = [L::float(x.scales[0]), L::float(x.scales[1])];
        let both = L::fma(halves[1], x_scales[1], L::mul(halves[0], x_scales[0]));
        L::fma(both, scale, sum)
    }
}

/// `P` panels times `T` tokens, for the panel rows that `L` covers. Several panels hide the latency
/// of the additions where there are few tokens.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for `P` panels of `cols` columns, `x` for `T` tokens
/// of `cols` f32, `out` and `bias` for `rows` rows; `partial_sums` unless these are all columns.
/// The instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: FloatLayout, const P: usize, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the panels and the tokens' columns, as the caller vouches.
    unsafe {
        let mut sums = [[L::float(0.0); T]; P];
        if !tile.is_first {
            unrolled!(P, p => {
                unrolled!(T, t => {
                    sums[p][t] = L::from_f32(partial_sums_ptr::<P>(tile, p, t).cast());
                });
            });
        }
        let (mut panel, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols {
            let mut weights = [L::float(0.0); P];
            unrolled!(P, p => {
                let at = panel.add(p * tile.panel_bytes);
                L::prefetch_lines::<PREFETCH_BYTES>(at, 1);
                weights[p] = K::load::<L>(at);
            });
            // One broadcast activation at a time, to save registers.
            unrolled!(T, t => {
                let x = L::float(*x.cast::<f32>().add(t));
                unrolled!(P, p => { sums[p][t] = L::fma(weights[p], x, sums[p][t]) });
            });
            panel = panel.add(PANEL_ROWS * K::BYTES);
            x = x.add(tile.x_stride);
        }
        if tile.is_last {
            unrolled!(P, p => { finish::<L, T>(tile, p, sums[p]) });
        } else {
            unrolled!(P, p => {
                unrolled!(T, t => { L::store(sums[p][t], partial_sums_ptr::<P>(tile, p, t)) });
            });
        }
    }
}

/// Converts `cols` columns of a panel to f32, `[cols][16 rows]`.
///
/// # Safety
/// `panel` has the columns, `to` has space for them, and the instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn to_f32<L: Lanes, K: FloatLayout>(panel: *const u8, cols: usize, to: *mut u8) {
    for col in 0..cols {
        // SAFETY: as the caller vouches.
        unsafe {
            let weights = K::load::<L>(panel.add(col * PANEL_ROWS * K::BYTES));
            L::store(weights, to.cast::<f32>().add(col * PANEL_ROWS));
        }
    }
}
