// Packed weights, as the host's packed layouts write them: tiles of 16 rows, cut into chunks of 64
// columns. A chunk is one record: codes in the fragment order of `mma.m16n8k16`, then scales. Lane
// 4 g + c of a warp holds, of rows g and g + 8, columns 16 c to 16 c + 15 of a chunk; the input is
// read in the same column order. Of 2:4 weights a lane holds pairs: two of the columns 4 c to 4 c +
// 3 of each 16, and their indices among the four.
#pragma once
#include "device.cuh"

// For each layout: bytes of a chunk (BYTES), chunks of a pipeline slot (SLOT_CHUNKS), and a lane's
// registers.
template <int LAYOUT> struct Packed;

// The A operand of one `mma`: a lane's weights of two rows.
struct Fragment {
    u32 a[4];
};

DEVICE uint4 load16(const u8 *at) { return *(const uint4 *)at; }

DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Broadcasts one half of a pair to both. Written as moves of halves, which the assembler folds into
// the consuming instruction; `__byte_perm` would be an instruction of its own.
DEVICE u32 broadcast_low(u32 pair) {
    u32 y;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(y) : "r"(pair));
    return y;
}
DEVICE u32 broadcast_high(u32 pair) {
    u32 y;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(y) : "r"(pair));
    return y;
}

DEVICE void mma(float (&d)[4], const Fragment &w, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(w.a[0]), "r"(w.a[1]), "r"(w.a[2]), "r"(w.a[3]), "r"(b0), "r"(b1));
}

// Dense layouts: four `mma` steps per chunk.
struct Dense {
    static const int STEPS = 4;

    // A lane's columns of a chunk of an input row: the first one, and all sixteen from there.
    static __device__ __forceinline__ u32 first_column(u32 c) { return 16 * c; }
    static __device__ __forceinline__ void load_input(const u16 *x, uint4 (&b)[2]) {
        b[0] = ((const uint4 *)x)[0];
        b[1] = ((const uint4 *)x)[1];
    }

    __device__ __forceinline__ void multiply(float (&d)[4], const Fragment &w, const uint4 (&b)[2], int step) const {
        mma(d, w, word(b[step / 2], step % 2 * 2), word(b[step / 2], step % 2 * 2 + 1));
    }
};

template <> struct Packed<F16> : Dense {
    static const u32 BYTES = CHUNK_BYTES_F16, SLOT_CHUNKS = SLOT_CHUNKS_F16;
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

// Dequantisation takes one fused multiply-add: a code alone in a half is the subnormal code *
// 2^-24, which is exact. Scales are stored 2^24 times larger.

DEVICE u32 bytes_low(u32 w) { return __byte_perm(w, 0, 0x4140); }
DEVICE u32 bytes_high(u32 w) { return __byte_perm(w, 0, 0x4342); }

// `prmt`: of eight bytes, the four that the lower four nibbles of `selectors` name.
DEVICE u32 select_bytes(u32 low, u32 high, u32 selectors) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selectors));
    return y;
}

// Minus 128, 64, 32 or 8 times a scale: the offset of codes that are stored larger by that.
DEVICE u32 minus_128(u32 scale) { return half_mul(scale, 0x80808080); }
DEVICE u32 minus_64(u32 scale) { return half_mul(scale, 0x80408040); }
DEVICE u32 minus_32(u32 scale) { return half_mul(scale, 0x80208020); }
DEVICE u32 minus_8(u32 scale) { return half_mul(scale, 0x80088008); }

