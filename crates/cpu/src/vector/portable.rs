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
        Portable(halves.map(|h| f16::from_bits(h).to_f32()))
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
        Portable(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
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
