// Query heads meet the positions of a segment on tensor cores: up to four heads of a key head, of up to 128
// dimensions, and keys and values in half precision. Of what is no half yet, queries and weights of
// positions, the nearest half is taken and the nearest one to what is left: 22 bits, or to 2^-25. A query
// that is no number is the lowest half, as an input of products is.
//
// A segment is met in steps of 16 positions, each by one warp, which has their keys and values in registers and
// waits for no other: a step has a softmax of its own, and the steps of a segment are joined in order.
#pragma once
#include "attend.cuh"
#include "planes.cuh"

#define HEADS 4u
#define MOST_DIM 128u // MEET_DIM on the host
#define STEP_POSITIONS 16u
#define SEGMENT_STEPS (SEGMENT / STEP_POSITIONS)
#define TEAM (32 * SEGMENT_STEPS)         // threads that meet a segment
#define HEAD_THREADS (TEAM / HEADS)       // of them, those of a head
#define MOST_ITEMS (MOST_DIM / HEAD_THREADS) // columns of a head's results that a thread has, at most
#define QUERY_ROW (2 * MOST_DIM + 32)     // both halves of a query's elements; the last places are for other banks
#define PART_ROW (MOST_DIM + 8)
#define LOWEST_FLOAT -3.402823466e38f

// The steps of a segment that have positions between `from` and `to`.
struct Steps {
    u32 first, end;

    __device__ __forceinline__ Steps(u32 from, u32 to)
        : first(from / STEP_POSITIONS), end((to + STEP_POSITIONS - 1) / STEP_POSITIONS) {}

    __device__ __forceinline__ bool has(u32 step) const { return step >= first && step < end; }
};

// The shared memory of a team.
struct Room {
    u16 q[HEADS][QUERY_ROW]; // zeros beyond the last element, as in the row's own key and value
    u16 own_key[MOST_DIM], own_value[MOST_DIM];
    float mosts[HEADS][SEGMENT_STEPS], sums[HEADS][SEGMENT_STEPS]; // largest scores, and sums of weights
    float parts[SEGMENT_STEPS][HEADS][PART_ROW];                   // values with their weights

    // Puts down an element of a query as two halves: what a lane gives to `mma` at once lies together.
    __device__ __forceinline__ void put_query(u32 head, u32 i, float x) {
        x = within_half(x);
        u16 high = to_half(x);
        u16 *to = q[head] + i / 32 * 64 + i % 8 / 4 * 32 + i % 32 / 8 * 8 + i % 4 / 2 * 4 + i % 2;
        to[0] = high;
        to[2] = to_half(x - from_half(high));
    }
};
static_assert(MOST_ITEMS == 2 && sizeof(Room) == 20480, "ROOM_BYTES on the host");

// Eight halves, or what was there: without a branch, behind which it would be waited for, and past the
// first-level cache, which may have lines from before their last tokens were kept.
DEVICE void load_kept(uint4 &v, const u16 *from, bool is_there) {
    asm volatile("{.reg .pred there;\n"
                 "setp.ne.u32 there, %5, 0;\n"
                 "@there ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"((u32)is_there) : "memory");
}

