//! The micro-kernel of integer panels with many tokens on AVX2 without VNNI: a block of columns is
//! unpacked once into scratch, in the order that the inner loop reads, and stays in L1 while all
//! tokens are multiplied with it.
//!
//! Signed 8-bit codes become magnitudes `|w|` and sign masks, all ones for negative codes. `x ^
//! mask` is `x` or `-x - 1`, so the accumulator of a half block starts with the sum of the
//! magnitudes of its negative codes. With magnitudes up to 128 and `|x|` up to 127, the sum of two
//! products lies between -2 * 128 * 128 and 2 * 127 * 128, just inside an i16. Compared with
//! `vpsignb` and `vpabsb`, this takes a third of the work off the two ports that multiply. Bound,
//! per four columns, eight rows and token: four operations on three ports, plus five per block:
//! 12.3 cycles a block; measured 13.4.
//!
//! A group of four tokens shares each load of weights, and its accumulators stay in registers. A
//! tile has up to four groups.
//!
//! ```text
//! block of 32 columns: codes or magnitudes 512 | signs 512 | starts 2 x 16 i32 |
//!                      scales 2 x 16 f32 | minimums 2 x 16 f32
//! ```

use std::arch::x86_64::*;
use std::ops::Range;

use super::dense::{Weights, add_scaled};
use super::tile::{Tile, finish_from, partial_sums_ptr};
use crate::linear::activations::{BLOCK_COLS, Block};
use crate::linear::lanes::Lanes;
use crate::linear::layout::{Codes, IntegerLayout};
use crate::linear::simd::Avx2;
use crate::unroll::unrolled;

/// Bytes of a vector of a whole panel.
const VECTOR: usize = 64;
const SIGNS: usize = 8 * VECTOR;
const STARTS: usize = 2 * SIGNS;
const SCALES: usize = STARTS + 2 * VECTOR;
const MINS: usize = SCALES + 2 * VECTOR;
/// Bytes of an unpacked block.
pub(crate) const BYTES: usize = MINS + 2 * VECTOR;

/// Blocks by which activations are prefetched ahead: they come from L2.
const PREFETCH_BLOCKS: usize = 2;

/// Unpacks `cols`, whole spans of a panel.
///
/// # Safety
/// The panel has the columns, `to` has space for their blocks, and the instructions exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn unpack<K: IntegerLayout>(panel: *const u8, cols: Range<usize>, to: *mut u8) {
    // SAFETY: passed on.
    unsafe {
        unpack_half::<K, 0>(panel, cols.clone(), to);
        unpack_half::<K, 1>(panel, cols, to);
    }
}

/// One panel times `G` groups of `T` tokens.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for `cols / 32` unpacked blocks, `x` for the tokens of
/// as many, `out` and `bias` for `rows` rows; `partial_sums` unless these are all columns.
/// The instructions exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn tile<K: IntegerLayout, const G: usize, const T: usize>(tile: &Tile) {
    // SAFETY: passed on.
    unsafe {
        half::<K, 0, G, T>(tile);
        half::<K, 1, G, T>(tile);
    }
}

const fn is_signed<K: IntegerLayout>() -> bool {
    matches!(K::CODES, Codes::Centred { bits: 8, .. })
}

#[inline(always)]
unsafe fn unpack_half<K: IntegerLayout, const HALF: usize>(
    panel: *const u8,
    cols: Range<usize>,
    mut to: *mut u8,
) {
    // SAFETY: the caller vouches for the spans and the blocks.
    unsafe {
        for span in cols.start / K::COLS..cols.end / K::COLS {
            let span = panel.add(span * K::BYTES);
            let factors = K::factors::<Avx2<HALF, false>>(span);
            for block in 0..K::COLS / BLOCK_COLS {
                let weights = Weights::of::<K>(span, &factors, block);
                put::<HALF>(&weights, is_signed::<K>(), to);
                to = to.add(BYTES);
            }
        }
    }
}

/// Stores these rows' part of an unpacked block.
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

/// One panel times `G` groups of `T` tokens, for half of the rows.
#[inline(always)]
unsafe fn half<K: IntegerLayout, const HALF: usize, const G: usize, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the blocks, as the caller vouches; a prefetch takes any
    // address.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); T]; G];
        if !tile.is_first {
            for (group, sums) in sums.iter_mut().enumerate() {
                unrolled!(T, t => {
                    let from = partial_sums_ptr::<1>(tile, 0, group * T + t);
                    sums[t] = Avx2::<HALF, false>::from_f32(from.cast());
                });
            }
        }
        let (mut at, mut x) = (tile.panel, tile.x);
        for _ in 0..tile.cols / BLOCK_COLS {
            let mut tokens = x;
            for sums in &mut sums {
                if HALF == 0 {
                    let ahead = tokens.wrapping_add(PREFETCH_BLOCKS * tile.x_stride);
                    for line in (0..T * size_of::<Block>()).step_by(64) {
                        Avx2::<HALF, false>::prefetch(ahead.wrapping_add(line));
                    }
                }
                add_block::<K, HALF, T>(at, tokens.cast(), sums);
                tokens = tokens.add(T * size_of::<Block>());
            }
            (at, x) = (at.add(BYTES), x.add(tile.x_stride));
        }
        for (group, sums) in sums.into_iter().enumerate() {
            if tile.is_last {
                finish_from::<Avx2<HALF, false>, T>(tile, 0, group * T, sums);
            } else {
                unrolled!(T, t => {
                    Avx2::<HALF, false>::store(
                        sums[t],
                        partial_sums_ptr::<1>(tile, 0, group * T + t),
                    );
                });
            }
        }
    }
}

