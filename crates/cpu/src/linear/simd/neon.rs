//! The lanes in NEON: a register holds four rows, a quarter of a panel; with or without the int8
//! dot product of Armv8.2 (DotProd).
//!
//! A kernel of one token uses a vector of codes once and reads a whole panel as one stream: its
//! lanes have four registers. A kernel of several tokens keeps the codes of a block in registers:
//! its lanes are one register, and it runs once for each quarter of a panel.

#![allow(unsafe_op_in_unsafe_fn, reason = "the trait states the one condition of all functions")]

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::tables::{EXPANSIONS, SELECTED};
use crate::linear::lanes::Lanes;
use crate::memory;

/// The lanes of `COUNT` quarters of a panel from quarter `FIRST` on; `SDOT` if the processor has
/// the int8 dot product.
#[derive(Copy, Clone)]
pub(crate) struct Neon<const FIRST: usize, const COUNT: usize, const SDOT: bool>;

/// Adds to each lane the dot product of its four codes with the four of `x` from byte `4 * STEP`.
#[inline(always)]
unsafe fn add_dot<const STEP: u8>(sum: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    asm!(
        "sdot {sum:v}.4s, {codes:v}.16b, {x:v}.4b[{step}]",
        sum = inlateout(vreg) sum, codes = in(vreg) codes, x = in(vreg) x, step = const STEP,
        options(pure, nomem, nostack, preserves_flags)
    );
    sum
}

/// Adds to each lane the dot product of its four codes with those of `x` in the same lane.
#[inline(always)]
unsafe fn add_lane_dot(sum: int32x4_t, codes: uint8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    asm!(
        "sdot {sum:v}.4s, {codes:v}.16b, {x:v}.16b",
        sum = inlateout(vreg) sum, codes = in(vreg) codes, x = in(vreg) x,
        options(pure, nomem, nostack, preserves_flags)
    );
    sum
}

/// The four activation codes at `x` in every lane.
#[inline(always)]
unsafe fn broadcast(x: *const i8) -> int8x16_t {
    vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()))
}

/// The products of codes and activation codes: those of two lanes, then of the other two.
#[inline(always)]
unsafe fn products(codes: uint8x16_t, x: int8x16_t) -> [int16x8_t; 2] {
    let codes = vreinterpretq_s8_u8(codes);
    [vmull_s8(vget_low_s8(codes), vget_low_s8(x)), vmull_high_s8(codes, x)]
}

/// The same, added to `sums`.
#[inline(always)]
unsafe fn add_products(
    [low, high]: [int16x8_t; 2],
    codes: uint8x16_t,
    x: int8x16_t,
) -> [int16x8_t; 2] {
    let codes = vreinterpretq_s8_u8(codes);
    [vmlal_s8(low, vget_low_s8(codes), vget_low_s8(x)), vmlal_high_s8(high, codes, x)]
}

/// Adds the products of each lane, of which two neighbours' sum fits an i16.
#[inline(always)]
unsafe fn widen(sum: int32x4_t, [low, high]: [int16x8_t; 2]) -> int32x4_t {
    vpadalq_s16(sum, vpaddq_s16(low, high))
}

/// For each byte of a mask, the number of bits that are set in it and the bytes below.
#[inline(always)]
unsafe fn running_counts(mask: u64) -> u64 {
    let counts = vget_lane_u64::<0>(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(mask))));
    counts.wrapping_mul(0x0101_0101_0101_0101)
}

/// The bits of a mask that are set below byte `byte`, from its running counts.
#[inline(always)]
fn count_below(byte: usize, running: u64) -> usize {
    usize::from(((running << 8) >> (8 * byte)) as u8)
}

/// Expands eight packed bytes; those whose mask bit is clear are `GAP`.
#[inline(always)]
unsafe fn expand_8<const GAP: u8>(mask: u8, at: *const u8) -> uint8x8_t {
    let places = vcreate_u8(EXPANSIONS[usize::from(mask)]);
    vqtbx1_u8(vdup_n_u8(GAP), vcombine_u8(vld1_u8(at), vdup_n_u8(0)), places)
}

