//! The lanes in AVX2: a register holds half a panel, eight rows; with or without the int8 dot
//! product instruction of AVX-VNNI.

#![allow(unsafe_op_in_unsafe_fn, reason = "the trait states the one condition of all functions")]

use std::arch::x86_64::*;

use super::tables::{EXPANSIONS, SELECTED};
use crate::linear::lanes::Lanes;

/// Eight lanes in 256-bit registers: the `HALF`-th half (0 or 1) of a panel, `VNNI` if the
/// processor has AVX-VNNI.
#[derive(Copy, Clone)]
pub(crate) struct Avx2<const HALF: usize, const VNNI: bool>;

/// The four activation codes at `x` in every lane.
#[inline(always)]
unsafe fn broadcast(x: *const i8) -> __m256i {
    _mm256_set1_epi32(x.cast::<i32>().read_unaligned())
}

/// Adds neighbouring pairs of i16.
#[inline(always)]
unsafe fn widen(pairs: __m256i) -> __m256i {
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

/// The dot products of four signed codes with activation codes, in each lane.
#[inline(always)]
unsafe fn signed_products(codes: __m256i, x: __m256i) -> __m256i {
    // |w| * (x with the sign of w); two products reach 2 * 128 * 127, just inside an i16.
    let x = _mm256_sign_epi8(x, codes);
    widen(_mm256_maddubs_epi16(_mm256_abs_epi8(codes), x))
}

#[inline(always)]
unsafe fn expansion_of(mask: u8) -> __m128i {
    _mm_cvtsi64_si128(EXPANSIONS[usize::from(mask)] as i64)
}

/// Expands eight packed bytes, xored with `GAP`; bytes whose mask bit is clear are zero.
#[inline(always)]
unsafe fn expand_8<const GAP: u8>(mask: u8, at: *const u8) -> __m128i {
    let left = _mm_xor_si128(_mm_loadl_epi64(at.cast()), _mm_set1_epi8(GAP as i8));
    _mm_shuffle_epi8(left, expansion_of(mask))
}

/// The same for sixteen bytes.
#[inline(always)]
unsafe fn expand_16<const GAP: u8>(mask: u16, at: *const u8) -> __m128i {
    let low = expand_8::<GAP>(mask as u8, at);
    let at = at.add((mask as u8).count_ones() as usize);
    let high = expand_8::<GAP>((mask >> 8) as u8, at);
    _mm_unpacklo_epi64(low, high)
}

/// Expands eight packed f16 to floats; those whose mask bit is clear are zero.
#[inline(always)]
unsafe fn expand_f16_8(mask: u8, at: *const u8) -> __m256 {
    let order = _mm256_cvtepi8_epi32(expansion_of(mask));
    let left = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
    // The shuffle is negative where the mask bit is clear.
    let gaps = _mm256_castsi256_ps(_mm256_srai_epi32::<31>(order));
    _mm256_andnot_ps(gaps, _mm256_permutevar8x32_ps(left, order))
}

/// Three bits of eight rows, a row in each lane.
#[inline(always)]
unsafe fn threes(masks: *const u8) -> __m256i {
    let bits = _mm256_set1_epi32(masks.cast::<i32>().read_unaligned());
    let bits = _mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21));
    _mm256_and_si256(bits, _mm256_set1_epi32(7))
}

impl<const HALF: usize, const VNNI: bool> Lanes for Avx2<HALF, VNNI> {
    type Bytes = __m256i;
    type Ints = __m256i;
    type Floats = __m256;

    const FIRST: usize = 8 * HALF;
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m256i {
        _mm256_loadu_si256(at.add(32 * HALF).cast())
    }

