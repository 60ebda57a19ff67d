// Functions of single elements, and where the elements of slices and concatenations come from.
#pragma once
#include "device.cuh"

// As `gated`, also with softplus, which matmuls have no use for.
DEVICE float gated_by_any(u32 act, float gate, float up) {
    if (act != 7) return gated(act, gate, up);
    return softplus(gate) * up;
}

DEVICE float xielu(const Elementwise &p, float x) {
    if (x > 0.0f) return p.factor * x * x + p.beta * x;
    return p.negative * (expm1f(fminf(x, p.eps)) - x) + p.beta * x;
}

// The column of the first value that element `i` reads.
DEVICE u32 column_of_a(const Elementwise &p, u32 i) { return p.op == 2 ? i / p.part : i; }

DEVICE float elementwise(const Elementwise &p, float a, float b) {
    switch (p.op) {
    case 0: return gated_by_any(p.act, a, 1.0f);
    case 1:
    case 2: return gated_by_any(p.act, a, b);
    case 3: return a + b;
    case 4: return a * p.factor;
    case 6: return xielu(p, a);
    case 7: return fminf(fmaxf(a, p.low), p.factor);
    default: return tanhf(a / p.factor) * p.factor;
    }
}

// Where element `i` comes from, in rows of the two values.
DEVICE const float *source(const SliceConcat &p, const float *a, const float *b, u32 i) {
    u32 group_len = p.a_len + p.b_len, group = i / group_len, at = i % group_len;
    if (at < p.a_len) return a + group * p.a_width + p.a_start + at;
    return b + (p.is_b_shared ? 0 : group * p.b_len) + at - p.a_len;
}
