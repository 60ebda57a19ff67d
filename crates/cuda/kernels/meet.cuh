// Query heads meet the positions of a segment on tensor cores: up to four heads of a key head, of up to 128
// dimensions, and keys and values in half precision. Of what is no half yet, queries and weights of
// positions, the nearest half is taken and the nearest one to what is left: 22 bits, or to 2^-25. A query
// that is no number is the lowest half, as an input of products is.
//
// A segment is met in steps of 16 positions, each by one warp, which waits for no other: a step has a softmax of
// its own, and the steps of a segment are joined in order.
#pragma once
#include "attend.cuh"
#include "planes.cuh"

#define HEADS 4u
#define MOST_DIM 128u // MEET_DIM on the host
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

    static __device__ __forceinline__ Steps between(u32 from, u32 to) {
        return {from / STEP_POSITIONS, (to + STEP_POSITIONS - 1) / STEP_POSITIONS};
    }

    __device__ __forceinline__ bool has(u32 step) const { return step >= first && step < end; }
};

// The shared memory of a team.
struct Room {
    u16 q[HEADS][QUERY_ROW]; // zeros beyond the last element, as in the row's own key and value
    u16 own_key[MOST_DIM], own_value[MOST_DIM];
    float mosts[HEADS][SEGMENT_STEPS], sums[HEADS][SEGMENT_STEPS]; // largest scores, and sums of weights
    float parts[SEGMENT_STEPS][HEADS][PART_ROW];                   // values with their weights

    // Puts down that a step has no positions: nothing for the whole of it. By a warp.
    __device__ __forceinline__ void skip(u32 step) {
        u32 lane = threadIdx.x % 32;
        if (lane < HEADS) mosts[lane][step] = LOWEST_FLOAT, sums[lane][step] = 0.0f;
        float4 *to = (float4 *)parts[step];
        for (u32 i = lane; i < HEADS * PART_ROW / 4; i += 32) to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

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

// The place in a step of one of four that a lane has scores and values of.
DEVICE u32 place_of_lane(u32 i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

// One of four floats.
DEVICE float element(const float4 &x, u32 i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// What is left of a pair of numbers whose nearest halves are these.
DEVICE u32 lower_halves(float x, float y, u32 upper) {
    float2 high = from_half_pair(upper);
    return half_pair(x - high.x, y - high.y);
}

#define SLICE_BYTES (16 * SLICE_PIECES)
#define MOST_SLICES (MOST_DIM / SLICE_DIM)

// Where a step's keys, or its values, lie, in the order of pages. What nobody has written there yet is zero, or of a row
// that is gone: all of it are numbers.
struct Slices {
    const uint4 *at[MOST_SLICES];
};

// Reads a piece from shared memory, or from a page: past the first-level cache, which may have lines from before
// their last tokens were kept.
template <bool IN_PAGE> DEVICE uint4 read_piece(const uint4 *at) {
    if (!IN_PAGE) return *at;
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// Takes the row's own piece for that of a place.
DEVICE void take_own(uint4 &piece, const uint4 &own, bool is_own) {
    piece.x = is_own ? own.x : piece.x;
    piece.y = is_own ? own.y : piece.y;
    piece.z = is_own ? own.z : piece.z;
    piece.w = is_own ? own.w : piece.w;
}

// A lane's part of a step's keys: lane 4 g + c has of those at places g and g + 8 the pieces 4 i + c.
struct Keys16 {
    uint4 pieces[MOST_DIM / 32][2];

    template <bool IN_PAGE> __device__ __forceinline__ void load(const Slices &slices, u32 key_dim) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, count = up8(key_dim) / 8;
#pragma unroll
        for (u32 i = 0; i < MOST_DIM / 32; i++) {
            u32 side = min(4, count - 4 * i);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                pieces[i][j] = make_uint4(0, 0, 0, 0);
                const uint4 *at = slices.at[i / 2] + i % 2 * (SLICE_PIECES / 2) + (8 * j + g) * side + c;
                if (4 * i + c < count) pieces[i][j] = read_piece<IN_PAGE>(at);
            }
        }
    }

    // Takes the row's own key for that of a place.
    __device__ __forceinline__ void take_own(u32 place, const Room &room) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (u32 i = 0; i < MOST_DIM / 32; i++) {
            uint4 own = ((const uint4 *)room.own_key)[4 * i + c];
#pragma unroll
            for (u32 j = 0; j < 2; j++) ::take_own(pieces[i][j], own, place == g + 8 * j);
        }
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
                for (u32 j = 0; j < 2; j++) mma(sums[j][k], f, word(pieces[i][j], 2 * k), word(pieces[i][j], 2 * k + 1));
            }
        }
    }