// Signed bytes, stored with an offset of 128, with a scale for 32 columns.
template <> struct Packed<S8> : Dense {
    static const u32 BYTES = CHUNK_BYTES_S8, SLOT_CHUNKS = SLOT_CHUNKS_S8;
    uint4 low, high;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        low = load16(chunk + 16 * lane);
        high = load16(chunk + 512 + 16 * lane);
        scales = ((const u32 *)(chunk + 1024))[8 * (lane % 4 / 2) + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(low, step), h = word(high, step);
        u32 s = broadcast_low(scales), t = broadcast_high(scales);
        u32 m = minus_128(s), n = minus_128(t);
        return {half_fma(bytes_low(l), s, m), half_fma(bytes_low(h), t, n),
                half_fma(bytes_high(l), s, m), half_fma(bytes_high(h), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        const u16 *scales = (const u16 *)(chunk + 1024) + 2 * (8 * (lane % 4 / 2) + lane / 4);
        float code = (float)chunk[512 * high + 16 * lane + i] - 128.0f;
        return from_half(scales[high]) * (CODE_UNIT * code);
    }
};

// The lower 4-bit codes of a word's pairs; the upper ones, 16 times larger; and the scale of the
// upper ones.
DEVICE u32 lower_codes(u32 w) { return w & 0x000f000f; }
DEVICE u32 upper_codes(u32 w) { return w & 0x00f000f0; }
DEVICE u32 for_upper(u32 scale) { return half_mul(scale, 0x2c002c00); }

// Nibble `i` of a lane and row, where neighbours lie 16 bits apart.
DEVICE u32 nibble_of_pair(const u8 *chunk, u32 lane, u32 high, u32 i) {
    u32 w = ((const u32 *)chunk)[4 * lane + 2 * high + i / 8];
    return w >> (4 * (i % 8 / 2 + 4 * (i % 2))) & 15;
}

// The weights of a step from nibbles whose neighbours lie 16 bits apart, with scale and minimum of both rows.
DEVICE Fragment from_nibbles(const uint4 &codes, int step, u32 s, u32 m, u32 t, u32 n) {
    u32 l = word(codes, step / 2) >> step % 2 * 8, h = word(codes, 2 + step / 2) >> step % 2 * 8;
    return {half_fma(lower_codes(l), s, m), half_fma(lower_codes(h), t, n),
            half_fma(upper_codes(l), for_upper(s), m), half_fma(upper_codes(h), for_upper(t), n)};
}

// 4-bit codes with a scale and a minimum for 32 columns. Neighbouring codes lie 16 bits apart.
template <> struct Packed<U4> : Dense {
    static const u32 BYTES = CHUNK_BYTES_U4, SLOT_CHUNKS = SLOT_CHUNKS_U4;
    uint4 codes;
    uint2 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const uint2 *)(chunk + 512))[8 * (lane % 4 / 2) + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        return from_nibbles(codes, step, broadcast_low(scales.x), broadcast_high(scales.x),
                            broadcast_low(scales.y), broadcast_high(scales.y));
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 pair = ((const u32 *)(chunk + 512))[2 * (8 * (lane % 4 / 2) + lane / 4) + high];
        float2 scale = from_half_pair(pair);
        return fmaf(scale.x, CODE_UNIT * (float)nibble_of_pair(chunk, lane, high, i), scale.y);
    }
};

// Signed 4-bit codes, stored with an offset of 8, with a scale for 16 columns: nibbles as those of U4.
template <> struct Packed<S4X16> : Dense {
    static const u32 BYTES = CHUNK_BYTES_S4X16, SLOT_CHUNKS = SLOT_CHUNKS_S4X16;
    uint4 codes;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const u32 *)(chunk + 512))[8 * (lane % 4) + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 s = broadcast_low(scales), t = broadcast_high(scales);
        return from_nibbles(codes, step, s, minus_8(s), t, minus_8(t));
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        const u16 *scales = (const u16 *)(chunk + 512) + 2 * (8 * (lane % 4) + lane / 4);
        float code = (float)nibble_of_pair(chunk, lane, high, i) - 8.0f;
        return from_half(scales[high]) * (CODE_UNIT * code);
    }
};

