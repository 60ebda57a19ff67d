// Decode attention on tensor cores: up to four query heads of a KV head, of up to 576 dimensions,
// with a KV cache in f16 or in bytes, which become f16 when they are read. A warp takes keys and
// values 128 columns at a time. Queries and probabilities are split into a high and a low f16 (22
// bits, or 2^-25). A NaN query becomes the lowest half, as in a matmul input.
//
// The tensor cores' m16n8k16 has the queries as A: rows 0 to 7 are high halves and rows 8 to 15 low
// ones, whose products are added; each of the two has the four heads twice. B has the keys of 8
// positions. The probabilities are A in the same way, with 8 columns of values as B.
//
// A warp takes a tile of 16 positions without waiting for other warps: each tile has its own
// softmax, and the tiles of a split are combined in order.
#pragma once
#include "attention.cuh"
#include "packed.cuh"

#define TEAM (32 * SPLIT_TILES)         // threads of a team, which takes a split
#define HEAD_THREADS (TEAM / BLOCK_HEADS)       // threads of a head in a team
#define HEAD_ITEMS (MMA_COLUMNS / HEAD_THREADS) // of the columns taken at once, those of a thread, at most
#define QUERY_ROW (2 * MAX_MMA_DIM + 32)     // high and low halves of a query, padded against bank conflicts
#define PART_ROW (MMA_COLUMNS + 4)
#define LOWEST_FLOAT -3.402823466e38f

// The tiles of a split with positions in [from, to).
struct TileRange {
    u32 first, end;

    static __device__ __forceinline__ TileRange between(u32 from, u32 to) {
        return {from / TILE_POSITIONS, (to + TILE_POSITIONS - 1) / TILE_POSITIONS};
    }

    __device__ __forceinline__ bool has(u32 tile) const { return tile >= first && tile < end; }
};

// The shared memory of a team.
struct Workspace {
    // Zeros beyond the last element, also in the current key and value. What is read beyond MAX_MMA_DIM, which is no
    // multiple of MMA_COLUMNS, is not used.
    u16 q[BLOCK_HEADS][QUERY_ROW];
    u16 current_key[MAX_MMA_DIM], current_value[MAX_MMA_DIM];
    float row_maxes[BLOCK_HEADS][SPLIT_TILES], row_sums[BLOCK_HEADS][SPLIT_TILES]; // of each tile: row max and row sum
    float tile_values[SPLIT_TILES][BLOCK_HEADS][PART_ROW];                   // P V of each tile, of MMA_COLUMNS