/// Expands eight packed f16; those whose mask bit is clear are zero.
#[inline(always)]
unsafe fn expand_f16_8(mask: u8, at: *const u8) -> [float32x4_t; 2] {
    let places = vcreate_u8(EXPANSIONS[usize::from(mask)]);
    // Twice the place, and one more; a place past the end stays there.
    let first = vqadd_u8(places, places);
    let both = vzip_u8(first, vqadd_u8(first, vdup_n_u8(1)));
    let halves = vqtbl1q_u8(vld1q_u8(at), vcombine_u8(both.0, both.1));
    let halves = vreinterpretq_f16_u8(halves);
    [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
}

impl<const FIRST: usize, const COUNT: usize, const SDOT: bool> Neon<FIRST, COUNT, SDOT> {
    /// Whether a vector of codes is used for several tokens, so that it pays to centre it.
    const CENTRES: bool = COUNT == 1;

    /// Loads 16 unsigned bytes, one for each row.
    #[inline(always)]
    unsafe fn unsigned(at: *const u8) -> [uint32x4_t; COUNT] {
        if COUNT == 4 {
            let bytes = vld1q_u8(at);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            let (a, b) = (vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low));
            let all = [a, b, vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)];
            return from_fn(|i| all[i]);
        }
        from_fn(|i| {
            let four = at.cast::<u32>().add(FIRST + i).read_unaligned();
            vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four.into()))))
        })
    }

    /// Loads 16 signed bytes, one for each row.
    #[inline(always)]
    unsafe fn signed(at: *const u8) -> [int32x4_t; COUNT] {
        if COUNT == 4 {
            let bytes = vld1q_s8(at.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let (a, b) = (vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low));
            let all = [a, b, vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)];
            return from_fn(|i| all[i]);
        }
        from_fn(|i| {
            let four = at.cast::<u32>().add(FIRST + i).read_unaligned();
            vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four.into()))))
        })
    }

    /// Loads 16 numbers of two bytes, one for each row.
    #[inline(always)]
    unsafe fn halves(at: *const u8) -> [uint16x4_t; COUNT] {
        from_fn(|i| vld1_u16(at.cast::<u16>().add(4 * (FIRST + i))))
    }
}

impl<const FIRST: usize, const COUNT: usize, const SDOT: bool> Lanes for Neon<FIRST, COUNT, SDOT> {
    type Bytes = [uint8x16_t; COUNT];
    type Ints = [int32x4_t; COUNT];
    type Floats = [float32x4_t; COUNT];

    const FIRST: usize = 4 * FIRST;
    const COUNT: usize = 4 * COUNT;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> Self::Bytes {
        from_fn(|i| vld1q_u8(at.add(16 * (FIRST + i))))
    }

    #[inline(always)]
    unsafe fn field<const RIGHT: u32, const LEFT: u32, const MASK: u8>(
        v: Self::Bytes,
    ) -> Self::Bytes {
        // The shifts take i32 parameters, which cannot be computed from these; a vector of counts
        // can, and becomes an immediate. They shift no bit into a neighbouring byte.
        let (right, left) = (vdupq_n_s8(-(RIGHT as i8)), vdupq_n_s8(LEFT as i8));
        let needs_mask = (0xff_u8 >> RIGHT << LEFT) & !MASK != 0;
        from_fn(|i| {
            let v = if RIGHT > 0 { vshlq_u8(v[i], right) } else { v[i] };
            let v = if LEFT > 0 { vshlq_u8(v, left) } else { v };
            if needs_mask { vandq_u8(v, vdupq_n_u8(MASK)) } else { v }
        })
    }

