//! The product of panels with a tile of tokens, for every kind of weight and level of instructions.
//! It knows pointers into one panel and one tile; how work is cut into tiles is its caller's.
//!
//! The order of arithmetic is part of the contract: every sum of a (row, token) pair is formed in
//! this order whatever the tile, so results do not depend on neighbours, threads or chunking, and
//! the levels with fused multiply-add agree bit for bit.
//!
//! Integer kinds, for each block of 32 columns in order:
//!
//! ```text
//! d[h] = f32(i32 dot of the codes of half h), for both halves of the block
//! one scale a block:    sum = fma(fma(d[1], x.scale[1], d[0] * x.scale[0]), scale, sum)
//! one scale a half:     for each h: sum = fma(d[h], scale[h] * x.scale[h], sum)
//! kinds with minimums:  sum = fma(min[g], minus the scaled sum of x's codes, sum), each group g
//! ```
//!
//! Float kinds, for each column in order: `sum = fma(w, x, sum)`; BF16 by pairs of columns where
//! the level says so, see `pairs`. A bias is added to the finished sum.

use std::sync::atomic::{Ordering, compiler_fence};

use super::activations::{BLOCK_COLS, Block, TILE_ROWS};
use super::kind::{Codes, FloatKind, IntegerKind};
use super::level::{Lanes, PANEL_ROWS};

