//! Four 128-bit registers.

#![allow(unsafe_op_in_unsafe_fn, reason = "the trait states the one condition of all functions")]

use std::arch::aarch64::*;
use std::array::from_fn;

use super::lanes::Vector;

/// Sixteen lanes of NEON, which every 64-bit Arm processor has.
#[derive(Clone, Copy)]
pub(crate) struct Neon([float32x4_t; 4]);

impl Neon {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Neon(from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for Neon {
    const ROWS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Neon([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Neon(from_fn(|i| vld1q_f32(from.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        for (i, x) in self.0.into_iter().enumerate() {
            vst1q_f32(to.add(4 * i), x);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let load = |i| vreinterpret_f16_u16(vld1_u16(from.add(4 * i)));
        Neon(from_fn(|i| vcvt_f32_f16(load(i))))
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        for (i, x) in self.0.into_iter().enumerate() {
            vst1_u16(to.add(4 * i), vreinterpret_u16_f16(vcvt_f16_f32(x)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        let bytes = vld1q_s8(from);
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        let ints = [
            vmovl_s16(vget_low_s16(low)),
            vmovl_high_s16(low),
            vmovl_s16(vget_low_s16(high)),
            vmovl_high_s16(high),
        ];
        Neon(from_fn(|i| vcvtq_f32_s32(ints[i])))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| vaddq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| vsubq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| vmulq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| vdivq_f32(a, b))
    }
    // The instructions for a maximum and a minimum treat NaN in another way.
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Neon(from_fn(|i| vfmaq_f32(c.0[i], self.0[i], b.0[i])))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Neon(self.0.map(|x| vrndnq_f32(x)))
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, n: Self) -> Self {
        self.zip(n, |x, n| {
            let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
        })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        let x = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
        let x = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        vget_lane_f32::<0>(x) + vget_lane_f32::<1>(x)
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let [a, b, c, d] = self.0;
        vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, c), vmaxnmq_f32(b, d)))
    }
}