// 5-bit codes with a scale and a minimum for 32 columns: nibbles as those of U4, and behind them a word
// with the fifth bits of each lane.
template <> struct Packed<U5> : Dense {
    static const u32 BYTES = CHUNK_BYTES_U5, SLOT_CHUNKS = SLOT_CHUNKS_U5;
    uint4 codes;
    u32 fifths;
    uint2 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        fifths = ((const u32 *)(chunk + 512))[lane];
        scales = ((const uint2 *)(chunk + 640))[8 * (lane % 4 / 2) + lane / 4];
    }

    // Shifts the fifth bits of a step and a row above those of its nibbles.
    __device__ __forceinline__ u32 above(int step, int high) const {
        int i = 2 * step + high;
        return i < 4 ? fifths << (4 - i) : fifths >> i;
    }
    static __device__ __forceinline__ u32 lower(u32 w, u32 above) { return lower_codes(w) | (above & 0x00100010); }
    static __device__ __forceinline__ u32 upper(u32 w, u32 above) { return upper_codes(w) | (above & 0x01000100); }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step / 2) >> step % 2 * 8, h = word(codes, 2 + step / 2) >> step % 2 * 8;
        u32 a = above(step, 0), b = above(step, 1);
        u32 s = broadcast_low(scales.x), m = broadcast_high(scales.x);
        u32 t = broadcast_low(scales.y), n = broadcast_high(scales.y);
        return {half_fma(lower(l, a), s, m), half_fma(lower(h, b), t, n),
                half_fma(upper(l, a), for_upper(s), m), half_fma(upper(h, b), for_upper(t), n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 fifths = ((const u32 *)(chunk + 512))[lane], of_step = 2 * (i / 4) + high;
        u32 fifth = fifths >> (of_step + of_step / 4 * 4 + i / 2 % 2 * 4 + i % 2 * 16) & 1;
        u32 pair = ((const u32 *)(chunk + 640))[2 * (8 * (lane % 4 / 2) + lane / 4) + high];
        float2 scale = from_half_pair(pair);
        return fmaf(scale.x, CODE_UNIT * (float)(nibble_of_pair(chunk, lane, high, i) | fifth << 4), scale.y);
    }
};

// 6-bit codes, stored with an offset of 32, with a scale for 16 columns: nibbles as those of U4, and
// behind them two words with the upper two bits of each lane, one for each row.
template <> struct Packed<S6X16> : Dense {
    static const u32 BYTES = CHUNK_BYTES_S6X16, SLOT_CHUNKS = SLOT_CHUNKS_S6X16;
    uint4 codes;
    uint2 tops;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        tops = ((const uint2 *)(chunk + 512))[lane];
        scales = ((const u32 *)(chunk + 768))[8 * (lane % 4) + lane / 4];
    }

    // Shifts the upper bits of a step above those of its nibbles.
    static __device__ __forceinline__ u32 above(u32 tops, int step) {
        return step < 2 ? tops << (4 - 2 * step) : tops >> 2 * step;
    }
    static __device__ __forceinline__ u32 lower(u32 w, u32 above) { return lower_codes(w) | (above & 0x00300030); }
    static __device__ __forceinline__ u32 upper(u32 w, u32 above) { return upper_codes(w) | (above & 0x03000300); }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step / 2) >> step % 2 * 8, h = word(codes, 2 + step / 2) >> step % 2 * 8;
        u32 a = above(tops.x, step), b = above(tops.y, step);
        u32 s = broadcast_low(scales), t = broadcast_high(scales);
        u32 m = minus_32(s), n = minus_32(t);
        return {half_fma(lower(l, a), s, m), half_fma(lower(h, b), t, n),
                half_fma(upper(l, a), for_upper(s), m), half_fma(upper(h, b), for_upper(t), n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 tops = ((const u32 *)(chunk + 512))[2 * lane + high];
        u32 top = tops >> (i / 4 * 2 + i / 8 * 4 + i / 2 % 2 * 4 + i % 2 * 16) & 3;
        const u16 *scales = (const u16 *)(chunk + 768) + 2 * (8 * (lane % 4) + lane / 4);
        float code = (float)(nibble_of_pair(chunk, lane, high, i) | top << 4) - 32.0f;
        return from_half(scales[high]) * (CODE_UNIT * code);
    }
};

