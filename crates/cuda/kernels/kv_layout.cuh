// KV cache layout: f16 by default, f32 in files that define KV_F32, bytes with f16 scales in files
// that define KV_Q8. The persistent kernel knows f16 and bytes.
//
// Pages hold [page, kv_head], each with `kv_stride` elements of every token. Bytes are offset by 128
// and have scales, a half for 32 codes of a token. `kv_elements` counts a token's elements including
// scales. `key_at` and `value_at` define the order within a head. Keys are copied in pieces of
// sixteen bytes or more, values in eights.
#pragma once
#include "device.cuh"

// In f16 and in bytes, sixteen tokens form a tile. A slice is 64 columns of a tile; slices of a head follow
// each other. Bytes are in fragment order: as the lanes of a warp read them for `mma` (decode_mma.cuh).
// f16 is in rows of 32 columns of a key, or 64 of a value, swizzled for `wgmma`.
#define TILE_POSITIONS 16u
#define SLICE_DIM 64u

// Bytes. A slice holds the codes of its positions, then their scales, two of each position: a
// multiple of sixteen bytes, which can be copied at once.

#define Q8_SLICE_BYTES (TILE_POSITIONS * (SLICE_DIM + 4))
// The largest element: its products of code and scale fit f16.
#define Q8_MAX (127.0f * 512.0f)

DEVICE u32 q8_stride(u32 dim) { return (dim + 15) / 16 * 16; }

DEVICE u32 q8_scales(u32 dim) { return (dim + SLICE_DIM - 1) / SLICE_DIM * 2; }

DEVICE u32 q8_tile_bytes(u32 dim) { return TILE_POSITIONS * (q8_stride(dim) + 2 * q8_scales(dim)); }

// Columns of the slice with column `i`.
DEVICE u32 q8_columns(u32 dim, u32 i) { return min(SLICE_DIM, q8_stride(dim) - i / SLICE_DIM * SLICE_DIM); }

// Offset of that slice in a head of a page.
DEVICE u32 q8_slice(u32 token, u32 dim, u32 i) {
    return token / TILE_POSITIONS * q8_tile_bytes(dim) + i / SLICE_DIM * Q8_SLICE_BYTES;
}

// Offset of an element of a key: lane 4 g + c reads columns 16 c to 16 c + 15 of places g and g + 8.
DEVICE u32 q8_key(u32 token, u32 dim, u32 i) {
    return q8_slice(token, dim, i) + token % TILE_POSITIONS * q8_columns(dim, i) + i % SLICE_DIM;
}

// Offset of an element of a value: lane 4 g + c reads columns 8 g to 8 g + 7 of places 2 c and
// 2 c + 1, and of places 2 c + 8 and 2 c + 9.
DEVICE u32 q8_value(u32 token, u32 dim, u32 i) {
    u32 place = token % TILE_POSITIONS, lane = i % SLICE_DIM / 8 * 4 + place % 8 / 2;
    u32 lanes = q8_columns(dim, i) / 8 * 4;
    return q8_slice(token, dim, i) + (place / 8 * lanes + lane) * 16 + place % 2 * 8 + i % 8;
}

// Offset of the scale of an element; that of the other 32 columns of the slice is beside it.
DEVICE u32 q8_scale(u32 token, u32 dim, u32 i) {
    return q8_slice(token, dim, i) + TILE_POSITIONS * q8_columns(dim, i) + token % TILE_POSITIONS * 4 + i / 32 % 2 * 2;
}

// Offset of a head of a page.
DEVICE u64 q8_head(u64 head, u32 dim) { return head * (PAGE_TOKENS / TILE_POSITIONS) * q8_tile_bytes(dim); }

