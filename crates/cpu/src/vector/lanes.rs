//! The vector type that row operations and attention are written over.

/// The number of lanes.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 lanes.
///
/// # Safety
///
/// Every method must run inside a function compiled for the implementor's instructions, on a
/// processor that has them; pointers must be valid for sixteen elements.
pub(crate) trait Vector: Copy {
    /// Rows of two vectors each that fit the registers beside the operands; at most 8.
    const ROWS: usize;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Reads IEEE half-precision numbers.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Writes IEEE half-precision numbers, rounded to nearest, ties to even.
    unsafe fn store_f16(self, to: *mut u16);
    /// Reads signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// The larger lane; `other` where one is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller lane; `other` where one is NaN.
    unsafe fn min(self, other: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// To the nearest integer.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for an integral `n` from -126 to 127.
    unsafe fn scale_by_power(self, n: Self) -> Self;
    /// The sum of all lanes by halving, in the same order on every instruction set.
    unsafe fn sum(self) -> f32;
    /// The largest lane.
    unsafe fn largest(self) -> f32;
}
