//! The product of integer panels with many tokens in AVX2 alone: some columns of a panel are
//! unpacked once, into what the inner loop wants to read, and stay in the first-level cache while
//! all tokens pass over them. It knows one panel and one tile.
//!
//! Signed codes of 8 bits become magnitudes `|w|` and signs, all ones below zero. `x ^ sign` is `x`
//! or `-x - 1`, so that a half of a block begins with the magnitudes of its negative codes. With
//! magnitudes up to 128 and `|x|` up to 127, two products lie from -2 * 128 * 128 to 2 * 127 * 128:
//! just inside an i16. Against `vpsignb` with `vpabsb` that takes a third of the work away from the
//! two ports that multiply. Bound, per four columns, eight rows and token: four operations on three
//! ports; per block five more.
//!
//! ```text
//! block of 32 columns: codes or magnitudes 512 | signs 512 | starts 2 x 16 i32 |
//!                      scales 2 x 16 f32 | minimums 2 x 16 f32
//! ```

use std::arch::x86_64::*;
use std::ops::Range;

use super::{Tile, Weights, add_blocks, add_scaled, finish, waiting};
use crate::linear::activations::{BLOCK_COLS, Block};
use crate::linear::kind::{Codes, IntegerKind};
use crate::linear::level::{Avx2, Lanes};

/// Bytes of a vector of a whole panel.
const VECTOR: usize = 64;
const SIGNS: usize = 8 * VECTOR;
const STARTS: usize = 2 * SIGNS;
const SCALES: usize = STARTS + 2 * VECTOR;
const MINS: usize = SCALES + 2 * VECTOR;
/// Bytes of an unpacked block.
pub(crate) const BYTES: usize = MINS + 2 * VECTOR;

/// How many blocks ahead activations are asked for: they come from the second-level cache.
const AHEAD: usize = 2;

/// Writes `cols`, whole spans, of a panel as unpacked blocks.
///
/// # Safety
/// The panel has the columns, `to` room for their blocks, and the instructions exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn unpack<K: IntegerKind>(panel: *const u8, cols: Range<usize>, to: *mut u8) {
    // SAFETY: passed on.
    unsafe {
        unpack_half::<K, 0>(panel, cols.clone(), to);
        unpack_half::<K, 1>(panel, cols, to);
    }
}

/// One panel times `T` tokens.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for `cols / 32` unpacked blocks, `x` for `T` tokens of
/// as many, `out` and `bias` for `rows` rows; `sums` unless these are the first and last columns.
/// The instructions exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn tile<K: IntegerKind, const T: usize>(tile: &Tile) {
    // SAFETY: passed on.
    unsafe {
        half::<K, 0, T>(tile);
        half::<K, 1, T>(tile);
    }
}

const fn is_signed<K: IntegerKind>() -> bool {
    matches!(K::CODES, Codes::Centred { bits: 8, .. })
}

#[inline(always)]
unsafe fn unpack_half<K: IntegerKind, const HALF: usize>(
    panel: *const u8,
    cols: Range<usize>,
    mut to: *mut u8,
) {
    // SAFETY: the caller vouches for the spans and the blocks.
    unsafe {
        for span in cols.start / K::COLS..cols.end / K::COLS {
            let span = panel.add(span * K::BYTES);
            let head = K::head::<Avx2<HALF, false>>(span);
            for block in 0..K::COLS / BLOCK_COLS {
                let weights = Weights::of::<K>(span, &head, block);
                put::<HALF>(&weights, is_signed::<K>(), to);
                to = to.add(BYTES);
            }
        }
    }
}

/// Writes these rows' part of a block.
#[inline(always)]
unsafe fn put<const HALF: usize>(
    weights: &Weights<Avx2<HALF, false>>,
    is_signed: bool,
    to: *mut u8,
) {
    // SAFETY: the caller vouches for the block and the instructions.
    unsafe {
        let mut starts = [_mm256_setzero_si256(); 2];
        unrolled!(8, step => {
            let mut codes = weights.codes[step];
            if is_signed {
                let signs = _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes);
                codes = _mm256_abs_epi8(codes);
                Avx2::<HALF, false>::store_bytes(signs, to.add(SIGNS + step * VECTOR));
                let negative = _mm256_and_si256(codes, signs);
                let pairs = _mm256_maddubs_epi16(negative, _mm256_set1_epi8(1));
                let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                starts[step / 4] = _mm256_add_epi32(starts[step / 4], sums);
            }
            Avx2::<HALF, false>::store_bytes(codes, to.add(step * VECTOR));
        });
        unrolled!(2, i => {
            Avx2::<HALF, false>::store_bytes(starts[i], to.add(STARTS + i * VECTOR));
            Avx2::<HALF, false>::store(weights.scales[i], to.add(SCALES + i * VECTOR).cast());
            Avx2::<HALF, false>::store(weights.mins[i], to.add(MINS + i * VECTOR).cast());
        });
    }
}