/// Runs a block once for each index below `$count` (at most 16), unrolled without fail: the sums
/// that it indexes must stay in registers.
macro_rules! unrolled {
    ($count:expr, $index:ident => $body:block) => {
        unrolled!(@ $count, $index, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $count:expr, $index:ident, $body:block, $($value:literal)*) => {
        $(if $value < $count { let $index = $value; $body })*
    };
}
pub(crate) use unrolled;

pub(crate) mod columns;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
pub(crate) mod sparse;
#[cfg(target_arch = "x86_64")]
pub(crate) mod unpacked;

/// How far ahead of their use weights are asked for: memory takes about 100 ns, a core 20 GB/s.
const PREFETCH_BYTES: usize = 2048;

/// How far ahead integer weights are asked into the second-level cache: the few requests that the
/// first level may have open are then short ones. It helps what comes from memory, and costs a
/// little where a small model stays in the third-level cache.
const FAR_BYTES: usize = 4096;

/// The operands of one tile.
pub(crate) struct Tile {
    /// The first panel.
    pub(crate) panel: *const u8,
    /// Distance between panels in bytes.
    pub(crate) panel_bytes: usize,
    /// Columns to pass over.
    pub(crate) cols: usize,
    /// Whether sums begin at zero; if not, with what waits in `sums`.
    pub(crate) is_first: bool,
    /// Whether sums are complete; if not, they wait in `sums`.
    pub(crate) is_last: bool,
    /// `[tokens][panels]` of 16 sums, where the tile does not pass over all columns.
    pub(crate) sums: *mut f32,
    /// The first token's activations.
    pub(crate) x: *const u8,
    /// Distance between two column steps of the activations in bytes.
    pub(crate) x_stride: usize,
    /// Where the first panel's first row of each token goes.
    pub(crate) out: [*mut f32; TILE_ROWS],
    /// Rows to write, up to 16 times the number of panels.
    pub(crate) rows: usize,
    /// `[rows]` to add to the sums, or null.
    pub(crate) bias: *const f32,
}

/// One panel times `T` tokens, for the rows of the lanes `L`.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for a panel of `cols` columns, `x` for `T` tokens of
/// `cols / 32` blocks, `out` and `bias` for `rows` rows. The instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn integer<L: Lanes, K: IntegerKind, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the panel and the tokens' blocks, as the caller vouches.
    unsafe {
        let mut sums = [L::float(0.0); T];
        let (mut span, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols / K::COLS {
            let head = K::head::<L>(span);
            for block in 0..K::COLS / BLOCK_COLS {
                if T == 1 {
                    let bytes = K::BYTES * BLOCK_COLS / K::COLS;
                    let at = span.wrapping_add(block * bytes);
                    for line in 0..bytes.div_ceil(64) {
                        L::prefetch_far(at.wrapping_add(FAR_BYTES + 64 * line));
                        L::prefetch(at.wrapping_add(PREFETCH_BYTES + 64 * line));
                    }
                }
                let weights = Weights::of::<K>(span, &head, block);
                add_blocks::<L, K, T>(&weights, x.cast(), &mut sums);
                x = x.add(tile.x_stride);
            }
            span = span.add(K::BYTES);
        }
        finish::<L, T>(tile, 0, sums);
    }
}

/// A block of weights, unpacked.
struct Weights<L: Lanes> {
    codes: [L::Bytes; 8],
    /// One per group; the second is the first again where there is one group.
    scales: [L::Floats; 2],
    mins: [L::Floats; 2],
}

impl<L: Lanes> Weights<L> {
    /// # Safety
    /// As the functions of [`IntegerKind`].
    #[inline(always)]
    unsafe fn of<K: IntegerKind>(span: *const u8, head: &K::Head<L>, block: usize) -> Weights<L> {
        let last = K::GROUPS - 1;
        // SAFETY: passed on.
        unsafe {
            let mut codes = K::codes::<L>(span, block);
            if let Codes::Centred { bits, offset } = K::CODES {
                for codes in &mut codes {
                    *codes = L::centre(*codes, bits, offset);
                }
            }
            let scales = [K::scale(span, head, block, 0), K::scale(span, head, block, last)];
            let mins = [K::min(span, head, block, 0), K::min(span, head, block, last)];
            Weights { codes, scales, mins }
        }
    }
}

/// One block of 32 columns, used for all tokens.
#[inline(always)]
unsafe fn add_blocks<L: Lanes, K: IntegerKind, const T: usize>(
    weights: &Weights<L>,
    x: *const Block,
    sums: &mut [L::Floats; T],
) {
    // SAFETY: inside the tokens' blocks, as the caller of the tile vouches.
    unsafe {
        unrolled!(T, t => {
            sums[t] = add_block::<L, K>(weights, &*x.add(t), sums[t]);
            if t % 4 == 3 {
                // Interleaving more than four tokens would only cost registers.
                compiler_fence(Ordering::SeqCst);
            }
        });
    }
}

/// The integer dot of half a block, as floats. A function and no closure: a closure that is not
/// inlined is compiled without the level's instructions.
#[inline(always)]
unsafe fn half_dot<L: Lanes, K: IntegerKind, const HALF: usize>(
    weights: &Weights<L>,
    x: &Block,
) -> L::Floats {
    const STEPS: usize = 4;
    // SAFETY: the caller vouches for the instructions; a half's codes lie inside the block.
    unsafe {
        let codes = &weights.codes[HALF * STEPS..(HALF + 1) * STEPS];
        let x_codes = x.codes.as_ptr().add(4 * HALF * STEPS);
        L::to_floats(match K::CODES {
            Codes::Unsigned { bits } => L::dot(L::int(0), codes, bits, x_codes),
            Codes::Centred { bits, offset } => {
                L::centred_dot(x.starts[HALF], codes, bits, offset, x_codes)
            }
        })
    }
}

/// Adds the product of a block of weights with a block of one token.
#[inline(always)]
unsafe fn add_block<L: Lanes, K: IntegerKind>(
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

/// Adds the dots of both halves of a block with a block of one token, each times its scale, and the
/// minimums.
#[inline(always)]
unsafe fn add_scaled<L: Lanes, K: IntegerKind>(
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
        if K::MINS && K::GROUPS == 1 {
            sum = L::fma(mins[0], L::float(x.minus_scaled_sum), sum);
        } else if K::MINS {
            for (group, &min) in mins.iter().enumerate() {
                let scaled = x.scales[group] * (x.starts[group] >> 7) as f32;
                sum = L::fma(min, L::float(scaled), sum);
            }
        }
    }
    sum
}

/// Adds the dots of the halves of a block whose weights have one scale.
#[inline(always)]
unsafe fn add_halves<L: Lanes>(
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

/// `P` panels times `T` tokens, for the rows of the lanes `L`. Several panels hide the latency of
/// the additions where there are few tokens.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for `P` panels of `cols` columns, `x` for `T` tokens
/// of `cols` f32, `out` and `bias` for `rows` rows; `sums` unless these are the first and last
/// columns. The instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn float<L: Lanes, K: FloatKind, const P: usize, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the panels and the tokens' columns, as the caller vouches.
    unsafe {
        let mut sums = [[L::float(0.0); T]; P];
        if !tile.is_first {
            unrolled!(P, p => {
                unrolled!(T, t => { sums[p][t] = L::from_f32(waiting::<P>(tile, p, t).cast()) });
            });
        }
        let (mut panel, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols {
            let mut weights = [L::float(0.0); P];
            unrolled!(P, p => {
                let at = panel.add(p * tile.panel_bytes);
                if T == 1 {
                    L::prefetch(at.wrapping_add(PREFETCH_BYTES));
                }
                weights[p] = K::load::<L>(at);
            });
            // One token after the other: only one of them takes a register.
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
                unrolled!(T, t => { L::store(sums[p][t], waiting::<P>(tile, p, t)) });
            });
        }
    }
}

