//! The micro-kernel of BF16 panels with activations rounded to BF16: `vdpbf16ps`, two columns at a
//! time. `isa` decides which processors gain by it.
//!
//! Per two columns and 16 rows: 64 bytes, one load, one permutation that interleaves the two
//! columns, and one dot instruction per token, whose activation operand is broadcast from memory.
//! Bound by memory with one token, by the dot instructions with many. For each pair of columns in
//! order, the instruction adds the two products to the sum; it flushes denormals to zero.

use std::arch::x86_64::*;

use super::tile::{PREFETCH_BYTES, Tile, finish};
use crate::linear::lanes::PANEL_ROWS;
use crate::linear::simd::Avx512;
use crate::unroll::unrolled;

/// Tile shapes, `(tokens, panels)`, as `MicroKernels::FLOAT_PANELS`.
pub(crate) const SHAPES: &[(usize, usize)] = &[(1, 4), (2, 4), (4, 4), (8, 3)];

/// Bytes of a column of a panel.
const COLUMN_BYTES: usize = 2 * PANEL_ROWS;

/// The permutation that interleaves two columns of 16 values.
pub(super) const INTERLEAVED: [u16; 32] = {
    let mut places = [0; 32];
    let mut row = 0;
    while row < PANEL_ROWS {
        places[2 * row] = row as u16;
        places[2 * row + 1] = (PANEL_ROWS + row) as u16;
        row += 1;
    }
    places
};

/// `P` panels times `T` tokens.
///
/// # Safety
/// The pointers of `tile` are valid: `panel` for `P` panels of `cols` columns, `x` for `T` tokens
/// of `cols / 2` pairs, rounded up, `out` and `bias` for `rows` rows. The instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,fma,f16c")]
pub(crate) unsafe fn tile<const P: usize, const T: usize>(tile: &Tile) {
    // SAFETY: the loop walks exactly the panels and the tokens' pairs, as the caller vouches.
    unsafe {
        let places = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
        let mut sums = [[_mm512_setzero_ps(); T]; P];
        let (mut panel, mut x) = (tile.panel, tile.x);
        for pair in 0..tile.cols.div_ceil(2) {
            let mut weights = [_mm512_setzero_si512(); P];
            unrolled!(P, p => {
                let at = panel.add(p * tile.panel_bytes);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES).cast());
                let both = if 2 * pair + 1 < tile.cols {
                    _mm512_loadu_si512(at.cast())
                } else {
                    _mm512_zextsi256_si512(_mm256_loadu_si256(at.cast()))
                };
                weights[p] = _mm512_permutexvar_epi16(places, both);
            });
            unrolled!(T, t => {
                let x = _mm512_set1_epi32(*x.cast::<i32>().add(t));
                unrolled!(P, p => { sums[p][t] = dot(sums[p][t], weights[p], x) });
            });
            panel = panel.wrapping_add(2 * COLUMN_BYTES);
            x = x.wrapping_add(tile.x_stride);
        }
        unrolled!(P, p => { finish::<Avx512, T>(tile, p, sums[p]) });
    }
}

/// `sum` plus the dot product of two weights with two activations, in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot(sum: __m512, weights: __m512i, x: __m512i) -> __m512 {
    // SAFETY: the types have the same bits.
    let (weights, x) = unsafe {
        (
            std::mem::transmute::<__m512i, __m512bh>(weights),
            std::mem::transmute::<__m512i, __m512bh>(x),
        )
    };
    _mm512_dpbf16_ps(sum, weights, x)
}