// 4-bit indices of a codebook, with a scale for 16 columns. Behind the scales are the numbers, from -63 to
// 63, as bytes with an offset of 64.
template <> struct Packed<CODEBOOK> : Dense {
    static const u32 BYTES = CHUNK_BYTES_CODEBOOK, SLOT_CHUNKS = SLOT_CHUNKS_CODEBOOK;
    uint4 codes, book;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const u32 *)(chunk + 512))[8 * (lane % 4) + lane / 4];
        book = load16(chunk + 640);
    }

    // The numbers of four indices, with their offset. `prmt` looks up four bytes among eight; where an
    // index is of the other eight, it repeats the upper bit of a byte, which is 0.
    static __device__ __forceinline__ u32 numbers(const uint4 &book, u32 four) {
        return select_bytes(book.x, book.y, four) | select_bytes(book.z, book.w, four ^ 0x8888);
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = numbers(book, word(codes, step / 2) >> step % 2 * 16);
        u32 h = numbers(book, word(codes, 2 + step / 2) >> step % 2 * 16);
        u32 s = broadcast_low(scales), t = broadcast_high(scales);
        u32 m = minus_64(s), n = minus_64(t);
        return {half_fma(bytes_low(l), s, m), half_fma(bytes_low(h), t, n),
                half_fma(bytes_high(l), s, m), half_fma(bytes_high(h), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 index = chunk[16 * lane + 8 * high + i / 2] >> i % 2 * 4 & 15;
        const u16 *scales = (const u16 *)(chunk + 512) + 2 * (8 * (lane % 4) + lane / 4);
        return from_half(scales[high]) * (CODE_UNIT * ((float)chunk[640 + index] - 64.0f));
    }
};

// 2-bit codes with a scale and a minimum for 16 columns: a word for each lane and row, where neighbouring codes
// lie 16 bits apart.
template <> struct Packed<U2X16> : Dense {
    static const u32 BYTES = CHUNK_BYTES_U2X16, SLOT_CHUNKS = SLOT_CHUNKS_U2X16;
    uint2 codes, scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = ((const uint2 *)chunk)[lane];
        scales = ((const uint2 *)(chunk + 256))[8 * (lane % 4) + lane / 4];
    }

    // Codes of odd steps are 16 times larger; those of a step's second pair four times more than that.
    static __device__ __forceinline__ u32 first(u32 w, int step) { return w & (step % 2 ? 0x00300030 : 0x00030003); }
    static __device__ __forceinline__ u32 second(u32 w, int step) { return w & (step % 2 ? 0x00c000c0 : 0x000c000c); }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = codes.x >> step / 2 * 8, h = codes.y >> step / 2 * 8;
        u32 s = broadcast_low(scales.x), m = broadcast_high(scales.x);
        u32 t = broadcast_low(scales.y), n = broadcast_high(scales.y);
        if (step % 2) s = for_upper(s), t = for_upper(t);
        const u32 QUARTER = 0x34003400;
        return {half_fma(first(l, step), s, m), half_fma(first(h, step), t, n),
                half_fma(second(l, step), half_mul(s, QUARTER), m),
                half_fma(second(h, step), half_mul(t, QUARTER), n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 code = ((const u32 *)chunk)[2 * lane + high] >> (i / 2 * 2 + i % 2 * 16) & 3;
        u32 pair = ((const u32 *)(chunk + 256))[2 * (8 * (lane % 4) + lane / 4) + high];
        float2 scale = from_half_pair(pair);
        return fmaf(scale.x, CODE_UNIT * (float)code, scale.y);
    }
};

// 4-bit codes of IQ4's codebook, with a scale for 32 columns. Codes 0 to 7 stand for negative
// numbers, 8 to 15 for positive ones.
template <> struct Packed<IQ4> : Dense {
    static const u32 BYTES = CHUNK_BYTES_IQ4, SLOT_CHUNKS = SLOT_CHUNKS_IQ4;
    uint4 codes;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const u32 *)(chunk + 512))[8 * (lane % 4 / 2) + lane / 4];
    }

    // The numbers of four codes as bytes, with an offset of 128. `prmt` looks up four bytes at
    // once; a selector whose upper bit is set repeats the sign bit of its byte, which is 0 here. So
    // of magnitudes of negative and of positive numbers, one is found and the other is 0.
    static __device__ __forceinline__ u32 numbers(u32 four) {
        const u32 OFFSET = 0x80808080;
        u32 negative = select_bytes(0x4153687f, 0x0a162331, four);
        u32 positive = select_bytes(0x26190d01, 0x71594535, four ^ 0x8888);
        return OFFSET + positive - negative;
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step / 2) >> step % 2 * 16, h = word(codes, 2 + step / 2) >> step % 2 * 16;
        l = numbers(l);
        h = numbers(h);
        u32 s = broadcast_low(scales), t = broadcast_high(scales);
        u32 m = minus_128(s), n = minus_128(t);
        return {half_fma(bytes_low(l), s, m), half_fma(bytes_low(h), t, n),
                half_fma(bytes_high(l), s, m), half_fma(bytes_high(h), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 four = ((const u16 *)chunk)[8 * lane + 4 * high + i / 4];
        float number = (float)(numbers(four) >> 8 * (i % 4) & 255) - 128.0f;
        const u16 *scales = (const u16 *)(chunk + 512) + 2 * (8 * (lane % 4 / 2) + lane / 4);
        return from_half(scales[high]) * (CODE_UNIT * number);
    }
};