    // Marks a tile without positions, by one warp.
    __device__ __forceinline__ void skip(u32 tile) {
        u32 lane = threadIdx.x % 32;
        if (lane < BLOCK_HEADS) row_maxes[lane][tile] = LOWEST_FLOAT, row_sums[lane][tile] = 0.0f;
        float4 *to = (float4 *)tile_values[tile];
        for (u32 i = lane; i < BLOCK_HEADS * PART_ROW / 4; i += 32) to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    // Stores a query element, at its `key_column`, as high and low halves in fragment order.
    __device__ __forceinline__ void put_query(u32 head, u32 i, float x) {
        x = clamp_half(x);
        u16 high = to_half(x);
        u16 *to = q[head] + i / 32 * 64 + i % 8 / 4 * 32 + i % 32 / 8 * 8 + i % 4 / 2 * 4 + i % 2;
        to[0] = high;
        to[2] = to_half(x - from_half(high));
    }
};
static_assert(HEAD_ITEMS == 2 && SPLIT_TILES * TILE_POSITIONS == KV_SPLIT);
static_assert(sizeof(Workspace) == MMA_WORKSPACE_BYTES);

// The position in a tile of the `i`th of a lane's four scores.
DEVICE u32 position_of_lane(u32 i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

DEVICE float element(const float4 &x, u32 i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The low halves of two numbers whose high halves are `upper`.
DEVICE u32 residual_halves(float x, float y, u32 upper) {
    float2 high = from_half_pair(upper);
    return half_pair(x - high.x, y - high.y);
}

#define F16_SLICE_BYTES (2 * SLICE_DIM * TILE_POSITIONS)
#define MAX_SLICES (MMA_COLUMNS / SLICE_DIM)

// Where column `i` of a query or key is multiplied: those of keys in bytes are exchanged within a
// slice, so that a lane reads sixteen neighbours at once.
DEVICE u32 key_column(bool is_q8, u32 i) {
    return is_q8 ? i / SLICE_DIM * SLICE_DIM + i % 16 / 8 * 32 + i % SLICE_DIM / 16 * 8 + i % 8 : i;
}

// Addresses of the slices of MMA_COLUMNS of a tile's keys or values. Unused positions hold zeros or another sequence's
// numbers.
struct Slices {
    const u8 *at[MAX_SLICES];
};

// Reads from shared memory, or from a page past L1, which may hold lines from before the last tokens
// were stored.
template <bool IN_PAGE> DEVICE uint4 read_piece(const uint4 *at) {
    if (!IN_PAGE) return *at;
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

template <bool IN_PAGE> DEVICE uint2 read_piece(const uint2 *at) {
    if (!IN_PAGE) return *at;
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
    return v;
}

template <bool IN_PAGE> DEVICE u32 read_piece(const u32 *at) {
    if (!IN_PAGE) return *at;
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// Replaces the piece at the current token's place.
DEVICE void take_current(uint4 &piece, const uint4 &own, bool is_current) {
    piece.x = is_current ? own.x : piece.x;
    piece.y = is_current ? own.y : piece.y;
    piece.z = is_current ? own.z : piece.z;
    piece.w = is_current ? own.w : piece.w;
}

// Sums of Q K^T of head g % 4 at a lane's four positions, in four parts each.
struct Scores {
    float parts[2][2][4];

    __device__ __forceinline__ void get(float (&out)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float(&two)[2][4] = parts[i / 2];
            out[i] = (two[0][i % 2] + two[0][i % 2 + 2]) + (two[1][i % 2] + two[1][i % 2 + 2]);
        }
    }
};

// A lane's keys of a tile, MMA_COLUMNS of them: lane 4 g + c has pieces 4 i + c of places g and g + 8.
struct KeyFragment {
    uint4 pieces[MMA_COLUMNS / 32][2];

    // `columns` are left of the keys.
    template <bool IN_PAGE> __device__ __forceinline__ void load(const Slices &slices, u32 columns) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, count = round_up8(columns) / 8;
        u32 piece = count % 4 == 0 ? c ^ key_swizzle(g) : c;
#pragma unroll
        for (u32 i = 0; i < MMA_COLUMNS / 32; i++) {
            u32 side = min(4, count - 4 * i);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                pieces[i][j] = make_uint4(0, 0, 0, 0);
                const uint4 *at = (const uint4 *)slices.at[i / 2] + i % 2 * (SLICE_PIECES / 2) + (8 * j + g) * side
                                  + piece;
                if (4 * i + c < count) pieces[i][j] = read_piece<IN_PAGE>(at);
            }
        }
    }

    // As `Q8Keys` does, whose pieces are not yet halves.
    __device__ __forceinline__ const KeyFragment &unpack() const { return *this; }

    // Replaces the key at the current token's place.
    __device__ __forceinline__ void take_current(u32 place, u32 first_column, const Workspace &workspace) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (u32 i = 0; i < MMA_COLUMNS / 32; i++) {
            uint4 own = ((const uint4 *)(workspace.current_key + first_column))[4 * i + c];
#pragma unroll
            for (u32 j = 0; j < 2; j++) ::take_current(pieces[i][j], own, place == g + 8 * j);
        }
    }

    // Q K^T over 64 elements.
    template <u32 FIRST> __device__ __forceinline__ void add_products(u32 first_column, const Workspace &workspace,
        Scores &sums) const {
        u32 lane = threadIdx.x % 32;
        const uint4 *query = (const uint4 *)(workspace.q[lane / 4 % BLOCK_HEADS] + 2 * first_column) + lane % 4;
#pragma unroll
        for (u32 i = FIRST; i < FIRST + 2; i++) {
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                uint4 q = query[8 * i + 4 * k];
                Fragment f = {{q.x, q.y, q.z, q.w}};
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    mma(sums.parts[j][k], f, word(pieces[i][j], 2 * k), word(pieces[i][j], 2 * k + 1));
                }
            }
        }
    }

    // Q K^T over the elements from `first_column` on; `columns` are left.
    __device__ __forceinline__ void add_scores(u32 first_column, u32 columns, const Workspace &workspace,
        Scores &sums) const {
        add_products<0>(first_column, workspace, sums);
        if (columns > SLICE_DIM) add_products<2>(first_column, workspace, sums);
    }
};

// A lane's values of a tile's slice: lane 4 g + c has piece g of its four positions.
struct ValueFragment {
    uint4 pieces[4];

