// How keys and values are kept: in half precision or, in files of kernels that define KV_F32, as
// they are, or, with KV_Q8, as bytes with scales.
//
// Of a head in a page there are first the numbers of all tokens, `kept_stride` of each. Bytes
// are 128 larger than the codes that they stand for, and behind them are the scales of all tokens
// `[PAGE_TOKENS, kept_scales]`, halves that 32 codes each are multiplied with. A token's scales are even
// in number, so that they can be copied alone; `kept_cells` counts the numbers of a token with them.
//
// Numbers are copied in pieces of sixteen bytes or more, and read in eights.
//
// Pages keep keys and values `[page, kv_head]`; `key_at` and `value_at` know in which order.
#pragma once
#include "device.cuh"

#ifdef KV_F32
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
#elif defined(KV_Q8)
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

// Which of a head's pieces in a page is this one of a token.
#if defined(KV_F32) || defined(KV_Q8)
// Of keys, neighbouring tokens lie side by side.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) { return piece * PAGE_TOKENS + token; }
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) { return token * pieces + piece; }
#else
// Sixteen tokens lie together, in the order in which the lanes of a warp read them for `mma` (`meet.cuh`).
#define STEP_POSITIONS 16u

// A slice of their keys, or of their values: of heads of whole slices one lies behind the other.
#define SLICE_DIM 64u
#define SLICE_PIECES (SLICE_DIM / 8 * STEP_POSITIONS)

// Lane 4 g + c has of the keys at places g and g + 8 the pieces 4 i + c.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % STEP_POSITIONS, first = piece / 4 * 4, side = min(4, pieces - first);
    return (token - place) * pieces + STEP_POSITIONS * first + place * side + (piece - first);
}

// Lane 4 g + c has of the values at places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 the pieces 8 i + g.
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % STEP_POSITIONS, first = piece / 8 * 8, side = min(8, pieces - first);
    u32 of_lane = place / 8 * 2 + place % 2;
    return (token - place) * pieces + STEP_POSITIONS * first + (of_lane * side + piece - first) * 4 + place % 8 / 2;
}
#endif

// Where a head of a page has element `i` of a token's key, or of its value; `head` counts all pages' heads.
DEVICE u64 key_at(u64 head, u32 token, u32 dim, u32 i) {
    u32 piece = key_piece(token, i / PIECE, kept_stride(dim) / PIECE);
    return head * PAGE_TOKENS * kept_cells(dim) + piece * PIECE + i % PIECE;
}

DEVICE u64 value_at(u64 head, u32 token, u32 dim, u32 i) {
    u32 piece = value_piece(token, i / PIECE, kept_stride(dim) / PIECE);
    return head * PAGE_TOKENS * kept_cells(dim) + piece * PIECE + i % PIECE;
}

// Eights that lie side by side.
struct __align__(16) Piece {
    Eight eights[PIECE / 8];
};

// Asks for a piece to come to shared memory.
DEVICE void copy_piece(u32 to, const KvElement *from) {
    for (u32 i = 0; i < sizeof(Piece); i += 16) copy_async(to + i, (const u8 *)from + i);
}

// Likewise the scales of a token.
DEVICE void copy_scales(u32 to, const u16 *from, u32 count) {
    for (u32 i = 0; i < count; i += 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 2 * i), "l"(from + i) : "memory");
    }
}
