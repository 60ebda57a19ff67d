//! Activations in the order of AMX's tile registers: bfloat16 rounded to nearest, ties to even, in
//! one or two parts. The second part is what rounding took off the first, rounded too. Per 32
//! columns it reads 128 bytes; bound by arithmetic.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use crate::amx::{TILE_BYTES, TILE_COLS};

/// Sets a row in `PARTS` parts. What is missing of the last 32 columns becomes zero.
///
/// # Safety
/// `start` has a step of `stride` bytes for each 32 columns, rounded up, with the parts of a step
/// one tile apart; the instructions exist.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn set_row<const PARTS: usize>(start: *mut u8, stride: usize, x: &[f32]) {
    for (step, x) in x.chunks(TILE_COLS).enumerate() {
        let present = u32::MAX >> (TILE_COLS - x.len());
        let masks = [present as u16, (present >> 16) as u16];
        // SAFETY: the masks exclude what is not there; the caller provides the memory.
        unsafe {
            let x = [
                _mm512_maskz_loadu_ps(masks[0], x.as_ptr()),
                _mm512_maskz_loadu_ps(masks[1], x.as_ptr().wrapping_add(TILE_COLS / 2)),
            ];
            let at = start.add(step * stride);
            let rounded = round(x);
            _mm512_storeu_si512(at.cast(), rounded);
            if PARTS == 2 {
                _mm512_storeu_si512(at.add(TILE_BYTES).cast(), round(rest(x, rounded)));
            }
        }
    }
}

/// Two vectors of f32 as one of bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn round(x: [__m512; 2]) -> __m512i {
    // SAFETY: the types have the same bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(x[1], x[0])) }
}

/// What rounding took off, exactly; zero where the rounded value is infinite or NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rest(x: [__m512; 2], rounded: __m512i) -> [__m512; 2] {
    let halves = [_mm512_castsi512_si256(rounded), _mm512_extracti64x4_epi64::<1>(rounded)];
    let infinity = _mm512_set1_ps(f32::INFINITY);
    let mut rest = x;
    for (rest, half) in rest.iter_mut().zip(halves) {
        let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half));
        let value = _mm512_castsi512_ps(wide);
        let is_finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(value), infinity);
        *rest = _mm512_maskz_sub_ps(is_finite, *rest, value);
    }
    rest
}
