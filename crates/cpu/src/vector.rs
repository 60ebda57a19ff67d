//! Sixteen f32 lanes, the same on every machine: one 512-bit register, two 256-bit ones, or an
//! array. Operations other than the matrix products are written once over [`Vector`]; the macro
//! [`dispatch`] compiles them for each level of instructions.

mod avx2;
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// The number of lanes.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 lanes.
///
/// # Safety
///
/// Every method must run inside a function compiled for the implementor's instructions, on a
/// processor that has them; pointers must be valid for sixteen elements.
pub(crate) trait Vector: Copy {
    /// Rows of which two vectors each fit the registers, with room for operands; at most 8.
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
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    /// `self * b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// To the nearest integer.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for an integral `n` from -126 to 127.
    unsafe fn scale_by_power(self, n: Self) -> Self;
    /// The sum of all lanes: halves first, the same at every level.
    unsafe fn sum(self) -> f32;
    /// The largest lane.
    unsafe fn largest(self) -> f32;
}

/// `e^x` to about two units in the last place; below -87 as at -87, some 1e-38.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp<V: Vector>(x: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let clamped = x.max(V::splat(-87.0)).min(V::splat(88.0));
        let n = clamped.mul(V::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts, so that n times the first is exact.
        let r = n.mul_add(V::splat(-0.693_359_4), clamped);
        let r = n.mul_add(V::splat(2.121_944_4e-4), r);
        let mut p = V::splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = p.mul_add(r, V::splat(c));
        }
        p.scale_by_power(n)
    }
}

/// Calls a function generic over [`Vector`], compiled for the instructions of a
/// [`crate::simd::Simd`].
///
/// `dispatch!(simd, name(a: A, b: B) -> R)` expands to the choice between three copies of
/// `name::<V>(a, b)`.
macro_rules! dispatch {
    ($simd:expr, $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma,avx2")]
        unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled for the instructions.
            unsafe { $name::<$crate::vector::Avx512>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled for the instructions.
            unsafe { $name::<$crate::vector::Avx2>($($arg),*) }
        }
        match $simd {
            // SAFETY: `Simd` only takes a value that the processor has.
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Simd::Avx512 | $crate::simd::Simd::Avx512Bf16 => unsafe {
                avx512($($arg),*)
            },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Simd::Avx2 | $crate::simd::Simd::AvxVnni => unsafe { avx2($($arg),*) },
            // SAFETY: arrays need no instructions.
            _ => unsafe { $name::<$crate::vector::Portable>($($arg),*) },
        }
    }};
}
pub(crate) use dispatch;