    #[inline(always)]
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        from_fn(|i| vorrq_u8(a[i], b[i]))
    }

    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], nibbles: Self::Bytes) -> Self::Bytes {
        let table = vld1q_u8(table.as_ptr().cast());
        from_fn(|i| vqtbl1q_u8(table, nibbles[i]))
    }

    #[inline(always)]
    unsafe fn int(value: i32) -> Self::Ints {
        [vdupq_n_s32(value); COUNT]
    }

    // No closures around the dot products: one that is not inlined is compiled without them.
    #[inline(always)]
    unsafe fn dot(start: Self::Ints, codes: &[Self::Bytes], bits: u32, x: *const i8) -> Self::Ints {
        let mut sums = start;
        if SDOT && let &[a, b, c, d] = codes {
            let x = vld1q_s8(x);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = add_dot::<1>(add_dot::<0>(*sum, a[i], x), b[i], x);
                *sum = add_dot::<3>(add_dot::<2>(*sum, c[i], x), d[i], x);
            }
            return sums;
        }
        if SDOT {
            for (step, codes) in codes.iter().enumerate() {
                let x = broadcast(x.add(4 * step));
                for (sum, &codes) in sums.iter_mut().zip(codes) {
                    *sum = add_lane_dot(*sum, codes, x);
                }
            }
            return sums;
        }
        // An i16 holds 2 * 4 * 31 * 127, 2 * 2 * 63 * 127 and 2 * 128 * 127.
        let together = [4, 2, 1][bits.saturating_sub(5).min(2) as usize];
        for (group, codes) in codes.chunks(together).enumerate() {
            let x = x.add(4 * together * group);
            for (i, sum) in sums.iter_mut().enumerate() {
                let mut pairs = products(codes[0][i], broadcast(x));
                for (step, codes) in codes.iter().enumerate().skip(1) {
                    pairs = add_products(pairs, codes[i], broadcast(x.add(4 * step)));
                }
                *sum = widen(*sum, pairs);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn centre(codes: Self::Bytes, bits: u32, offset: i32) -> Self::Bytes {
        if bits == 8 || !Self::CENTRES {
            return codes;
        }
        from_fn(|i| vsubq_u8(codes[i], vdupq_n_u8(offset as u8)))
    }

    #[inline(always)]
    unsafe fn centred_dot(
        start: i32,
        codes: &[Self::Bytes],
        bits: u32,
        offset: i32,
        x: *const i8,
    ) -> Self::Ints {
        Self::dot(Self::centred_start(start, bits, offset), codes, bits, x)
    }

    #[inline(always)]
    unsafe fn centred_start(start: i32, bits: u32, offset: i32) -> Self::Ints {
        Self::int(if bits == 8 || Self::CENTRES { 0 } else { (start >> 7) * offset })
    }

    #[inline(always)]
    unsafe fn centred_step(
        sum: Self::Ints,
        codes: Self::Bytes,
        bits: u32,
        x: *const i8,
    ) -> Self::Ints {
        Self::dot(sum, &[codes], bits, x)
    }

    #[inline(always)]
    unsafe fn sixteenth(v: Self::Ints) -> Self::Ints {
        from_fn(|i| vshrq_n_s32::<4>(v[i]))
    }

    #[inline(always)]
    unsafe fn to_floats(v: Self::Ints) -> Self::Floats {
        from_fn(|i| vcvtq_f32_s32(v[i]))
    }

    #[inline(always)]
    unsafe fn from_u8(at: *const u8) -> Self::Floats {
        let ints = Self::unsigned(at);
        from_fn(|i| vcvtq_f32_u32(ints[i]))
    }

    #[inline(always)]
    unsafe fn from_i8(at: *const u8) -> Self::Floats {
        Self::to_floats(Self::signed(at))
    }

    #[inline(always)]
    unsafe fn from_exponents(at: *const u8) -> Self::Floats {
        let exponents = Self::unsigned(at);
        from_fn(|i| vreinterpretq_f32_u32(vshlq_n_u32::<23>(exponents[i])))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> Self::Floats {
        let halves = Self::halves(at);
        from_fn(|i| vcvt_f32_f16(vreinterpret_f16_u16(halves[i])))
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> Self::Floats {
        let halves = Self::halves(at);
        from_fn(|i| vreinterpretq_f32_u32(vshll_n_u16::<16>(halves[i])))
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> Self::Floats {
        from_fn(|i| vld1q_f32(at.cast::<f32>().add(4 * (FIRST + i))))
    }

    #[inline(always)]
    unsafe fn float(value: f32) -> Self::Floats {
        [vdupq_n_f32(value); COUNT]
    }

    #[inline(always)]
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| vaddq_f32(a[i], b[i]))
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        from_fn(|i| vmulq_f32(a[i], b[i]))
    }

    #[inline(always)]
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        from_fn(|i| vfmaq_f32(c[i], a[i], b[i]))
    }

    #[inline(always)]
    unsafe fn store(v: Self::Floats, at: *mut f32) {
        for (i, v) in v.into_iter().enumerate() {
            vst1q_f32(at.add(4 * (FIRST + i)), v);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        memory::prefetch_l1(at);
    }

    // With the distance as part of the instruction: the compiler would compute the address of each
    // line first, and that of the codes from there, a sixth of all instructions.
    #[inline(always)]
    unsafe fn prefetch_lines<const AHEAD: usize>(at: *const u8, lines: usize) {
        macro_rules! prefetch_each {
            ($($line:literal)*) => {$(
                if lines > $line {
                    // Any address is valid: the instruction has no visible effect.
                    asm!(
                        "prfm pldl1keep, [{at}, #{distance}]",
                        at = in(reg) at, distance = const AHEAD + 64 * $line,
                        options(nostack, preserves_flags, readonly)
                    );
                }
            )*};
        }
        const {
            let is_encodable = AHEAD.is_multiple_of(8) && AHEAD + 64 * 15 <= 32_760;
            assert!(is_encodable, "what the instruction can hold");
        }
        assert!(lines <= 16, "a block has at most 16 cache lines");
        prefetch_each!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }

    // Not measured: kernels read one stream, which these processors prefetch into L2 themselves.
    #[inline(always)]
    unsafe fn prefetch_l2(_: *const u8) {}

    #[inline(always)]
    unsafe fn flip<const BITS: u8>(v: Self::Bytes) -> Self::Bytes {
        from_fn(|i| veorq_u8(v[i], vdupq_n_u8(BITS)))
    }

    #[inline(always)]
    unsafe fn store_bytes(v: Self::Bytes, at: *mut u8) {
        for (i, v) in v.into_iter().enumerate() {
            vst1q_u8(at.add(16 * (FIRST + i)), v);
        }
    }

    #[inline(always)]
    unsafe fn expand<const GAP: u8>(mask: u64, at: *const u8) -> Self::Bytes {
        let running = running_counts(mask);
        let expand = |byte: usize| {
            expand_8::<GAP>((mask >> (8 * byte)) as u8, at.add(count_below(byte, running)))
        };
        from_fn(|i| vcombine_u8(expand(2 * (FIRST + i)), expand(2 * (FIRST + i) + 1)))
    }

    #[inline(always)]
    unsafe fn select_two_four(masks: *const u8, x: *const i8) -> [Self::Bytes; 2] {
        let (table, x) = (vld1q_u8(SELECTED.as_ptr()), vld1q_u8(x.cast()));
        let shifts = vld1q_s32([0, -3, -6, -9].as_ptr());
        let step = |step: usize| masks.add(6 * step).cast::<u64>().read_unaligned();
        // Three bits of four rows, a row in each lane.
        let threes = |bits: u64, quarter: usize| {
            let bits = vdupq_n_u32((bits >> (12 * quarter)) as u32);
            vandq_u32(vshlq_u32(bits, shifts), vdupq_n_u32(7))
        };
        [0, 1].map(|pair| {
            let (first, second) = (step(2 * pair), step(2 * pair + 1));
            // Odd bytes take the second column, and the upper half the second step.
            let columns = vdupq_n_u32(0x0800_0800);
            let steps = vdupq_n_u8(8 * pair as u8);
            let steps = vorrq_u8(steps, vreinterpretq_u8_u32(vdupq_n_u32(0x0404_0000)));
            from_fn(|i| {
                let (first, second) = (threes(first, FIRST + i), threes(second, FIRST + i));
                let bits = vorrq_u32(first, vshlq_n_u32::<16>(second));
                let bits = vorrq_u32(bits, vshlq_n_u32::<8>(bits));
                let places = vreinterpretq_u8_u32(vorrq_u32(bits, columns));
                vqtbl1q_u8(x, vorrq_u8(vqtbl1q_u8(table, places), steps))
            })
        })
    }

    #[inline(always)]
    unsafe fn signed_dot<const ZERO: u8>(
        codes: [Self::Bytes; 2],
        x: [Self::Bytes; 2],
    ) -> Self::Ints {
        let mut sums = Self::int(0);
        for (codes, x) in codes.iter().zip(&x) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let codes = vsubq_u8(codes[i], vdupq_n_u8(ZERO));
                let x = vreinterpretq_s8_u8(x[i]);
                *sum = if SDOT {
                    add_lane_dot(*sum, codes, x)
                } else {
                    widen(*sum, products(codes, x))
                };
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn expand_f16(mask: u32, at: *const u8) -> [Self::Floats; 2] {
        let running = running_counts(mask.into());
        [0, 1].map(|column| {
            from_fn(|i| {
                let quarter = FIRST + i;
                let byte = 2 * column + quarter / 2;
                let at = at.add(2 * count_below(byte, running));
                expand_f16_8((mask >> (8 * byte)) as u8, at)[quarter % 2]
            })
        })
    }

    #[inline(always)]
    unsafe fn interleave(columns: [*const u8; 4]) -> [Self::Bytes; 4] {
        let quarters: [[uint8x16_t; 4]; COUNT] = from_fn(|i| {
            let [a, b, c, d] = columns.map(|column| vld1q_u8(column.add(16 * (FIRST + i))));
            let (ab, ab_high) = (vzip1q_u8(a, b), vzip2q_u8(a, b));
            let (cd, cd_high) = (vzip1q_u8(c, d), vzip2q_u8(c, d));
            let [ab, ab_high, cd, cd_high] =
                [ab, ab_high, cd, cd_high].map(|v| vreinterpretq_u16_u8(v));
            let first = [vzip1q_u16(ab, cd), vzip2q_u16(ab, cd)];
            let last = [vzip1q_u16(ab_high, cd_high), vzip2q_u16(ab_high, cd_high)];
            [first[0], first[1], last[0], last[1]].map(|v| vreinterpretq_u8_u16(v))
        });
        [0, 1, 2, 3].map(|panel| from_fn(|i| quarters[i][panel]))
    }

    #[inline(always)]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))))
    }
}
