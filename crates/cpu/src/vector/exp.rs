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

/// `ln(1 + e^x)`, with the relative precision of f32. NaN stays NaN.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn softplus<V: Vector>(x: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let zero = V::splat(0.0);
        let y = exp(zero.sub(x).min(x));
        // ln(1 + y) = 2 atanh(z) with z = y / (2 + y), at most 1/3: eight terms of its series.
        let z = y.div(y.add(V::splat(2.0)));
        let square = z.mul(z);
        let mut p = V::splat(1.0 / 15.0);
        for c in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0, 1.0] {
            p = p.mul_add(square, V::splat(c));
        }
        z.add(z).mul_add(p, x.max(zero))
    }
}