    template <bool IN_PAGE>
    __device__ __forceinline__ void load(const Slices &slices, u32 slice, u32 columns) {
        // Lanes without a piece load another lane's; their columns are unused.
        u32 lane = threadIdx.x % 32, count = round_up8(columns) / 8, side = min(8, count - 8 * slice);
        u32 place = lane % 4 * 2, at = place * side;
        at += count % 8 == 0 ? lane / 4 ^ value_swizzle(place) : min(lane / 4, side - 1);
        at = opaque(at); // saves registers
        const uint4 *from = (const uint4 *)slices.at[slice];
        pieces[0] = read_piece<IN_PAGE>(from + at);
        pieces[2] = read_piece<IN_PAGE>(from + at + 8 * side);
        // The next place, where the piece is its neighbour in the swizzle.
        at = (count % 8 == 0 ? at ^ 1 : at) + side;
        pieces[1] = read_piece<IN_PAGE>(from + at);
        pieces[3] = read_piece<IN_PAGE>(from + at + 8 * side);
    }

    // As `Q8Values` does, whose pieces are not yet halves.
    __device__ __forceinline__ ValueFragment unpack(u32, u32) const { return *this; }

    __device__ __forceinline__ void take_current(u32 place, u32 slice, u32 first_column, const Workspace &workspace) {
        uint4 own = ((const uint4 *)(workspace.current_value + first_column))[8 * slice + threadIdx.x % 32 / 4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) ::take_current(pieces[i], own, place == position_of_lane(i));
    }

    // P V for a head.
    __device__ __forceinline__ void sum(const Fragment &probabilities, u32 slice, float *out) const {
        // Lanes from 16 on store the second half of the columns that lanes below have.
        u32 lane = opaque(threadIdx.x) % 32, second = lane / 16;
        float y[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 x[4], select = j % 2 ? 0x7632 : 0x5410;
#pragma unroll
            for (u32 k = 0; k < 4; k++) x[k] = word(pieces[k], j / 2);
            float sums[4] = {};
            mma(sums, probabilities, __byte_perm(x[0], x[1], select), __byte_perm(x[2], x[3], select));
            y[j] = second ? sums[1] + sums[3] : sums[0] + sums[2];
        }
        float4 *to = (float4 *)(out + SLICE_DIM * slice + 16 * (lane % 4) + 8 * second);
        to[0] = make_float4(y[0], y[1], y[2], y[3]);
        to[1] = make_float4(y[4], y[5], y[6], y[7]);
    }
};

// Four codes times their scale, in both halves of `scale`, as f16. A code becomes the low bits of a
// half from 1024 on, whose unit is one.
DEVICE uint2 q8_halves(u32 codes, u32 scale) {
    const u32 ONE = 0x3c003c00, MINUS_1152 = 0xe480e480;
    u32 low = half_fma(__byte_perm(codes, 0x64646464, 0x4140), ONE, MINUS_1152);
    u32 high = half_fma(__byte_perm(codes, 0x64646464, 0x4342), ONE, MINUS_1152);
    return make_uint2(half_mul(low, scale), half_mul(high, scale));
}

// Eight codes likewise.
DEVICE uint4 q8_piece(u32 first, u32 second, u32 scale) {
    uint2 low = q8_halves(first, scale), high = q8_halves(second, scale);
    return make_uint4(low.x, low.y, high.x, high.y);
}

// A number that a page holds as a code and a scale, as it is read from there.
DEVICE u16 q8_half(u8 code, u16 scale) { return (u16)q8_halves(code, scale).x; }

// A lane's keys of a tile in bytes, and the scales of their places.
struct Q8Keys {
    uint4 codes[MAX_SLICES][2];
    u32 scales[MAX_SLICES][2];

    // `columns` are left of the keys.
    template <bool IN_PAGE> __device__ __forceinline__ void load(const Slices &slices, u32 columns) {
        u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, count = q8_stride(columns) / 16;
#pragma unroll
        for (u32 i = 0; i < MAX_SLICES; i++) {
            u32 side = min(4, count - 4 * i);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                codes[i][j] = make_uint4(0, 0, 0, 0);
                scales[i][j] = 0;
                if (4 * i + c >= count) continue;
                const uint4 *at = (const uint4 *)slices.at[i];
                codes[i][j] = read_piece<IN_PAGE>(at + (8 * j + g) * side + c);
                scales[i][j] = read_piece<IN_PAGE>((const u32 *)(at + TILE_POSITIONS * side) + 8 * j + g);
            }
        }
    }

    __device__ __forceinline__ KeyFragment unpack() const {
        KeyFragment keys;
        u32 select = threadIdx.x % 4 < 2 ? 0x1010 : 0x3232;
#pragma unroll
        for (u32 i = 0; i < MAX_SLICES; i++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                const uint4 &x = codes[i][j];
                u32 scale = __byte_perm(scales[i][j], 0, select);
                keys.pieces[2 * i][j] = q8_piece(x.x, x.y, scale);
                keys.pieces[2 * i + 1][j] = q8_piece(x.z, x.w, scale);
            }
        }
        return keys;
    }
};

