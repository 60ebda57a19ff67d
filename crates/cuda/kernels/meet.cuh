// Query heads meet the positions of a segment on tensor cores: up to four heads of a key head, of up to 128
// dimensions, and keys and values in half precision. Of what is no half yet, queries and weights of
// positions, the nearest half is taken and the nearest one to what is left: 22 bits, or to 2^-25. A query
// that is no number is the lowest half, as an input of products is.
//
// A segment is met in steps of 16 positions, whose sums are added in order: so warps can share them as they
// like, and the bits are the same.
#pragma once
#include "attend.cuh"
#include "planes.cuh"

#define HEADS 4u
#define MOST_DIM 128u // MEET_DIM on the host
#define STEP_POSITIONS 16u
#define SEGMENT_STEPS (SEGMENT / STEP_POSITIONS)
#define WEIGHT_ROW (SEGMENT + 8u) // of weights in shared memory, against conflicts of banks

// Halves of a row of queries in shared memory, `[2, HEADS, query_row]`.
DEVICE u32 query_row(u32 key_dim) { return (key_dim + 15) / 16 * 16 + 8; }

// Columns of values that a lane has, in each of two groups of eight lanes.
DEVICE u32 columns_of_lane(u32 value_dim) { return value_dim > 64 ? 8 : 4; }

// Floats of a row of the sums of a step's values, `[SEGMENT_STEPS, HEADS, part_row]`.
DEVICE u32 part_row(u32 value_dim) { return 16 * columns_of_lane(value_dim) + 8; }

// The steps of a segment that have positions between `from` and `to`.
struct Steps {
    u32 first, end;

    __device__ __forceinline__ Steps(u32 from, u32 to)
        : first(from / STEP_POSITIONS), end((to + STEP_POSITIONS - 1) / STEP_POSITIONS) {}

    __device__ __forceinline__ bool has(u32 step) const { return step >= first && step < end; }
};

// Puts down a number as two halves, `apart` from each other.
DEVICE void put_halves(u16 *to, u32 apart, float x) {
    x = within_half(x);
    u16 high = to_half(x);
    to[0] = high;
    to[apart] = to_half(x - from_half(high));
}

// The scores of a step: a lane has those of head lane % 4 at places lane / 4 and that + 8. Keys are
// `[key_stride / 8, SEGMENT, 8]`.
DEVICE float2 meet_keys(const u16 *keys, const u16 *queries, u32 key_dim, u32 step) {
    u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, row = query_row(key_dim);
    u32 eights = up8(key_dim) / 8, place = step * STEP_POSITIONS + lane % 16;
    // Columns are pairs of both halves of a head's query.
    const u16 *query = queries + (g % 2 * HEADS + g / 2) * row + 2 * c;
    float sums[4] = {};
#pragma unroll 4
    for (u32 i = 0; i < eights; i += 2) {
        u32 eight = min(i + lane / 16, eights - 1);
        uint4 k = load_matrices((u32)__cvta_generic_to_shared(keys + (eight * SEGMENT + place) * 8));
        // Behind an odd number of eights is nothing.
        bool is_whole = i + 1 < eights;
        Fragment f = {{k.x, k.y, is_whole ? k.z : 0, is_whole ? k.w : 0}};
        mma(sums, f, *(const u32 *)(query + 8 * i), *(const u32 *)(query + 8 * i + 8));
    }
    return make_float2(sums[0] + sums[1], sums[2] + sums[3]);
}

#ifndef HAS_SOFTCAPS
#define HAS_SOFTCAPS true
#endif

// A score as softmax takes it; that of a position which is not seen counts for nothing.
DEVICE float scaled(const Attend &a, float score, bool is_seen) {
    score *= a.scale;
    if (HAS_SOFTCAPS && a.softcap > 0.0f) score = tanhf(score / a.softcap) * a.softcap;
    return is_seen ? score : -INFINITY_F;
}

// The largest score of a lane's head in a step, and the sum of its weights.
DEVICE float most_of_step(const float2 &x) {
    float most = fmaxf(x.x, x.y);
    for (u32 i = 4; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    return most;
}

DEVICE float sum_of_step(const float2 &x) {
    float sum = x.x + x.y;
    for (u32 i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    return sum;
}

// The same over all steps, `[SEGMENT_STEPS, HEADS]`.
DEVICE float most_of(const float *mosts, u32 head, const Steps &steps) {
    float most = -INFINITY_F;
#pragma unroll
    for (u32 i = 0; i < SEGMENT_STEPS; i++) {
        if (steps.has(i)) most = fmaxf(most, mosts[i * HEADS + head]);
    }
    return most;
}

DEVICE float sum_of(const float *sums, u32 head, const Steps &steps) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SEGMENT_STEPS; i++) {
        if (steps.has(i)) sum += sums[i * HEADS + head];
    }
    return sum;
}

// The weights of a step from its scores and the largest one of the segment: for the values in shared
// memory, `[2, HEADS, WEIGHT_ROW]`, and back.
DEVICE float2 weigh(const float2 &scores, float most, u32 step, u16 *weights) {
    u32 g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float2 w = make_float2(expf(scores.x - most), expf(scores.y - most));
    u16 *to = weights + c * WEIGHT_ROW + step * STEP_POSITIONS + g;
    put_halves(to, HEADS * WEIGHT_ROW, w.x);
    put_halves(to + 8, HEADS * WEIGHT_ROW, w.y);
    return w;
}

// The position, in a step, of one of four that a lane has values of.
DEVICE u32 position_of_lane(u32 i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

// The first column of a lane in a group.
DEVICE u32 column_of_lane(u32 group, u32 columns) { return (group * 8 + threadIdx.x % 32 / 4) * columns; }

// The weights of a step times its values, of which a lane has some columns: the sums go to shared memory.
DEVICE void meet_values(const uint4 (&values)[4], u32 columns, const u16 *weights, u32 step, u32 group, float *parts,
                        u32 row) {
    u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    Fragment w = {};
    if (g < HEADS) {
        const u32 *high = (const u32 *)(weights + g * WEIGHT_ROW + step * STEP_POSITIONS + 2 * c);
        const u32 *low = high + HEADS * WEIGHT_ROW / 2;
        w = {{high[0], low[0], high[4], low[4]}};
    }
    float *to = parts + (step * HEADS + g) * row + (group * 8 + 2 * c) * columns;
#pragma unroll
    for (u32 i = 0; i < 8; i += 4) {
        if (i >= columns) continue;
        float out[2][4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 x[4], select = j % 2 ? 0x7632 : 0x5410;
#pragma unroll
            for (u32 k = 0; k < 4; k++) x[k] = word(values[k], (i + j) / 2);
            float sums[4] = {};
            mma(sums, w, __byte_perm(x[0], x[1], select), __byte_perm(x[2], x[3], select));
            out[0][j] = sums[0] + sums[2];
            out[1][j] = sums[1] + sums[3];
        }
        if (g >= HEADS) continue;
        *(float4 *)(to + i) = make_float4(out[0][0], out[0][1], out[0][2], out[0][3]);
        *(float4 *)(to + columns + i) = make_float4(out[1][0], out[1][1], out[1][2], out[1][3]);
    }
}

// A column of a head's value: the sums of all steps.
DEVICE float value_of(const float *parts, u32 row, u32 head, u32 column, const Steps &steps) {
    float value = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SEGMENT_STEPS; i++) {
        if (steps.has(i)) value += parts[(i * HEADS + head) * row + column];
    }
    return value;
}
