//! The exponential function and what derives from it.

use super::lanes::Vector;

/// `e^x` to about two units in the last place; below -87 as at -87, some 1e-38. NaN stays NaN.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp<V: Vector>(x: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let clamped = V::splat(88.0).min(V::splat(-87.0).max(x));
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