    // The scores of head g % 4 at a lane's four places.
    __device__ __forceinline__ void scores(u32 key_dim, const Room &room, float (&out)[4]) const {
        float sums[2][2][4] = {};
        add_scores<0>(room, sums);
        if (key_dim > SLICE_DIM) add_scores<2>(room, sums);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float(&two)[2][4] = sums[i / 2];
            out[i] = (two[0][i % 2] + two[0][i % 2 + 2]) + (two[1][i % 2] + two[1][i % 2 + 2]);
        }
    }
};

// A lane's part of 64 columns of a step's values: lane 4 g + c has of those at its four places the pieces g.
struct Values16 {
    uint4 pieces[4];

    template <bool IN_PAGE>
    __device__ __forceinline__ void load(const Slices &slices, u32 slice, u32 value_dim) {
        // Lanes without a piece read another's, for columns that nobody reads.
        u32 lane = threadIdx.x % 32, side = min(8, up8(value_dim) / 8 - 8 * slice), at = min(lane, 4 * side - 1);
#pragma unroll
        for (u32 i = 0; i < 4; i++) pieces[i] = read_piece<IN_PAGE>(slices.at[slice] + i * side * 4 + at);
    }

    __device__ __forceinline__ void take_own(u32 place, u32 slice, const Room &room) {
        uint4 own = ((const uint4 *)room.own_value)[8 * slice + threadIdx.x % 32 / 4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) ::take_own(pieces[i], own, place == place_of_lane(i));
    }

    // Adds them up with the weights of places, as halves, for a head.
    __device__ __forceinline__ void sum(const Fragment &weights, u32 slice, float *out) const {
        // Lanes from 16 on have the results of those before them.
        u32 lane = own(threadIdx.x) % 32, second = lane / 16;
        float y[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 x[4], select = j % 2 ? 0x7632 : 0x5410;
#pragma unroll
            for (u32 k = 0; k < 4; k++) x[k] = word(pieces[k], j / 2);
            float sums[4] = {};
            mma(sums, weights, __byte_perm(x[0], x[1], select), __byte_perm(x[2], x[3], select));
            y[j] = second ? sums[1] + sums[3] : sums[0] + sums[2];
        }
        float4 *to = (float4 *)(out + SLICE_DIM * slice + 16 * (lane % 4) + 8 * second);
        to[0] = make_float4(y[0], y[1], y[2], y[3]);
        to[1] = make_float4(y[4], y[5], y[6], y[7]);
    }
};

#ifndef HAS_SOFTCAPS
#define HAS_SOFTCAPS true
#endif

// The weights of a step's values for query heads, from their scores: the places from `from` up to `to` are seen.
DEVICE Fragment weigh(const Attend &a, float (&x)[4], u32 step, u32 from, u32 to, Room &room) {
    u32 lane = threadIdx.x % 32;
    float most = LOWEST_FLOAT;
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
    u32 near = half_pair(x[0], x[1]), far = half_pair(x[2], x[3]), head = lane / 4;
    if (lane % 4 == 0 && head < HEADS) {
        room.mosts[head][step] = most;
        room.sums[head][step] = sum;
    }
    return {{near, lower_halves(x[0], x[1], near), far, lower_halves(x[2], x[3], far)}};
}

// The steps of a segment, joined for a head by whole warps: a thread has some columns, `HEAD_THREADS` apart.
struct Joined {
    float most, sum, values[MOST_ITEMS];

    __device__ __forceinline__ Joined(const Room &room, u32 head, u32 column, u32 value_dim) {
        const float4 *of_mosts = (const float4 *)room.mosts[head], *of_sums = (const float4 *)room.sums[head];
        float4 low = of_mosts[0], high = of_mosts[1], sums[2] = {of_sums[0], of_sums[1]};
        // Each lane makes the factor of a step.
        float own_most = room.mosts[head][threadIdx.x % SEGMENT_STEPS];
        most = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
        most = fmaxf(most, LOWEST_FLOAT);
        float own_factor = expf(own_most - most);
        sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < MOST_ITEMS; j++) values[j] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < SEGMENT_STEPS; i++) {
            float factor = __shfl_sync(~0u, own_factor, i);
            sum = fmaf(element(sums[i / 4], i % 4), factor, sum);
            values[0] = fmaf(room.parts[i][head][column], factor, values[0]);
            if (value_dim > HEAD_THREADS) values[1] = fmaf(room.parts[i][head][column + HEAD_THREADS], factor, values[1]);
        }
    }
};