/// Adds the dot products of a block of weights with a block of each token.
#[inline(always)]
unsafe fn add_block<K: IntegerLayout, const HALF: usize, const T: usize>(
    at: *const u8,
    x: *const Block,
    sums: &mut [__m256; T],
) {
    // SAFETY: the caller vouches for the block and the tokens.
    unsafe {
        let dots = if is_signed::<K>() {
            [signed::<HALF, 0, T>(at, x), signed::<HALF, 1, T>(at, x)]
        } else {
            [unsigned::<K, HALF, 0, T>(at, x), unsigned::<K, HALF, 1, T>(at, x)]
        };
        let (scales, mins) = (factors::<HALF>(at.add(SCALES)), factors::<HALF>(at.add(MINS)));
        unrolled!(T, t => {
            let (dots, x) = ([dots[0][t], dots[1][t]], &*x.add(t));
            sums[t] = add_scaled::<Avx2<HALF, false>, K>(dots, &scales, &mins, x, sums[t]);
        });
    }
}

/// Reads the scales or the minimums of a block.
#[inline(always)]
unsafe fn factors<const HALF: usize>(at: *const u8) -> [__m256; 2] {
    // SAFETY: the caller vouches for the block.
    unsafe { [Avx2::<HALF, false>::from_f32(at), Avx2::<HALF, false>::from_f32(at.add(VECTOR))] }
}

/// An optimisation barrier. Without it the compiler reorders the loop to one token after the other,
/// which needs more registers for the weights of a block than there are.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn barrier(mut v: __m256i) -> __m256i {
    // SAFETY: the assembly is a comment.
    unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) v, options(nostack, preserves_flags)) };
    v
}

/// Four activation codes in every lane.
#[inline(always)]
unsafe fn broadcast(x: *const Block, step: usize) -> __m256i {
    // SAFETY: the caller vouches for the token and the step.
    unsafe {
        let codes = (*x).codes.as_ptr().cast::<i32>().add(step);
        _mm256_set1_epi32(codes.read_unaligned())
    }
}

/// The dot products of half a block of signed codes with each token.
#[inline(always)]
unsafe fn signed<const HALF: usize, const PART: usize, const T: usize>(
    at: *const u8,
    x: *const Block,
) -> [__m256; T] {
    // SAFETY: the caller vouches for the block and the tokens.
    unsafe {
        let start = Avx2::<HALF, false>::bytes(at.add(STARTS + PART * VECTOR));
        let mut ints = [start; T];
        unrolled!(4, i => {
            let step = 4 * PART + i;
            let magnitudes = Avx2::<HALF, false>::bytes(at.add(step * VECTOR));
            let signs = Avx2::<HALF, false>::bytes(at.add(SIGNS + step * VECTOR));
            unrolled!(T, t => {
                let x = _mm256_xor_si256(broadcast(x.add(t), step), signs);
                let pairs = _mm256_maddubs_epi16(magnitudes, x);
                let products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                ints[t] = barrier(_mm256_add_epi32(ints[t], products));
            });
        });
        floats(ints)
    }
}

/// The dot products of half a block of unsigned codes with each token.
#[inline(always)]
unsafe fn unsigned<K: IntegerLayout, const HALF: usize, const PART: usize, const T: usize>(
    at: *const u8,
    x: *const Block,
) -> [__m256; T] {
    let (bits, offset) = match K::CODES {
        Codes::Unsigned { bits } => (bits, None),
        Codes::Centred { bits, offset } => (bits, Some(offset)),
    };
    // A pair of products is below 2^(bits + 8), so an i16 holds the sum of 2^(7 - bits) pairs.
    let count = 1 << (7 - bits).min(2);
    // SAFETY: the caller vouches for the block and the tokens.
    unsafe {
        let mut ints = [_mm256_setzero_si256(); T];
        if let Some(offset) = offset {
            // From -128 times the sum to -offset times the sum.
            let right = _mm_cvtsi32_si128(7 - offset.ilog2() as i32);
            unrolled!(T, t => {
                let start = _mm256_set1_epi32((*x.add(t)).starts[PART]);
                ints[t] = _mm256_sra_epi32(start, right);
            });
        }
        let mut pairs = [_mm256_setzero_si256(); T];
        unrolled!(4, i => {
            let step = 4 * PART + i;
            let codes = Avx2::<HALF, false>::bytes(at.add(step * VECTOR));
            let (is_first, is_last) = (i % count == 0, i % count == count - 1);
            unrolled!(T, t => {
                let products = _mm256_maddubs_epi16(codes, broadcast(x.add(t), step));
                let sum = _mm256_add_epi16(pairs[t], products);
                pairs[t] = barrier(if is_first { products } else { sum });
                if is_last {
                    let products = _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
                    ints[t] = _mm256_add_epi32(ints[t], products);
                }
            });
        });
        floats(ints)
    }
}

#[inline(always)]
unsafe fn floats<const T: usize>(ints: [__m256i; T]) -> [__m256; T] {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let mut floats = [_mm256_setzero_ps(); T];
        unrolled!(T, t => { floats[t] = _mm256_cvtepi32_ps(ints[t]) });
        floats
    }
}
