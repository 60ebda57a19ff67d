// Weights in planes, as the host's planes.rs writes them: tiles of 16 rows, cut into chunks of 64
// columns. A chunk is one record: codes in the order in which the lanes of a warp need them for
// `mma.m16n8k16`, then scales. Lane 4 g + c of a warp holds, of the rows g and g + 8, the columns
// 16 c to 16 c + 15 of a chunk; the input is read in the same order of columns.
#pragma once
#include "common.cuh"

#define TILE_ROWS 16u
#define CHUNK_COLS 64u

enum Kind { F16, S8, S8X16, U8, U4, F32 };

template <int KIND> struct Planes;

// Four numbers of two rows each step: what one `mma` takes of the weights.
struct Fragment {
    u32 a[4];
};

DEVICE uint4 load16(const u8 *at) { return *(const uint4 *)at; }

DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Both halves of a pair become its first, or its second.
DEVICE u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
DEVICE u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }

template <> struct Planes<F16> {
    static const u32 BYTES = 2048;
    uint4 v[4];

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        for (int i = 0; i < 4; i++) v[i] = load16(chunk + 512 * i + 16 * lane);
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        const uint4 &low = v[step / 2], &high = v[2 + step / 2];
        int first = step % 2 * 2;
        return {word(low, first), word(high, first), word(low, first + 1), word(high, first + 1)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        return from_half(*(const u16 *)(chunk + 512 * (2 * high + i / 8) + 16 * lane + 2 * (i % 8)));
    }
};

// A byte behind 0x64 is 1024 more than itself in half precision.
DEVICE u32 bytes_low(u32 w) { return __byte_perm(w, 0x64646464, 0x4140); }
DEVICE u32 bytes_high(u32 w) { return __byte_perm(w, 0x64646464, 0x4342); }

#define MINUS_1152 0xe480e480
#define MINUS_1024 0xe400e400

// Signed bytes, kept 128 larger, with a scale for GROUP columns.
template <int GROUP> struct SignedBytes {
    static const u32 BYTES = 1024 + 64 * (32 / GROUP);
    uint4 low, high;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        low = load16(chunk + 16 * lane);
        high = load16(chunk + 512 + 16 * lane);
        u32 group = lane % 4 * 16 / GROUP;
        scales = ((const u32 *)(chunk + 1024))[8 * group + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(low, step), h = word(high, step);
        u32 s = both_low(scales), t = both_high(scales);
        return {half_mul(half_add(bytes_low(l), MINUS_1152), s),
                half_mul(half_add(bytes_low(h), MINUS_1152), t),
                half_mul(half_add(bytes_high(l), MINUS_1152), s),
                half_mul(half_add(bytes_high(h), MINUS_1152), t)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 group = lane % 4 * 16 / GROUP;
        const u16 *scales = (const u16 *)(chunk + 1024) + 2 * (8 * group + lane / 4);
        return from_half(scales[high]) * ((float)chunk[512 * high + 16 * lane + i] - 128.0f);
    }
};
template <> struct Planes<S8> : SignedBytes<32> {};
template <> struct Planes<S8X16> : SignedBytes<16> {};

// Bytes with a scale and a minimum for 32 columns.
template <> struct Planes<U8> {
    static const u32 BYTES = 1152;
    uint4 low, high;
    uint2 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        low = load16(chunk + 16 * lane);
        high = load16(chunk + 512 + 16 * lane);
        scales = ((const uint2 *)(chunk + 1024))[8 * (lane % 4 / 2) + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(low, step), h = word(high, step);
        u32 s = both_low(scales.x), m = both_high(scales.x);
        u32 t = both_low(scales.y), n = both_high(scales.y);
        return {half_fma(half_add(bytes_low(l), MINUS_1024), s, m),
                half_fma(half_add(bytes_low(h), MINUS_1024), t, n),
                half_fma(half_add(bytes_high(l), MINUS_1024), s, m),
                half_fma(half_add(bytes_high(h), MINUS_1024), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 pair = ((const u32 *)(chunk + 1024))[2 * (8 * (lane % 4 / 2) + lane / 4) + high];
        float2 scale = from_half_pair(pair);
        return fmaf(scale.x, (float)chunk[512 * high + 16 * lane + i], scale.y);
    }
};

#define PLUS_1024 0x64006400
#define SIXTEENTH 0x2c002c00
#define MINUS_64 0xd400d400

// Codes of four bits with a scale and a minimum for 32 columns. Neighbours lie 16 bits apart.
template <> struct Planes<U4> {
    static const u32 BYTES = 640;
    uint4 codes;
    uint2 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const uint2 *)(chunk + 512))[8 * (lane % 4 / 2) + lane / 4];
    }

    static __device__ __forceinline__ u32 first(u32 w) {
        return half_add((w & 0x000f000f) | PLUS_1024, MINUS_1024);
    }

    static __device__ __forceinline__ u32 second(u32 w) {
        return half_fma((w & 0x00f000f0) | PLUS_1024, SIXTEENTH, MINUS_64);
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step / 2), h = word(codes, 2 + step / 2);
        if (step % 2 == 1) {
            l >>= 8;
            h >>= 8;
        }
        u32 s = both_low(scales.x), m = both_high(scales.x);
        u32 t = both_low(scales.y), n = both_high(scales.y);
        return {half_fma(first(l), s, m), half_fma(first(h), t, n),
                half_fma(second(l), s, m), half_fma(second(h), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 w = ((const u32 *)chunk)[4 * lane + 2 * high + i / 8];
        u32 code = w >> (4 * (i % 8 / 2 + 4 * (i % 2))) & 15;
        u32 pair = ((const u32 *)(chunk + 512))[2 * (8 * (lane % 4 / 2) + lane / 4) + high];
        float2 scale = from_half_pair(pair);
        return fmaf(scale.x, (float)code, scale.y);
    }
};

// Plain rows, for kernels that use no `mma`.
template <> struct Planes<F32> {
    static const u32 BYTES = 4096;

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 row = lane / 4 + 8 * high, column = lane % 4 * 16 + i;
        return ((const float *)chunk)[CHUNK_COLS * row + column] * (1.0f / INPUT_SCALE);
    }
};

DEVICE void mma(float (&d)[4], const Fragment &w, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(w.a[0]), "r"(w.a[1]), "r"(w.a[2]), "r"(w.a[3]), "r"(b0), "r"(b1));
}
