//! The lanes in AVX-512: one register holds all rows of a panel. `vpdpbusd` multiplies and adds
//! four int8 pairs per lane; its activation operand is broadcast from memory at no cost.

#![allow(unsafe_op_in_unsafe_fn, reason = "the trait states the one condition of all functions")]

use std::arch::x86_64::*;

use crate::linear::lanes::Lanes;

mod two_four;

/// 16 lanes in 512-bit registers.
#[derive(Copy, Clone)]
pub(crate) struct Avx512;

/// An optimisation barrier that keeps a load separate from its use: on AMD's processors, an
/// expansion from memory takes three times the work of one from a register.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn loaded(mut v: __m512i) -> __m512i {
    std::arch::asm!("/* {0} */", inout(zmm_reg) v, options(pure, nomem, nostack, preserves_flags));
    v
}

#[inline(always)]
unsafe fn table(bytes: &'static [u8; 64]) -> __m512i {
    _mm512_loadu_si512(bytes.as_ptr().cast())
}

impl Lanes for Avx512 {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    const FIRST: usize = 0;
    const COUNT: usize = 16;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        _mm512_loadu_si512(at.cast())
    }

    #[inline(always)]
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(v: __m512i) -> __m512i {
        let v = if RIGHT > 0 { _mm512_srli_epi16::<RIGHT>(v) } else { v };
        let v = if LEFT > 0 { _mm512_slli_epi16::<LEFT>(v) } else { v };
        _mm512_and_si512(v, _mm512_set1_epi8(MASK as i8))
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], nibbles: __m512i) -> __m512i {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, nibbles)
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> __m512i {
        _mm512_set1_epi32(value)
    }

    #[inline(always)]
    unsafe fn dot(start: __m512i, codes: &[__m512i], _: u32, x: *const i8) -> __m512i {
        let mut sum = start;
        for (step, &codes) in codes.iter().enumerate() {
            let x = x.add(4 * step).cast::<i32>().read_unaligned();
            sum = _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(x));
        }
        sum
    }

    #[inline(always)]
    unsafe fn centre(codes: __m512i, _: u32, offset: i32) -> __m512i {
        // The instruction takes unsigned codes. With an offset of 128 for all layouts, the initial
        // accumulator of a dot product is a plain load.
        _mm512_add_epi8(codes, _mm512_set1_epi8((128 - offset) as i8))
    }

    #[inline(always)]
    unsafe fn centred_dot(start: i32, codes: &[__m512i], _: u32, _: i32, x: *const i8) -> __m512i {
        Self::dot(Self::int(start), codes, 8, x)
    }

    #[inline(always)]
    unsafe fn centred_start(start: i32, _: u32, _: i32) -> __m512i {
        Self::int(start)
    }

    #[inline(always)]
    unsafe fn centred_step(sum: __m512i, codes: __m512i, _: u32, x: *const i8) -> __m512i {
        Self::dot(sum, &[codes], 8, x)
    }

    #[inline(always)]
    unsafe fn sixteenth(v: __m512i) -> __m512i {
        _mm512_srai_epi32::<4>(v)
    }

    #[inline(always)]
    unsafe fn to_floats(v: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(v)
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())))
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> __m512 {
        let exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponents))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> __m512 {
        _mm512_loadu_ps(at.cast())
    }

    #[inline(always)]
    unsafe fn float(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn store(v: __m512, at: *mut f32) {
        _mm512_storeu_ps(at, v);
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn prefetch_l2(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }

    #[inline(always)]
    unsafe fn flip<const BITS: u8>(v: __m512i) -> __m512i {
        _mm512_xor_si512(v, _mm512_set1_epi8(BITS as i8))
    }

    #[inline(always)]
    unsafe fn store_bytes(v: __m512i, at: *mut u8) {
        _mm512_storeu_si512(at.cast(), v);
    }

    #[inline(always)]
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> __m512i {
        let (gaps, left) = (_mm512_set1_epi8(GAP as i8), _mm512_loadu_si512(at.cast()));
        _mm512_mask_expand_epi8(gaps, mask, loaded(left))
    }

    #[inline(always)]
    unsafe fn select_two_four(masks: *const u8, x: *const i8) -> [__m512i; 2] {
        let x = _mm512_broadcast_i32x4(_mm_loadu_si128(x.cast()));
        let x = _mm512_shuffle_epi8(x, table(&two_four::CHOICES));
        let masks = _mm512_loadu_si512(masks.cast());
        let masks = _mm512_permutexvar_epi8(table(&two_four::SPREAD), masks);
        let mut pairs = [x; 2];
        for (pair, selected) in pairs.iter_mut().enumerate() {
            let bits = _mm512_multishift_epi64_epi8(table(&two_four::SHIFTS[pair]), masks);
            let (threes, chosen) = (_mm512_set1_epi8(7), table(&two_four::CHOSEN[pair]));
            // (bits & threes) | chosen
            let chosen = _mm512_ternarylogic_epi32::<0xea>(bits, threes, chosen);
            *selected = _mm512_permutexvar_epi8(chosen, x);
        }
        pairs
    }

    #[inline(always)]
    unsafe fn signed_dot<const ZERO: u8>(codes: [__m512i; 2], x: [__m512i; 2]) -> __m512i {
        let zeros = _mm512_set1_epi8(ZERO as i8);
        let none = _mm512_setzero_si512();
        let sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, codes[0], x[0]), codes[1], x[1]);
        let over = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, zeros, x[0]), zeros, x[1]);
        _mm512_sub_epi32(sum, over)
    }

    #[inline(always)]
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [__m512; 2] {
        let left = loaded(_mm512_loadu_si512(at.cast()));
        let both = _mm512_maskz_expand_epi16(mask, left);
        let (first, second) = (_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both));
        [_mm512_cvtph_ps(first), _mm512_cvtph_ps(second)]
    }

    #[inline(always)]
    unsafe fn interleave(columns: [*const u8; 4]) -> [__m512i; 4] {
        let [a, b, c, d] = columns.map(|column| _mm512_loadu_si512(column.cast()));
        let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
        [
            _mm512_unpacklo_epi16(ab, cd),
            _mm512_unpackhi_epi16(ab, cd),
            _mm512_unpacklo_epi16(ab_high, cd_high),
            _mm512_unpackhi_epi16(ab_high, cd_high),
        ]
    }

    #[inline(always)]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into())))
    }

    #[inline(always)]
    unsafe fn spread(bits: u64) -> u64 {
        _pdep_u64(bits, 0x7777_7777_7777_7777)
    }
}