// 4-bit floats (E2M1) with a power of two for 32 columns, which is the upper byte of a half.
// Neighbouring codes lie 16 bits apart. In a half's bits 15 and 11 to 9, sign and magnitude are the
// number times 2^-14. There lie the first of four; the others are shifted there.
template <> struct Packed<FP4> : Dense {
    static const u32 BYTES = CHUNK_BYTES_FP4, SLOT_CHUNKS = SLOT_CHUNKS_FP4;
    uint4 codes;
    u32 scales;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        scales = ((const u16 *)(chunk + 512))[8 * (lane % 4 / 2) + lane / 4];
    }

    // The `i`th of a word's pairs of numbers: their signs lie at bits 15, 12, 14 and 13.
    static __device__ __forceinline__ u32 pair(u32 w, int i) {
        if (i < 2) return w << 3 * i & 0x8e008e00;
        return (w << 3 * i & 0x0e000e00) | (w << (i - 1) & 0x80008000);
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step / 2), h = word(codes, 2 + step / 2);
        u32 s = __byte_perm(scales, 0, 0x0404), t = __byte_perm(scales, 0, 0x1414);
        int i = step % 2 * 2;
        return {half_mul(pair(l, i), s), half_mul(pair(h, i), t), half_mul(pair(l, i + 1), s),
                half_mul(pair(h, i + 1), t)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 w = ((const u32 *)chunk)[4 * lane + 2 * high + i / 8];
        u32 scale = chunk[512 + 2 * (8 * (lane % 4 / 2) + lane / 4) + high];
        return from_half(scale << 8) * from_half(pair(w, i % 8 / 2) >> i % 2 * 16);
    }
};

// 2:4 sparse layouts: two sparse `mma` steps per chunk, in each of which a lane has the pairs of
// two fours of columns. Behind the codes come each lane's selectors: two bits for each kept number
// of its 16 columns, the lower half of the word for row g.
struct TwoFour {
    static const int STEPS = 2;
    u32 places;

    static __device__ __forceinline__ u32 first_column(u32 c) { return 2 * c; }
    static __device__ __forceinline__ void load_input(const u16 *x, uint4 (&b)[2]) {
        const u32 *at = (const u32 *)x;
        b[0] = make_uint4(at[0], at[4], at[8], at[12]);
        b[1] = make_uint4(at[16], at[20], at[24], at[28]);
    }

    // Each step reads the selectors of two of four lanes.
    __device__ __forceinline__ void multiply(float (&d)[4], const Fragment &w, const uint4 (&b)[2], int step) const {
#define SPARSE_MMA(LANES)                                                                          \
    asm("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "                                    \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, " LANES ";"            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
        : "r"(w.a[0]), "r"(w.a[1]), "r"(w.a[2]), "r"(w.a[3]), "r"(b[step].x), "r"(b[step].y),      \
          "r"(b[step].z), "r"(b[step].w), "r"(places))
        if (step == 0) {
            SPARSE_MMA("0x0");
        } else {
            SPARSE_MMA("0x1");
        }
    }

    // The index in its pair of column `i` of a lane's 16; 2 if the column is zero.
    static __device__ __forceinline__ u32 place(const u8 *all, u32 lane, u32 high, u32 i) {
        u32 both = ((const u32 *)all)[lane] >> (16 * high + 4 * (i / 4));
        return (both & 3) == i % 4 ? 0 : (both >> 2 & 3) == i % 4 ? 1 : 2;
    }
};

