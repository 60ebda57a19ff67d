// KV cache layout: f16 by default, f32 in files that define KV_F32, bytes with f16 scales in files
// that define KV_Q8.
//
// A head of a page holds the elements of all tokens first, `kv_stride` of each. Bytes are offset by
// 128; behind them come the scales of all tokens, [PAGE_TOKENS, kv_scales] halves for 32 codes
// each. A token has an even number of scales, so that they can be copied alone. `kv_elements`
// counts a token's elements including scales.
//
// Elements are copied in pieces of sixteen bytes or more and read in eights. Pages hold [page,
// kv_head]; `key_at` and `value_at` define the order within a head.
#pragma once
#include "device.cuh"

#ifdef KV_F32
#define PIECE 8u
#define HAS_SCALES false

struct Eight {
    float4 low, high;
};

DEVICE float quantize_kv(float x) { return x; }

DEVICE Eight zero_eight() { return {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)}; }

DEVICE void spread(const Eight &eight, float2 *x) {
    x[0] = make_float2(eight.low.x, eight.low.y);
    x[1] = make_float2(eight.low.z, eight.low.w);
    x[2] = make_float2(eight.high.x, eight.high.y);
    x[3] = make_float2(eight.high.z, eight.high.w);
}
#elif defined(KV_Q8)
#define PIECE 16u
#define HAS_SCALES true

struct Eight {
    uint2 bits;
};

DEVICE Eight zero_eight() { return {make_uint2(0x80808080u, 0x80808080u)}; }

// A byte becomes the low bits of a float from 2^23 on, whose unit is one.
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

// Quantises a block of 32 elements, one a lane, as Q8_0 does: the scale is rounded first. It is NaN
// where an element is.
DEVICE u8 quantize_kv(float x, u16 &scale) {
    bool has_nan = __any_sync(~0u, x != x);
    x = fminf(fmaxf(x, -127.0f * HALF_MAX), 127.0f * HALF_MAX);
    scale = has_nan ? HALF_NAN : to_half(warp_max(fabsf(x)) / 127.0f);
    float step = from_half(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    return (u8)(u32)(rintf(fminf(fmaxf(x * inverse, -127.0f), 127.0f)) + 128.0f);
}
#else
#define PIECE 8u
#define HAS_SCALES false

struct Eight {
    uint4 bits;
};

DEVICE u16 quantize_kv(float x) { return to_half(x); }

DEVICE Eight zero_eight() { return {make_uint4(0, 0, 0, 0)}; }

DEVICE void spread(const Eight &eight, float2 *x) {
    uint4 bits = eight.bits; // in one load
    x[0] = from_half_pair(bits.x);
    x[1] = from_half_pair(bits.y);
    x[2] = from_half_pair(bits.z);
    x[3] = from_half_pair(bits.w);
}
#endif

DEVICE u32 kv_stride(u32 dim) { return (dim + PIECE - 1) / PIECE * PIECE; }

DEVICE u32 kv_scales(u32 dim) { return HAS_SCALES ? (dim + 63) / 64 * 2 : 0; }

DEVICE u32 kv_elements(u32 dim) { return kv_stride(dim) + 2 * kv_scales(dim); }

// The index among a head's pieces in a page of a token's piece.
#if defined(KV_F32) || defined(KV_Q8)
// Neighbouring tokens' key pieces are adjacent.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) { return piece * PAGE_TOKENS + token; }
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) { return token * pieces + piece; }
#else
// Sixteen tokens form a tile in fragment order: as the lanes of a warp read them for `mma`
// (decode_mma.cuh).
#define TILE_POSITIONS 16u

// A slice: 64 columns of a tile. Slices of a head follow each other.
#define SLICE_DIM 64u
#define SLICE_PIECES (SLICE_DIM / 8 * TILE_POSITIONS)

// Lane 4 g + c reads pieces 4 i + c of the keys at places g and g + 8.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % TILE_POSITIONS, first = piece / 4 * 4, side = min(4, pieces - first);
    return (token - place) * pieces + TILE_POSITIONS * first + place * side + (piece - first);
}

// Lane 4 g + c reads pieces 8 i + g of the values at places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % TILE_POSITIONS, first = piece / 8 * 8, side = min(8, pieces - first);
    u32 of_lane = place / 8 * 2 + place % 2;
    return (token - place) * pieces + TILE_POSITIONS * first + (of_lane * side + piece - first) * 4 + place % 8 / 2;
}
#endif

// Offset of element `i` of a token's key or value; `head` counts the heads of all pages.
DEVICE u64 key_at(u64 head, u32 token, u32 dim, u32 i) {
    u32 piece = key_piece(token, i / PIECE, kv_stride(dim) / PIECE);
    return head * PAGE_TOKENS * kv_elements(dim) + piece * PIECE + i % PIECE;
}

DEVICE u64 value_at(u64 head, u32 token, u32 dim, u32 i) {
    u32 piece = value_piece(token, i / PIECE, kv_stride(dim) / PIECE);
    return head * PAGE_TOKENS * kv_elements(dim) + piece * PIECE + i % PIECE;
}

// Adjacent eights that are copied at once.
struct __align__(16) Piece {
    Eight eights[PIECE / 8];
};

// Copies a piece to shared memory asynchronously.
DEVICE void copy_piece(u32 to, const KvElement *from) {
    for (u32 i = 0; i < sizeof(Piece); i += 16) copy_async(to + i, (const u8 *)from + i);
}

// Copies the scales of a token likewise.
DEVICE void copy_scales(u32 to, const u16 *from, u32 count) {
    for (u32 i = 0; i < count; i += 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 2 * i), "l"(from + i) : "memory");
    }
}
