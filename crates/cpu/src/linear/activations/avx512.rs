//! Int8 quantisation with AVX-512: the same bits as `block::quantize_block`, both halves of a block
//! at once. Per block it reads 128 bytes and executes about 60 instructions; bound by arithmetic.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use super::block::{BLOCK_COLS, Block, HALF, ROUND, SMALLEST};

/// # Safety
/// As `quantize_row`, on a processor with AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn quantize_row(start: *mut u8, stride: usize, x: &[f32]) {
    for (index, x) in x.as_chunks::<BLOCK_COLS>().0.iter().enumerate() {
        // SAFETY: the caller provides the memory; steps are multiples of 52 bytes, so Block is
        // aligned.
        unsafe { start.add(index * stride).cast::<Block>().write(quantize_block(x)) }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn quantize_block(x: &[f32; BLOCK_COLS]) -> Block {
    // SAFETY: two vectors of the 32 columns.
    let x = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(HALF))] };
    let largest = largest_bits(x);
    let is_finite = _mm_cmplt_epi32(largest, _mm_set1_epi32(f32::INFINITY.to_bits() as i32));
    let is_large = _mm_cmpgt_epi32(largest, _mm_set1_epi32(SMALLEST.to_bits() as i32 - 1));
    let usable = _mm_castsi128_ps(_mm_and_si128(is_finite, is_large));
    let (largest, most) = (_mm_castsi128_ps(largest), _mm_set1_ps(127.0));
    let fault = _mm_andnot_ps(_mm_castsi128_ps(is_finite), _mm_set1_ps(f32::NAN));
    let scales = _mm_or_ps(_mm_and_ps(_mm_div_ps(largest, most), usable), fault);
    let inverses = _mm_and_ps(_mm_div_ps(most, largest), usable);
    let codes = [
        round(x[0], _mm512_broadcastss_ps(inverses)),
        round(x[1], _mm512_broadcastss_ps(_mm_movehdup_ps(inverses))),
    ];
    let scales = [_mm_cvtss_f32(scales), _mm_cvtss_f32(_mm_movehdup_ps(scales))];
    let sums = [sum(codes[0]), sum(codes[1])];
    let mut block = Block {
        codes: [0; BLOCK_COLS],
        scales,
        minus_scaled_sum: 0.0 - scales[0] * sums[0] as f32 - scales[1] * sums[1] as f32,
        starts: sums.map(|sum| -128 * sum),
    };
    for (half, codes) in block.codes.as_chunks_mut::<HALF>().0.iter_mut().zip(codes) {
        // SAFETY: a half holds sixteen bytes.
        unsafe { _mm_storeu_si128(half.as_mut_ptr().cast(), codes) }
    }
    block
}

/// The largest |x| of each vector as bits, which order as the values do: the first in the even
/// lanes, the second in the odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn largest_bits(x: [__m512; 2]) -> __m128i {
    let (a, b) = (halved(x[0]), halved(x[1]));
    let both = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let both = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
    _mm_max_epi32(both, _mm_shuffle_epi32::<0x4e>(both))
}

/// The bits of |x|, the larger of two lanes each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn halved(x: __m512) -> __m256i {
    let bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff));
    _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64::<1>(bits))
}

/// The codes of a half; zeros where there is no inverse.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn round(x: __m512, inverse: __m512) -> __m128i {
    let usable = _mm512_cmp_ps_mask::<_CMP_NEQ_OQ>(inverse, _mm512_setzero_ps());
    let rounded = _mm512_add_ps(_mm512_maskz_mul_ps(usable, x, inverse), _mm512_set1_ps(ROUND));
    let origin = _mm512_set1_epi32(ROUND.to_bits() as i32);
    _mm512_cvtepi32_epi8(_mm512_sub_epi32(_mm512_castps_si512(rounded), origin))
}

/// The sum of sixteen codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn sum(codes: __m128i) -> i32 {
    // `psadbw` sums unsigned bytes.
    let shifted = _mm_xor_si128(codes, _mm_set1_epi8(i8::MIN));
    let sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
    let sum = _mm_add_epi32(sums, _mm_shuffle_epi32::<0x4e>(sums));
    _mm_cvtsi128_si32(sum) - 128 * HALF as i32
}