// Asks for sixteen bytes to come to shared memory, or makes them zero.
DEVICE void copy_or_clear(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// The place in a step of one of four that a lane has scores and values of.
DEVICE u32 place_of_lane(u32 i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

// What is left of a pair of numbers whose nearest halves are these.
DEVICE u32 lower_halves(float x, float y, u32 upper) {
    float2 high = from_half_pair(upper);
    return half_pair(x - high.x, y - high.y);
}

// The places of a step that are in memory, from `from` up to `to`, and where they are: a head of a page, and the
// token at which the step begins.
struct Cells {
    u64 head;
    u32 token, from, to;

    __device__ __forceinline__ Cells(const u32 *pages, u32 kv_heads, u32 kv_head, u32 position, u32 from, u32 to)
        : head(0), token(position % PAGE_TOKENS), from(from), to(to) {
        if (from < to) head = (u64)pages[position / PAGE_TOKENS] * kv_heads + kv_head;
    }

    __device__ __forceinline__ bool has(u32 place) const { return place >= from && place < to; }
};

// A lane's part of a step's keys and values. Lane 4 g + c has of the keys at places g and g + 8 the eights 4 i + c,
// of the values at its four places the eights g and 8 + g. The latter, for which there are no registers, wait in shared
// memory, where the step's results are going to be, until the scores are there.
struct Kept16 {
    uint4 keys[2][MOST_DIM / 32], values[4];

    // Asks for those that are in memory. All others are zero.
    __device__ __forceinline__ void ask(const Attend &a, const Cells &cells) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, eights = up8(a.key_dim) / 8, stride = up8(a.value_dim);
        const u16 *key = a.keys + ((cells.head * eights + c) * PAGE_TOKENS + cells.token + g) * 8;
        const u16 *value = a.values + (cells.head * PAGE_TOKENS + cells.token) * stride + 8 * g;
#pragma unroll
        for (u32 i = 0; i < MOST_DIM / 32; i++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 place = g + 8 * j;
                bool is_there = 4 * i + c < eights && cells.has(place);
                keys[j][i] = make_uint4(0, 0, 0, 0);
                load_kept(keys[j][i], key + (4 * i * PAGE_TOKENS + 8 * j) * 8, is_there);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 place = place_of_lane(i);
            values[i] = make_uint4(0, 0, 0, 0);
            load_kept(values[i], value + place * stride, 8 * g < stride && cells.has(place));
        }
    }

    // Likewise for the values that wait in shared memory.
    __device__ __forceinline__ void ask_rest(const Attend &a, const Cells &cells, Room &room, u32 step) const {
        u32 lane = threadIdx.x % 32, g = lane / 4, stride = up8(a.value_dim);
        const u16 *value = a.values + (cells.head * PAGE_TOKENS + cells.token) * stride + 64 + 8 * g;
        u32 at = (u32)__cvta_generic_to_shared(room.parts[step]) + 16 * lane;
        if (stride <= 64) return;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 place = place_of_lane(i);
            bool is_there = 64 + 8 * g < stride && cells.has(place);
            copy_or_clear(at + 512 * i, is_there ? value + place * stride : a.values, is_there);
        }
    }

    // Takes the row's own key and value for those of a place. Without branches, which would take longer.
    __device__ __forceinline__ void take_own(u32 place, Room &room, u32 step) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (u32 i = 0; i < MOST_DIM / 32; i++) {
            uint4 key = *(const uint4 *)(room.own_key + 32 * i + 8 * c);
#pragma unroll
            for (u32 j = 0; j < 2; j++) keys[j][i] = place == g + 8 * j ? key : keys[j][i];
        }
        uint4 value = *(const uint4 *)(room.own_value + 8 * g);
#pragma unroll
        for (u32 i = 0; i < 4; i++) values[i] = place == place_of_lane(i) ? value : values[i];
        if (place % 8 / 2 != c) return;
        u32 i = place / 8 * 2 + place % 2;
        ((uint4 *)room.parts[step])[32 * i + lane] = *(const uint4 *)(room.own_value + 64 + 8 * g);
    }

    // Adds the products of 64 elements of queries and keys to scores.
    template <u32 FIRST> __device__ __forceinline__ void add_scores(const Room &room, float (&sums)[2][2][4]) const {
        u32 lane = threadIdx.x % 32;
        const uint4 *query = (const uint4 *)room.q[lane / 4 % HEADS] + lane % 4;
#pragma unroll
        for (u32 i = FIRST; i < FIRST + 2; i++) {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                uint4 q = query[8 * i + 4 * k];
                Fragment f = {{q.x, q.y, q.z, q.w}};
#pragma unroll
                for (u32 j = 0; j < 2; j++) mma(sums[j][k], f, word(keys[j][i], 2 * k), word(keys[j][i], 2 * k + 1));
            }
        }
    }

    // The scores of head g % 4 at a lane's four places.
    __device__ __forceinline__ void scores(u32 key_dim, const Room &room, float (&out)[4]) const {
        float sums[2][2][4] = {};
        add_scores<0>(room, sums);
        if (key_dim > 64) add_scores<2>(room, sums);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float(&two)[2][4] = sums[i / 2];
            out[i] = (two[0][i % 2] + two[0][i % 2 + 2]) + (two[1][i % 2] + two[1][i % 2 + 2]);
        }
    }
};

