//! Activation functions of a row, and gated linear units. Row-local, bound by arithmetic: most take
//! an exponential and a division.

use bodkin_model::{Act, Xielu};

use super::rows::{Binary, map, update};
use crate::isa::Isa;
use crate::vector::{Vector, dispatch, exp, softplus};

/// A function of one vector.
trait Function: Copy {
    /// # Safety
    ///
    /// As for [`Vector`].
    unsafe fn of<V: Vector>(self, x: V) -> V;
}

/// `f(a)`; ignores `b`.
#[derive(Clone, Copy)]
struct Alone<F>(F);

impl<F: Function> Binary for Alone<F> {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, a: V, _: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { self.0.of(a) }
    }
}

/// `f(a) * b`.
#[derive(Clone, Copy)]
struct Gated<F>(F);

impl<F: Function> Binary for Gated<F> {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, a: V, b: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe { self.0.of(a).mul(b) }
    }
}

/// `a` becomes `f(a)`, or `f(a) * b`.
#[inline(always)]
unsafe fn apply<V: Vector, F: Function>(f: F, a: &mut [f32], b: Option<&[f32]>) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        match b {
            Some(b) => update::<V>(a, b, Gated(f)),
            None => map::<V>(a, Alone(f)),
        }
    }
}

/// The table of functions of one value: the plan's name and the formula.
macro_rules! functions {
    ($($act:ident |$x:ident| $formula:expr;)*) => {
        $(
            #[derive(Clone, Copy)]
            struct $act;

            impl Function for $act {
                #[inline(always)]
                unsafe fn of<V: Vector>(self, $x: V) -> V {
                    #[allow(unused_unsafe, reason = "one formula is the value itself")]
                    // SAFETY: the caller keeps the contract of `Vector`.
                    unsafe { $formula }
                }
            }
        )*

        /// `a` becomes `act(a)`, or `act(a) * b`.
        fn run(isa: Isa, act: Act, a: &mut [f32], b: Option<&[f32]>) {
            match act {
                $(Act::$act => {
                    let f = $act;
                    dispatch!(isa, apply::<$act>(f: $act, a: &mut [f32], b: Option<&[f32]>));
                })*
                Act::Xielu(f) => {
                    dispatch!(isa, apply::<Xielu>(f: Xielu, a: &mut [f32], b: Option<&[f32]>));
                }
                Act::ClampedSwish => {
                    let b = b.expect("this function is of two values");
                    dispatch!(isa, clamped_swish(a: &mut [f32], b: &[f32]));
                }
            }
        }
    };
}

functions! {
    Identity |x| x;
    Silu |x| gated(x, x);
    Sigmoid |x| gated(V::splat(1.0), x);
    Gelu |x| {
        let half = x.mul(V::splat(0.5));
        half.add(half.mul(erf(x.mul(V::splat(std::f32::consts::FRAC_1_SQRT_2)))))
    };
    GeluTanh |x| {
        // 0.5 (1 + tanh y) is the logistic function of 2 y.
        const LINEAR: f32 = 2.0 * 0.797_884_6;
        const CUBIC: f32 = LINEAR * 0.044_715;
        gated(x, x.mul(x.mul(x).mul_add(V::splat(CUBIC), V::splat(LINEAR))))
    };
    ReluSquared |x| {
        let x = V::splat(0.0).max(x);
        x.mul(x)
    };
    Softplus |x| softplus(x);
}

impl Function for Xielu {
    #[inline(always)]
    unsafe fn of<V: Vector>(self, x: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe {
            let zero = V::splat(0.0);
            let (above, below) = (zero.max(x), zero.min(x));
            // 1 below zero, without a branch: |x| / |x|, and 0 elsewhere.
            let size = x.max(zero.sub(x)).max(V::splat(f32::MIN_POSITIVE));
            let is_below = zero.sub(below).div(size);
            let curve = exp(below.min(V::splat(self.eps))).sub(V::splat(1.0)).sub(below);
            let curve = curve.mul(is_below).mul(V::splat(self.negative));
            let line = x.mul_add(V::splat(self.beta), curve);
            above.mul(above).mul_add(V::splat(self.positive), line)
        }
    }
}

/// `x` becomes `act(x)`.
pub(crate) fn act(isa: Isa, act: Act, x: &mut [f32]) {
    run(isa, act, x, None);
}

/// `gate` becomes `act(gate) * up`.
pub(crate) fn glu(isa: Isa, act: Act, gate: &mut [f32], up: &[f32]) {
    run(isa, act, gate, Some(up));
}

/// `act(gate) * up`, where each gate is for one of equal parts of the row.
pub(crate) fn glu_by_part(isa: Isa, act: Act, gates: &[f32], up: &[f32], out: &mut [f32]) {
    let len = up.len() / gates.len();
    let parts = up.chunks_exact(len).zip(out.chunks_exact_mut(len));
    for (gate, (up, out)) in gates.iter().zip(parts) {
        let mut factor = [*gate];
        run(isa, act, &mut factor, None);
        out.iter_mut().zip(up).for_each(|(y, x)| *y = factor[0] * x);
    }
}

#[inline(always)]
unsafe fn clamped_swish<V: Vector>(gate: &mut [f32], up: &[f32]) {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { update::<V>(gate, up, ClampedSwish) }
}

/// GPT-OSS's gate, see [`Act::ClampedSwish`].
#[derive(Clone, Copy)]
struct ClampedSwish;

impl Binary for ClampedSwish {
    #[inline(always)]
    unsafe fn apply<V: Vector>(self, gate: V, up: V) -> V {
        // SAFETY: the caller keeps the contract of `Vector`.
        unsafe {
            let limit = V::splat(7.0);
            let gate = limit.min(gate);
            let up = V::splat(-7.0).max(limit.min(up)).add(V::splat(1.0));
            gated(gate, gate.mul(V::splat(1.702))).mul(up)
        }
    }
}

/// `x` times the logistic function of `y`.
#[inline(always)]
unsafe fn gated<V: Vector>(x: V, y: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe { x.div(V::splat(1.0).add(exp(V::splat(0.0).sub(y)))) }
}

/// The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
unsafe fn erf<V: Vector>(x: V) -> V {
    // SAFETY: the caller keeps the contract of `Vector`.
    unsafe {
        let one = V::splat(1.0);
        let size = x.max(V::splat(0.0).sub(x));
        let t = one.div(size.mul_add(V::splat(0.327_591_1), one));
        let mut p = V::splat(1.061_405_4);
        for c in [-1.453_152, 1.421_413_7, -0.284_496_72, 0.254_829_6] {
            p = p.mul_add(t, V::splat(c));
        }
        let value = one.sub(p.mul(t).mul(exp(V::splat(0.0).sub(size.mul(size)))));
        // The sign of x, without a branch: x / |x|, and 0 where both are.
        value.mul(x.div(size.max(V::splat(f32::MIN_POSITIVE))))
    }
}
