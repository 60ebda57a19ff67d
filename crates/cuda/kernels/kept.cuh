// How keys and values are kept: in half precision or, in files of kernels that define KEPT_F32, as
// they are. Kernels read and write them in eights.
#pragma once
#include "device.cuh"

#ifdef KEPT_F32
typedef float Kept;

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
#else
typedef u16 Kept;

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

// Asks for an eight to come to shared memory.
DEVICE void copy_eight(u32 to, const Kept *from) {
    for (u32 i = 0; i < sizeof(Eight); i += 16) copy_async(to + i, (const u8 *)from + i);
}