    #[inline(always)]
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(v: __m256i) -> __m256i {
        // The shifts take i32 parameters, which cannot be computed from these; a vector of counts
        // can, and becomes an immediate.
        let v = if RIGHT > 0 { _mm256_srl_epi16(v, _mm_cvtsi32_si128(RIGHT as i32)) } else { v };
        let v = if LEFT > 0 { _mm256_sll_epi16(v, _mm_cvtsi32_si128(LEFT as i32)) } else { v };
        _mm256_and_si256(v, _mm256_set1_epi8(MASK as i8))
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], nibbles: __m256i) -> __m256i {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, nibbles)
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> __m256i {
        _mm256_set1_epi32(value)
    }

    #[inline(always)]
    unsafe fn dot(start: __m256i, codes: &[__m256i], bits: u32, x: *const i8) -> __m256i {
        let mut sum = start;
        if VNNI {
            for (step, &codes) in codes.iter().enumerate() {
                sum = _mm256_dpbusd_avx_epi32(sum, codes, broadcast(x.add(4 * step)));
            }
            return sum;
        }
        // A pair of products is below 2^(bits + 8), so an i16 holds the sum of 2^(7 - bits) pairs.
        let together = 1 << (7 - bits).min(3);
        for (group, codes) in codes.chunks(together).enumerate() {
            let x = x.add(4 * together * group);
            let mut pairs = _mm256_maddubs_epi16(codes[0], broadcast(x));
            for (step, &codes) in codes.iter().enumerate().skip(1) {
                let products = _mm256_maddubs_epi16(codes, broadcast(x.add(4 * step)));
                pairs = _mm256_add_epi16(pairs, products);
            }
            sum = _mm256_add_epi32(sum, widen(pairs));
        }
        sum
    }

    #[inline(always)]
    unsafe fn centre(codes: __m256i, bits: u32, _: i32) -> __m256i {
        // VNNI takes unsigned codes: add 128, and take 128 sums off at the start.
        if VNNI && bits == 8 { _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN)) } else { codes }
    }

    #[inline(always)]
    unsafe fn centred_dot(
        start: i32,
        codes: &[__m256i],
        bits: u32,
        offset: i32,
        x: *const i8,
    ) -> __m256i {
        let mut sum = Self::centred_start(start, bits, offset);
        if bits < 8 || VNNI {
            return Self::dot(sum, codes, bits, x);
        }
        for (step, &codes) in codes.iter().enumerate() {
            sum = Self::centred_step(sum, codes, bits, x.add(4 * step));
        }
        sum
    }

    #[inline(always)]
    unsafe fn centred_start(start: i32, bits: u32, offset: i32) -> __m256i {
        match bits {
            0..8 => Self::int((start >> 7) * offset),
            _ => Self::int(if VNNI { start } else { 0 }),
        }
    }

    #[inline(always)]
    unsafe fn centred_step(sum: __m256i, codes: __m256i, bits: u32, x: *const i8) -> __m256i {
        if bits < 8 || VNNI {
            return Self::dot(sum, &[codes], bits, x);
        }
        _mm256_add_epi32(sum, signed_products(codes, broadcast(x)))
    }

    #[inline(always)]
    unsafe fn sixteenth(v: __m256i) -> __m256i {
        _mm256_srai_epi32::<4>(v)
    }

    #[inline(always)]
    unsafe fn to_floats(v: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(v)
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> __m256 {
        let bytes = _mm_loadl_epi64(at.add(8 * HALF).cast());
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> __m256 {
        let bytes = _mm_loadl_epi64(at.add(8 * HALF).cast());
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> __m256 {
        let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(8 * HALF).cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponents))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * HALF).cast()))
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> __m256 {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(16 * HALF).cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> __m256 {
        _mm256_loadu_ps(at.add(32 * HALF).cast())
    }

    #[inline(always)]
    unsafe fn float(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn store(v: __m256, at: *mut f32) {
        _mm256_storeu_ps(at.add(8 * HALF), v);
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
    unsafe fn flip<const BITS: u8>(v: __m256i) -> __m256i {
        _mm256_xor_si256(v, _mm256_set1_epi8(BITS as i8))
    }

    #[inline(always)]
    unsafe fn store_bytes(v: __m256i, at: *mut u8) {
        _mm256_storeu_si256(at.add(32 * HALF).cast(), v);
    }

    #[inline(always)]
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> __m256i {
        let before = if HALF == 1 { (mask as u32).count_ones() } else { 0 };
        let (at, mask) = (at.add(before as usize), (mask >> (32 * HALF)) as u32);
        let low = expand_16::<GAP>(mask as u16, at);
        let at = at.add((mask as u16).count_ones() as usize);
        let high = expand_16::<GAP>((mask >> 16) as u16, at);
        Self::flip::<GAP>(_mm256_set_m128i(high, low))
    }

    #[inline(always)]
    unsafe fn select_two_four(masks: *const u8, x: *const i8) -> [__m256i; 2] {
        let masks = masks.add(3 * HALF);
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(SELECTED.as_ptr().cast()));
        let mut pairs = [table; 2];
        for (pair, selected) in pairs.iter_mut().enumerate() {
            let (first, second) = (threes(masks.add(12 * pair)), threes(masks.add(12 * pair + 6)));
            let bits = _mm256_or_si256(first, _mm256_slli_epi32::<16>(second));
            let bits = _mm256_or_si256(bits, _mm256_slli_epi32::<8>(bits));
            // Odd bytes take the second column, and the upper half the second step.
            let places = _mm256_or_si256(bits, _mm256_set1_epi32(0x0800_0800));
            let places = _mm256_shuffle_epi8(table, places);
            let places = _mm256_or_si256(places, _mm256_set1_epi32(0x0404_0000));
            let x = x.add(8 * pair).cast::<i64>().read_unaligned();
            *selected = _mm256_shuffle_epi8(_mm256_set1_epi64x(x), places);
        }
        pairs
    }

    #[inline(always)]
    unsafe fn signed_dot<const ZERO: u8>(codes: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
        let (zeros, none) = (_mm256_set1_epi8(ZERO as i8), _mm256_setzero_si256());
        if VNNI {
            let sum = _mm256_dpbusd_avx_epi32(none, codes[0], x[0]);
            let over = _mm256_dpbusd_avx_epi32(none, zeros, x[0]);
            let sum = _mm256_dpbusd_avx_epi32(sum, codes[1], x[1]);
            return _mm256_sub_epi32(sum, _mm256_dpbusd_avx_epi32(over, zeros, x[1]));
        }
        let first = signed_products(_mm256_sub_epi8(codes[0], zeros), x[0]);
        let second = signed_products(_mm256_sub_epi8(codes[1], zeros), x[1]);
        _mm256_add_epi32(first, second)
    }

    #[inline(always)]
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [__m256; 2] {
        let first = (mask as u16).count_ones() as usize;
        let columns = [(mask as u16, at), ((mask >> 16) as u16, at.add(2 * first))];
        columns.map(|(mask, at)| {
            let before = if HALF == 1 { (mask as u8).count_ones() } else { 0 };
            expand_f16_8((mask >> (8 * HALF)) as u8, at.add(2 * before as usize))
        })
    }

    #[inline(always)]
    unsafe fn interleave(columns: [*const u8; 4]) -> [__m256i; 4] {
        let [a, b, c, d] = columns.map(|column| Self::bytes(column));
        let (ab, cd) = (_mm256_unpacklo_epi8(a, b), _mm256_unpacklo_epi8(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_epi8(a, b), _mm256_unpackhi_epi8(c, d));
        [
            _mm256_unpacklo_epi16(ab, cd),
            _mm256_unpackhi_epi16(ab, cd),
            _mm256_unpacklo_epi16(ab_high, cd_high),
            _mm256_unpackhi_epi16(ab_high, cd_high),
        ]
    }

    #[inline(always)]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into())))
    }
}