// Adds up 64 columns of a step's values with their weights, as halves, for a head.
DEVICE void sum_values(const uint4 (&values)[4], const Fragment &weights, float *part) {
    // Lanes from 16 on have the results of those before them.
    u32 lane = own(threadIdx.x) % 32, second = lane / 16;
    float out[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        u32 x[4], select = j % 2 ? 0x7632 : 0x5410;
#pragma unroll
        for (u32 k = 0; k < 4; k++) x[k] = word(values[k], j / 2);
        float sums[4] = {};
        mma(sums, weights, __byte_perm(x[0], x[1], select), __byte_perm(x[2], x[3], select));
        out[j] = second ? sums[1] + sums[3] : sums[0] + sums[2];
    }
    float4 *to = (float4 *)(part + 16 * (lane % 4) + 8 * second);
    to[0] = make_float4(out[0], out[1], out[2], out[3]);
    to[1] = make_float4(out[4], out[5], out[6], out[7]);
}

#ifndef HAS_SOFTCAPS
#define HAS_SOFTCAPS true
#endif

// Query heads meet a step, of which the places from `from` up to `to` are seen.
DEVICE void meet(const Attend &a, const Kept16 &kept, u32 step, u32 from, u32 to, Room &room) {
    u32 lane = threadIdx.x % 32;
    float x[4], most = LOWEST_FLOAT;
    // A lane's own value may lie where others are going to write.
    __syncwarp();
    kept.scores(a.key_dim, room, x);
    float scale = a.scale, softcap = a.softcap;
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] *= scale;
    if (HAS_SOFTCAPS && softcap > 0.0f) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = tanhf(x[i] / softcap) * softcap;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 place = place_of_lane(i);
        // What is not seen counts for nothing.
        if (place < from || place >= to) x[i] = -INFINITY_F;
        most = fmaxf(most, x[i]);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = expf(x[i] - most);
    float sum = (x[0] + x[1]) + (x[2] + x[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    u32 near = half_pair(x[0], x[1]), far = half_pair(x[2], x[3]);
    Fragment weights = {{near, lower_halves(x[0], x[1], near), far, lower_halves(x[2], x[3], far)}};
    u32 head = lane / 4 % HEADS;
    float *part = room.parts[step][head];
    if (a.value_dim > 64) {
        const uint4 *waiting = (const uint4 *)room.parts[step] + lane;
        uint4 rest[4] = {waiting[0], waiting[32], waiting[64], waiting[96]};
        __syncwarp();
        sum_values(rest, weights, part + 64);
    }
    sum_values(kept.values, weights, part);
    if (lane % 4 == 0 && lane < 4 * HEADS) {
        room.mosts[head][step] = most;
        room.sums[head][step] = sum;
    }
}

// The steps of a segment, joined for a head by whole warps: a thread has some columns, `HEAD_THREADS` apart. What
// steps without positions have there is anything.
struct Joined {
    float most, sum, values[MOST_ITEMS];

    __device__ __forceinline__ Joined(const Room &room, u32 head, u32 column, const Steps &steps, u32 value_dim) {
        float mosts[SEGMENT_STEPS], sums[SEGMENT_STEPS], parts[MOST_ITEMS][SEGMENT_STEPS] = {};
        u32 own_step = threadIdx.x % SEGMENT_STEPS;
        float own_most = room.mosts[head][own_step];
        most = LOWEST_FLOAT;
#pragma unroll
        for (u32 i = 0; i < SEGMENT_STEPS; i++) {
            mosts[i] = room.mosts[head][i];
            sums[i] = room.sums[head][i];
            parts[0][i] = room.parts[i][head][column];
            if (value_dim > HEAD_THREADS) parts[1][i] = room.parts[i][head][column + HEAD_THREADS];
        }
#pragma unroll
        for (u32 i = 0; i < SEGMENT_STEPS; i++) most = fmaxf(most, steps.has(i) ? mosts[i] : LOWEST_FLOAT);
        // Each lane makes the factor of a step.
        float own_factor = steps.has(own_step) ? expf(own_most - most) : 0.0f;
        sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < MOST_ITEMS; j++) values[j] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < SEGMENT_STEPS; i++) {
            float factor = __shfl_sync(~0u, own_factor, i);
            sum = steps.has(i) ? fmaf(sums[i], factor, sum) : sum;
#pragma unroll
            for (u32 j = 0; j < MOST_ITEMS; j++) values[j] = steps.has(i) ? fmaf(parts[j][i], factor, values[j]) : values[j];
        }
    }
};