// A lane's values of a tile's slice in bytes, and the scales of its four positions.
struct Q8Values {
    uint4 codes[2];
    uint2 scales[2];

    template <bool IN_PAGE>
    __device__ __forceinline__ void load(const Slices &slices, u32 slice, u32 columns) {
        // Lanes without a piece load another lane's; their columns are unused.
        u32 lane = threadIdx.x % 32, lanes = min(32, q8_stride(columns) / 2 - 32 * slice), at = min(lane, lanes - 1);
        const uint4 *from = (const uint4 *)slices.at[slice];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            codes[i] = read_piece<IN_PAGE>(from + i * lanes + at);
            scales[i] = read_piece<IN_PAGE>((const uint2 *)(from + 2 * lanes) + 4 * i + lane % 4);
        }
    }

    // Those of positions in [from, to): others, whose probability is zero, may have scales that are NaN.
    __device__ __forceinline__ ValueFragment unpack(u32 from, u32 to) const {
        ValueFragment values;
        u32 select = threadIdx.x % 32 < 16 ? 0x1010 : 0x3232;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const uint4 &x = codes[i / 2];
            u32 place = position_of_lane(i), scale = i % 2 ? scales[i / 2].y : scales[i / 2].x;
            scale = place >= from && place < to ? __byte_perm(scale, 0, select) : 0;
            values.pieces[i] = i % 2 ? q8_piece(x.z, x.w, scale) : q8_piece(x.x, x.y, scale);
        }
        return values;
    }
};

// Whether attention may have softcaps and a KV cache in bytes: both cost registers and code.
#ifndef SOFTCAPS_AND_Q8
#define SOFTCAPS_AND_Q8 true
#endif

// The softmax of a tile: probabilities as high and low halves, from scores, which `scale` multiplies.
// Positions in [from, to) are visible.
DEVICE Fragment softmax_tile(const Attention &a, float scale, float (&x)[4], u32 tile, u32 from, u32 to,
                             Workspace &workspace) {
    u32 lane = threadIdx.x % 32;
    float row_max = LOWEST_FLOAT;
    float softcap = a.softcap;
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] *= scale;
    if (SOFTCAPS_AND_Q8 && softcap > 0.0f) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = tanhf(x[i] / softcap) * softcap;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 place = position_of_lane(i);
        // Invisible positions have no weight.
        if (place < from || place >= to) x[i] = -INFINITY_F;
        row_max = fmaxf(row_max, x[i]);
    }
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = expf(x[i] - row_max);
    float sum = (x[0] + x[1]) + (x[2] + x[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    u32 near = half_pair(x[0], x[1]), far = half_pair(x[2], x[3]), head = lane / 4;
    if (lane % 4 == 0 && head < BLOCK_HEADS) {
        workspace.row_maxes[head][tile] = row_max;
        workspace.row_sums[head][tile] = sum;
    }
    return {{near, residual_halves(x[0], x[1], near), far, residual_halves(x[2], x[3], far)}};
}

// The tiles of a split, combined for a head by whole warps; a thread has some columns,
// `HEAD_THREADS` apart. `columns` are left of the values.
struct CombinedTiles {
    float row_max, sum, values[HEAD_ITEMS];

    __device__ __forceinline__ CombinedTiles(const Workspace &workspace, u32 head, u32 column, u32 columns) {
        const float4 *maxes = (const float4 *)workspace.row_maxes[head],
            *tile_sums = (const float4 *)workspace.row_sums[head];
        float4 low = maxes[0], high = maxes[1], sums[2] = {tile_sums[0], tile_sums[1]};
        // Each lane computes a tile's factor.
        float tile_max = workspace.row_maxes[head][threadIdx.x % SPLIT_TILES];
        row_max = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                        fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
        row_max = fmaxf(row_max, LOWEST_FLOAT);
        float tile_factor = expf(tile_max - row_max);
        sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < HEAD_ITEMS; j++) values[j] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < SPLIT_TILES; i++) {
            float factor = __shfl_sync(~0u, tile_factor, i);
            sum = fmaf(element(sums[i / 4], i % 4), factor, sum);
            values[0] = fmaf(workspace.tile_values[i][head][column], factor, values[0]);
            if (columns > HEAD_THREADS) {
                values[1] = fmaf(workspace.tile_values[i][head][column + HEAD_THREADS], factor, values[1]);
            }
        }
    }
};