/// Where the sums of a panel and a token wait.
///
/// # Safety
/// `sums` has room for those of all panels and tokens.
#[inline(always)]
unsafe fn waiting<const P: usize>(tile: &Tile, panel: usize, token: usize) -> *mut f32 {
    // SAFETY: the caller vouches for the sums of all panels and tokens.
    unsafe { tile.sums.add((token * P + panel) * PANEL_ROWS) }
}

/// Writes `cols` columns of a panel as f32, `[cols][16 rows]`.
///
/// # Safety
/// `panel` has so many columns, `to` room for them. The instructions of `L` exist.
#[inline(always)]
pub(crate) unsafe fn widen<L: Lanes, K: FloatKind>(panel: *const u8, cols: usize, to: *mut u8) {
    for col in 0..cols {
        // SAFETY: as the caller vouches.
        unsafe {
            let weights = K::load::<L>(panel.add(col * PANEL_ROWS * K::BYTES));
            L::store(weights, to.cast::<f32>().add(col * PANEL_ROWS));
        }
    }
}

/// Adds the bias to the sums of one panel and writes them, as far as there are rows.
#[inline(always)]
unsafe fn finish<L: Lanes, const T: usize>(tile: &Tile, panel: usize, sums: [L::Floats; T]) {
    // SAFETY: passed on.
    unsafe { finish_from::<L, T>(tile, panel, 0, sums) }
}

/// The same for the tokens from `token` on.
#[inline(always)]
unsafe fn finish_from<L: Lanes, const T: usize>(
    tile: &Tile,
    panel: usize,
    token: usize,
    sums: [L::Floats; T],
) {
    let first = panel * PANEL_ROWS;
    let rows = PANEL_ROWS.min(tile.rows - first);
    // SAFETY: only rows below `tile.rows` are read or written, as the caller of the tile vouches.
    unsafe {
        let bias = tile.bias.wrapping_add(first);
        let has_bias = !tile.bias.is_null();
        unrolled!(T, i => {
            let (sums, out) = (sums[i], tile.out[token + i].add(first));
            if rows == PANEL_ROWS && !has_bias {
                L::store(sums, out);
            } else if rows == PANEL_ROWS {
                L::store(L::add(sums, L::from_f32(bias.cast())), out);
            } else {
                let mut lanes = [0.0; PANEL_ROWS];
                L::store(sums, lanes.as_mut_ptr());
                let lanes = lanes.iter().enumerate().take(rows).skip(L::FIRST);
                for (row, &sum) in lanes.take(L::COUNT) {
                    *out.add(row) = if has_bias { sum + *bias.add(row) } else { sum };
                }
            }
        });
    }
}