template <> struct Packed<S24_F16> : TwoFour {
    static const u32 BYTES = CHUNK_BYTES_S24_F16, SLOT_CHUNKS = SLOT_CHUNKS_S24_F16;
    uint4 low, high;

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        low = load16(chunk + 16 * lane);
        high = load16(chunk + 512 + 16 * lane);
        places = ((const u32 *)(chunk + 1024))[lane];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        int first = 2 * step;
        return {word(low, first), word(high, first), word(low, first + 1), word(high, first + 1)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 n = place(chunk + 1024, lane, high, i), holder = lane / 4 * 4 + i / 4;
        const u16 *codes = (const u16 *)(chunk + 512 * high + 16 * holder) + 2 * (lane % 4);
        return n == 2 ? 0.0f : from_half(codes[n]);
    }
};

// Signed bytes, stored with an offset of 128.
template <> struct Packed<S24_S8> : TwoFour {
    static const u32 BYTES = CHUNK_BYTES_S24_S8, SLOT_CHUNKS = SLOT_CHUNKS_S24_S8;
    uint4 codes;
    u32 scales[2];

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = load16(chunk + 16 * lane);
        places = ((const u32 *)(chunk + 512))[lane];
        for (int i = 0; i < 2; i++) scales[i] = ((const u32 *)(chunk + 640))[8 * i + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = word(codes, step), h = word(codes, 2 + step);
        u32 s = broadcast_low(scales[step]), t = broadcast_high(scales[step]);
        u32 m = minus_128(s), n = minus_128(t);
        return {half_fma(bytes_low(l), s, m), half_fma(bytes_low(h), t, n),
                half_fma(bytes_high(l), s, m), half_fma(bytes_high(h), t, n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 n = place(chunk + 512, lane, high, i), holder = lane / 4 * 4 + i / 4;
        const u16 *scales = (const u16 *)(chunk + 640) + 2 * (8 * (lane % 4 / 2) + lane / 4);
        if (n == 2) return 0.0f;
        u32 code = chunk[16 * holder + 8 * high + 2 * (lane % 4) + n];
        return from_half(scales[high]) * (CODE_UNIT * ((float)code - 128.0f));
    }
};

// 4-bit codes, stored with an offset of 8; the numbers of a pair lie 16 bits apart.
template <> struct Packed<S24_S4> : TwoFour {
    static const u32 BYTES = CHUNK_BYTES_S24_S4, SLOT_CHUNKS = SLOT_CHUNKS_S24_S4;
    uint2 codes;
    u32 scales[2];

    __device__ __forceinline__ void load(const u8 *chunk, u32 lane) {
        codes = ((const uint2 *)chunk)[lane];
        places = ((const u32 *)(chunk + 256))[lane];
        for (int i = 0; i < 2; i++) scales[i] = ((const u32 *)(chunk + 384))[8 * i + lane / 4];
    }

    __device__ __forceinline__ Fragment fragment(int step) const {
        u32 l = codes.x >> 8 * step, h = codes.y >> 8 * step;
        u32 s = broadcast_low(scales[step]), t = broadcast_high(scales[step]);
        u32 m = minus_8(s), n = minus_8(t);
        return {half_fma(lower_codes(l), s, m), half_fma(lower_codes(h), t, n),
                half_fma(upper_codes(l), for_upper(s), m), half_fma(upper_codes(h), for_upper(t), n)};
    }

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 n = place(chunk + 256, lane, high, i), holder = lane / 4 * 4 + i / 4;
        const u16 *scales = (const u16 *)(chunk + 384) + 2 * (8 * (lane % 4 / 2) + lane / 4);
        if (n == 2) return 0.0f;
        u32 code = ((const u32 *)chunk)[2 * holder + high] >> (4 * (lane % 4) + 16 * n) & 15;
        return from_half(scales[high]) * (CODE_UNIT * ((float)code - 8.0f));
    }
};

// Plain f32 rows, for kernels without `mma`.
template <> struct Packed<F32> {
    static const u32 BYTES = CHUNK_BYTES_F32;

    static __device__ __forceinline__ float value(const u8 *chunk, u32 lane, u32 high, u32 i) {
        u32 row = lane / 4 + 8 * high, column = lane % 4 * 16 + i;
        return ((const float *)chunk)[CHUNK_COLS * row + column] * (1.0f / INPUT_SCALE);
    }
};