/// One panel times `T` tokens, for half of the rows.
#[inline(always)]
unsafe fn half<K: IntegerKind, const HALF: usize, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the blocks, as the caller vouches; what is asked for need not
    // exist.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); T];
        if !tile.is_first {
            unrolled!(T, t => {
                sums[t] = Avx2::<HALF, false>::from_f32(waiting::<1>(tile, 0, t).cast());
            });
        }
        let (mut at, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols / BLOCK_COLS {
            if HALF == 0 {
                let ahead = x.wrapping_add(AHEAD * tile.x_stride);
                for line in (0..T * size_of::<Block>()).step_by(64) {
                    Avx2::<HALF, false>::prefetch(ahead.wrapping_add(line));
                }
            }
            if is_signed::<K>() {
                add_signed::<K, HALF, T>(at, x.cast(), &mut sums);
            } else {
                let weights = load::<HALF>(at);
                add_blocks::<_, K, T>(&weights, x.cast(), &mut sums);
            }
            (at, x) = (at.add(BYTES), x.add(tile.x_stride));
        }
        if tile.is_last {
            finish::<Avx2<HALF, false>, T>(tile, 0, sums);
        } else {
            unrolled!(T, t => {
                Avx2::<HALF, false>::store(sums[t], waiting::<1>(tile, 0, t));
            });
        }
    }
}

/// Reads a block of unsigned codes.
#[inline(always)]
unsafe fn load<const HALF: usize>(at: *const u8) -> Weights<Avx2<HALF, false>> {
    // SAFETY: the caller vouches for the block.
    unsafe {
        let mut codes = [_mm256_setzero_si256(); 8];
        unrolled!(8, step => { codes[step] = Avx2::<HALF, false>::bytes(at.add(step * VECTOR)) });
        let [scales, mins] = factors::<HALF>(at);
        Weights { codes, scales, mins }
    }
}

/// Reads the scales and the minimums of a block.
#[inline(always)]
unsafe fn factors<const HALF: usize>(at: *const u8) -> [[__m256; 2]; 2] {
    // SAFETY: the caller vouches for the block.
    unsafe {
        [
            [
                Avx2::<HALF, false>::from_f32(at.add(SCALES)),
                Avx2::<HALF, false>::from_f32(at.add(SCALES + VECTOR)),
            ],
            [
                Avx2::<HALF, false>::from_f32(at.add(MINS)),
                Avx2::<HALF, false>::from_f32(at.add(MINS + VECTOR)),
            ],
        ]
    }
}

/// Adds the product of a block of signed codes with a block of each token.
#[inline(always)]
unsafe fn add_signed<K: IntegerKind, const HALF: usize, const T: usize>(
    at: *const u8,
    x: *const Block,
    sums: &mut [__m256; T],
) {
    // SAFETY: the caller vouches for the block and the tokens.
    unsafe {
        let mut dots = [[_mm256_setzero_ps(); 2]; T];
        unrolled!(2, part => {
            let start = Avx2::<HALF, false>::bytes(at.add(STARTS + part * VECTOR));
            let mut ints = [start; T];
            unrolled!(4, i => {
                let step = 4 * part + i;
                let magnitudes = Avx2::<HALF, false>::bytes(at.add(step * VECTOR));
                let signs = Avx2::<HALF, false>::bytes(at.add(SIGNS + step * VECTOR));
                // Tokens inside, so that they share the loads.
                unrolled!(T, t => {
                    let codes = (*x.add(t)).codes.as_ptr().cast::<i32>().add(step);
                    let x = _mm256_xor_si256(_mm256_set1_epi32(codes.read_unaligned()), signs);
                    let pairs = _mm256_maddubs_epi16(magnitudes, x);
                    let products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                    ints[t] = _mm256_add_epi32(ints[t], products);
                });
            });
            unrolled!(T, t => { dots[t][part] = _mm256_cvtepi32_ps(ints[t]) });
        });
        let [scales, mins] = factors::<HALF>(at);
        unrolled!(T, t => {
            let x = &*x.add(t);
            sums[t] = add_scaled::<Avx2<HALF, false>, K>(dots[t], &scales, &mins, x, sums[t]);
        });
    }
}