// Quantises a block of 32 elements, one a lane, as Q8_0 does: the scale is rounded first. It is NaN
// where an element is.
DEVICE u8 quantize_q8(float x, u16 &scale) {
    bool has_nan = __any_sync(~0u, x != x);
    x = fminf(fmaxf(x, -Q8_MAX), Q8_MAX);
    scale = has_nan ? HALF_NAN : to_half(warp_max(fabsf(x)) / 127.0f);
    float step = from_half(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    return (u8)(u32)(rintf(fminf(fmaxf(x * inverse, -127.0f), 127.0f)) + 128.0f);
}

// Stores a block of 32 elements in a page, if it is of a head of `dim`; a lane has element `i`.
DEVICE void put_q8(u8 *elements, u64 head, u32 token, u32 dim, u32 i, bool is_key, u8 code, u16 scale) {
    u8 *of_head = elements + q8_head(head, dim);
    if (i < q8_stride(dim)) of_head[is_key ? q8_key(token, dim, i) : q8_value(token, dim, i)] = code;
    if (i % 32 == 0 && i < dim) *(u16 *)(of_head + q8_scale(token, dim, i)) = scale;
}

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

DEVICE u32 kv_scales(u32 dim) { return HAS_SCALES ? q8_scales(dim) : 0; }

DEVICE u32 kv_elements(u32 dim) { return kv_stride(dim) + 2 * kv_scales(dim); }

// The index among a head's pieces in a page of a token's piece.
#ifdef KV_F32
// Neighbouring tokens' key pieces are adjacent.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) { return piece * PAGE_TOKENS + token; }
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) { return token * pieces + piece; }
#else
#define SLICE_PIECES (SLICE_DIM / 8 * TILE_POSITIONS)

// Of keys, four pieces of each position of a tile follow each other, and of values eight. Heads of whole
// fours, or eights, are swizzled as `wgmma` reads them from shared memory: so they can be copied there at
// once, and lanes that read a piece of several positions share no bank.

DEVICE u32 key_swizzle(u32 place) { return place / 2 % 4; }
DEVICE u32 value_swizzle(u32 place) { return place % 8; }

// Lane 4 g + c of `mma` reads pieces 4 i + c of the keys at places g and g + 8.
DEVICE u32 key_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % TILE_POSITIONS, first = piece / 4 * 4, side = min(4, pieces - first);
    u32 swizzle = pieces % 4 == 0 ? key_swizzle(place) : 0;
    return (token - place) * pieces + TILE_POSITIONS * first + place * side + (piece - first ^ swizzle);
}

// Lane 4 g + c reads pieces 8 i + g of the values at places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
DEVICE u32 value_piece(u32 token, u32 piece, u32 pieces) {
    u32 place = token % TILE_POSITIONS, first = piece / 8 * 8, side = min(8, pieces - first);
    u32 swizzle = pieces % 8 == 0 ? value_swizzle(place) : 0;
    return (token - place) * pieces + TILE_POSITIONS * first + place * side + (piece - first ^ swizzle);
}
#endif

// Offset of element `i` of a token's key or value in a head of a page.
#ifdef KV_Q8
DEVICE u32 key_in_head(u32 token, u32 dim, u32 i) { return q8_key(token, dim, i); }
DEVICE u32 value_in_head(u32 token, u32 dim, u32 i) { return q8_value(token, dim, i); }
#else
DEVICE u32 key_in_head(u32 token, u32 dim, u32 i) {
    return key_piece(token, i / PIECE, kv_stride(dim) / PIECE) * PIECE + i % PIECE;
}

DEVICE u32 value_in_head(u32 token, u32 dim, u32 i) {
    return value_piece(token, i / PIECE, kv_stride(dim) / PIECE) * PIECE + i % PIECE;
}
#endif

// Offset of a head; `head` counts those of all pages.
DEVICE u64 head_at(u64 head, u32 dim) { return head * PAGE_TOKENS * kv_elements(dim); }

DEVICE u64 key_at(u64 head, u32 token, u32 dim, u32 i) { return head_at(head, dim) + key_in_head(token, dim, i); }

DEVICE u64 value_at(u64 head, u32 token, u32 dim, u32 i) { return head_at(head, dim) + value_in_head(token, dim, i); }

// Adjacent eights of a key that are copied at once.
struct __align__(16) Piece {
    Eight eights[PIECE / 8];
};

// Copies a piece of a key, or eight elements of a value, to shared memory asynchronously.
template <typename T> DEVICE void copy_piece(u32 to, const KvElement *from) {
    if (sizeof(T) == 8) return copy_async8(to, from);
    for (u32 i = 0; i < sizeof(T); i += 16) copy_async(to + i, (const u8 *)from + i);
}
