// Activation functions.

// Numbered as `activation` in lower.rs has them.
const SILU: u32 = 1u;
const SIGMOID: u32 = 2u;
const GELU: u32 = 3u;
const GELU_TANH: u32 = 4u;
const RELU_SQUARED: u32 = 5u;
const SOFTPLUS: u32 = 6u;
const XIELU: u32 = 7u;
const CLAMPED_SWISH: u32 = 8u;

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-x));
}

// `tanh` that does not overflow.
fn tanh_of(x: f32) -> f32 {
    let e = exp(-2.0 * abs(x));
    return sign(x) * (1.0 - e) / (1.0 + e);
}

// `ln(1 + x)` for x from 0: the rounding of the sum is divided out.
fn log1p(x: f32) -> f32 {
    let sum = 1.0 + x;
    let kept = sum - 1.0;
    if kept == 0.0 {
        return x;
    }
    return log(sum) * (x / kept);
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        return x;
    }
    return log1p(exp(x));
}

// `exp(x) - 1` for x up to 0.
fn expm1(x: f32) -> f32 {
    if x > -0.25 {
        // Taylor's series: the next term is below 2^-32 of the sum.
        var sum = 1.0;
        for (var i = 9; i > 1; i--) {
            sum = 1.0 + sum * x / f32(i);
        }
        return x * sum;
    }
    return exp(x) - 1.0;
}

// The error function: its Maclaurin series near 0, and a continued fraction of the rest elsewhere.
fn erf(x: f32) -> f32 {
    let a = abs(x);
    if a < 2.0 {
        var term = a;
        var sum = a;
        for (var i = 1; i < 24; i++) {
            term *= -a * a / f32(i);
            sum += term / f32(2 * i + 1);
        }
        return sign(x) * sum * 1.1283792;
    }
    if a > 4.0 {
        return sign(x);
    }
    var fraction = a;
    for (var i = 24; i > 0; i--) {
        fraction = a + 0.5 * f32(i) / fraction;
    }
    return sign(x) * (1.0 - exp(-a * a) * 0.5641896 / fraction);
}

// `act(x)`, with the parameters of xIELU from parameter `at` on.
fn activate(act: u32, x: f32, at: u32) -> f32 {
    switch act {
        case SILU: { return x * sigmoid(x); }
        case SIGMOID: { return sigmoid(x); }
        case GELU: { return 0.5 * x * (1.0 + erf(x * 0.70710678)); }
        case GELU_TANH: {
            return 0.5 * x * (1.0 + tanh_of(0.7978846 * (x + 0.044715 * x * x * x)));
        }
        case RELU_SQUARED: {
            let y = max(x, 0.0);
            return y * y;
        }
        case SOFTPLUS: { return softplus(x); }
        case XIELU: {
            let beta = param_f32(at + 2u);
            if x > 0.0 {
                return param_f32(at) * x * x + beta * x;
            }
            return param_f32(at + 1u) * (expm1(min(x, param_f32(at + 3u))) - x) + beta * x;
        }
        default: { return x; }
    }
}

// `act(gate) * up`, with the parameters of xIELU from parameter `at` on.
fn glu(act: u32, gate: f32, up: f32, at: u32) -> f32 {
    if act == CLAMPED_SWISH {
        let g = min(gate, 7.0);
        return g * sigmoid(1.702 * g) * (clamp(up, -7.0, 7.0) + 1.0);
    }
    return activate(act, gate, at) * up;
}
