//! An array, for any processor.

use half::f16;

use super::lanes::{LANES, Vector};

/// Sixteen lanes that the compiler vectorises as it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    /// Folds the upper half onto the lower until one lane is left.
    #[inline]
    fn fold(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut x = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] = f(x[i], x[i + half]);
            }
        }
        x[0]
    }
}

impl Vector for Portable {
    const ROWS: usize = 2;

    #[inline]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; LANES])
    }
    #[inline]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller says that sixteen elements are there.
        Portable(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller says that there is room for sixteen elements.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller says that sixteen elements are there.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Portable(from_f16(halves))
    }
    #[inline]
    unsafe fn store_f16(self, to: *mut u16) {
        let halves = self.0.map(|x| f16::from_f32(x).to_bits());
        // SAFETY: the caller says that there is room for sixteen elements.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(halves) }
    }
    #[inline]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller says that sixteen elements are there.
        Portable(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Portable(fma(self.0, b.0, c.0))
    }
    #[inline]
    unsafe fn round(self) -> Self {
        Portable(self.0.map(f32::round_ties_even))
    }
    #[inline]
    unsafe fn scale_by_power(self, n: Self) -> Self {
        self.zip(n, |x, n| x * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline]
    unsafe fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }
    #[inline]
    unsafe fn largest(self) -> f32 {
        self.fold(f32::max)
    }
}

/// `a * b + c` in each lane, rounded once.
///
/// x86-64 has no instruction for it below AVX2, and a call for each lane took half of all time. In
/// f64 the product is exact, and rounding the sum there first changes a result only where it ends
/// halfway between two numbers of f32, or outside of its normal numbers: those are called.
#[inline]
pub(crate) fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    if cfg!(not(target_arch = "x86_64")) {
        return fma_of_each(a, b, c);
    }
    let sums: [f64; LANES] =
        std::array::from_fn(|i| f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i]));
    let results = sums.map(|sum| sum as f32);
    let is_exact = |i: usize| {
        let is_halfway = sums[i].to_bits() as u32 & ((1 << 29) - 1) == 1 << 28;
        let exponent = results[i].to_bits() << 1 >> 24;
        // The smallest normal exponent may have been rounded up to.
        let is_normal = exponent.wrapping_sub(2) < 255 - 2;
        !is_halfway & (is_normal | (sums[i] == 0.0))
    };
    let are_exact = (0..LANES).fold(true, |all, i| all & is_exact(i));
    if are_exact { results } else { fma_of_each(a, b, c) }
}

#[cold]
#[inline(never)]
fn fma_of_each(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
}

/// The numbers of halves. A half's bits, shifted to where f32 has its exponent and mantissa, are
/// the number divided by 2^112, below the normal numbers of halves too.
#[inline]
pub(crate) fn from_f16(halves: [u16; LANES]) -> [f32; LANES] {
    halves.map(|half| {
        let half = u32::from(half);
        let size = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
        // Halves have their own largest exponent for infinity and what is not a number.
        let largest = if size >= 65536.0 { 255 << 23 } else { 0 };
        f32::from_bits(size.to_bits() | largest | (half & 0x8000) << 16)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiplications_and_additions_are_rounded_once() {
        // All exponents, few bits in the mantissa: sums cancel, end halfway, or leave the range.
        let mut state = 1u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bits = (state >> 32) as u32;
            let mantissa = [0x7f_ffff, 0x40_0000, 0x00_0003, 0x7f_f000][bits as usize & 3];
            f32::from_bits(bits & !0x7f_ffff | (state >> 9) as u32 & mantissa)
        };
        for round in 0..100_000 {
            let (a, b) = ([(); LANES].map(|()| number()), [(); LANES].map(|()| number()));
            // Every second time the sum's bits lie right below the product's.
            let near = |i: usize| a[i] * b[i] * f32::from_bits((127 - 24 - i as u32 % 2) << 23);
            let c: [f32; LANES] =
                std::array::from_fn(|i| if round % 2 == 0 { number() } else { near(i) });
            check_fma(a, b, c);
        }
        // A product right below the half of the smallest number, added to an odd multiple of it.
        let tiny = f32::from_bits((127 - 75) << 23);
        let (above, below) = (1.0 + f32::EPSILON * 256.0, 1.0 - f32::EPSILON * 256.0);
        let odd = f32::from_bits(0x40_0001);
        check_fma([above * tiny; LANES], [below * tiny; LANES], [odd; LANES]);
    }

    fn check_fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) {
        for (i, found) in fma(a, b, c).into_iter().enumerate() {
            let wanted = a[i].mul_add(b[i], c[i]);
            let same = found.to_bits() == wanted.to_bits() || wanted.is_nan() && found.is_nan();
            assert!(same, "{} * {} + {}: {found:e}, not {wanted:e}", a[i], b[i], c[i]);
        }
    }

    #[test]
    fn every_half_is_its_number() {
        for half in 0..=u16::MAX {
            let (found, wanted) = (from_f16([half; LANES])[0], f16::from_bits(half).to_f32());
            let same = found.to_bits() == wanted.to_bits() || wanted.is_nan() && found.is_nan();
            assert!(same, "{half:#x}: {found}, not {wanted}");
        }
    }
}
