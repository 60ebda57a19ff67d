// How keys and values are kept: in half precision or, in files of kernels that define KEPT_F32, as
// they are, or, with KEPT_Q8, as bytes with scales.
//
// Of a head in a page there are first the numbers of all tokens, with a stride of `kept_stride`. Bytes
// are 128 larger than the codes that they stand for, and behind them are the scales of all tokens
// `[PAGE_TOKENS, kept_scales]`, halves that 32 codes each are multiplied with. A token's scales are even
// in number, so that they can be copied alone; `kept_cells` counts the numbers of a token with them.
//
// Numbers are copied in pieces of sixteen bytes or more, and read in eights.
#pragma once
#include "device.cuh"

#ifdef KEPT_F32
typedef float Kept;
#define PIECE 8u
#define HAS_SCALES false

struct Eight {
    float4 low, high;
};

DEVICE float keep(float x) { return x; }

DEVICE Eight no_eight() { return {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)}; }

DEVICE void spread(const Eight &eight, float2 *x) {
    x[0] = make_float2(eight.low.x, eight.low.y);
    x[1] = make_float2(eight.low.z, eight.low.w);
    x[2] = make_float2(eight.high.x, eight.high.y);
    x[3] = make_float2(eight.high.z, eight.high.w);
}
#elif defined(KEPT_Q8)
typedef u8 Kept;
#define PIECE 16u
#define HAS_SCALES true

struct Eight {
    uint2 bits;
};

DEVICE Eight no_eight() { return {make_uint2(0x80808080u, 0x80808080u)}; }

// Bytes become the low ones of floats from 2^23 on, whose unit is one.
DEVICE float code_of(u32 bytes, u32 select) {
    return __uint_as_float(__byte_perm(bytes, 0x4b000000u, select)) - 8388736.0f;
}

DEVICE void spread(const Eight &eight, float2 *x) {
    uint2 bits = eight.bits; // in one load
    x[0] = make_float2(code_of(bits.x, 0x7440), code_of(bits.x, 0x7441));
    x[1] = make_float2(code_of(bits.x, 0x7442), code_of(bits.x, 0x7443));
    x[2] = make_float2(code_of(bits.y, 0x7440), code_of(bits.y, 0x7441));
    x[3] = make_float2(code_of(bits.y, 0x7442), code_of(bits.y, 0x7443));
}

// Rounds a block, of which a warp's lanes have an element each, as formats of weights do: the scale is
// rounded first.
DEVICE u8 keep(float x, u16 &scale) {
    x = fminf(fmaxf(x, -127.0f * HALF_MAX), 127.0f * HALF_MAX);
    scale = to_half(warp_max(fabsf(x)) / 127.0f);
    float step = from_half(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    return (u8)(u32)(rintf(fminf(fmaxf(x * inverse, -127.0f), 127.0f)) + 128.0f);
}
#else
typedef u16 Kept;
#define PIECE 8u
#define HAS_SCALES false

struct Eight {
    uint4 bits;
};

DEVICE u16 keep(float x) { return to_half(x); }

DEVICE Eight no_eight() { return {make_uint4(0, 0, 0, 0)}; }

DEVICE void spread(const Eight &eight, float2 *x) {
    uint4 bits = eight.bits; // in one load
    x[0] = from_half_pair(bits.x);
    x[1] = from_half_pair(bits.y);
    x[2] = from_half_pair(bits.z);
    x[3] = from_half_pair(bits.w);
}
#endif

DEVICE u32 kept_stride(u32 dim) { return (dim + PIECE - 1) / PIECE * PIECE; }

DEVICE u32 kept_scales(u32 dim) { return HAS_SCALES ? (dim + 63) / 64 * 2 : 0; }

DEVICE u32 kept_cells(u32 dim) { return kept_stride(dim) + 2 * kept_scales(dim); }

// Eights that lie side by side.
struct __align__(16) Piece {
    Eight eights[PIECE / 8];
};

// Asks for a piece to come to shared memory.
DEVICE void copy_piece(u32 to, const Kept *from) {
    for (u32 i = 0; i < sizeof(Piece); i += 16) copy_async(to + i, (const u8 *)from + i);
}

// Likewise the scales of a token.
DEVICE void copy_scales(u32 to, const u16 *from, u32 count) {
    for (u32 i = 0; i < count; i += 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 2 * i), "l"(from + i) : "memory");
    }
}
