// What the prefill attention kernels share: query rows, visible positions, online softmax, and the
// merging of KV splits.
//
// Positions form splits of 2048. Each split has its own softmax, and splits are merged in order: by
// one block, or, where a step has too few query rows to fill the device, by the last of several
// blocks that share them. A row has the same bits either way. Heads wider than MAX_SPLIT_DIM leave no
// registers for that: all their positions are one split.
#pragma once
#include "decode_mma.cuh"
#include "kv_split.cuh"

#define LOG2_E 1.4426950408889634f

// Copies sixteen bytes to shared memory asynchronously, or writes zeros.
DEVICE void copy_or_clear(u32 to, const void *from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_valid ? 16 : 0)
                 : "memory");
}

DEVICE void store_shared(u32 to, const uint4 &x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Loads two floats that another block may have written.
DEVICE float2 load_relaxed_pair(const float *at) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
    return x;
}

// Reductions over the four lanes that share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The query rows of a block: row r is head r % group of token r / group of a span.
struct QueryRows {
    u32 span, first, count, group, tokens;

    __device__ __forceinline__ u32 token(u32 r) const { return (first + min(r, count - 1)) / group; }
    __device__ __forceinline__ u32 head(u32 r) const { return (first + min(r, count - 1)) % group; }
};

// Finds this block's rows, up to ROWS of them, if there are any. The last rows of a span, which attend
// to most positions, come first. Each lane looks at a span, as a step may have hundreds of short ones.
template <u32 ROWS> DEVICE bool find_query_rows(const Attention &a, const StepMetadata &metadata, QueryRows &rows) {
    u32 block = blockIdx.x, spans = metadata.spans(), lane = threadIdx.x % 32;
    rows.group = a.heads / a.kv_heads;
    for (u32 start = 0; start < spans; start += 32) {
        u32 span = start + lane;
        bool is_prompt = span < spans && metadata.is_prompt(span);
        u32 all = is_prompt ? metadata.len(span) * rows.group : 0;
        u32 blocks = (all + ROWS - 1) / ROWS;
        // Blocks of the spans up to a lane's own.
        u32 end = blocks;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += before;
        }
        u32 behind = __ballot_sync(~0u, block < end);
        if (behind) {
            u32 found = __ffs(behind) - 1;
            u32 last = __shfl_sync(~0u, end, found) - 1 - block;
            rows.span = start + found;
            rows.tokens = metadata.len(rows.span);
            rows.first = last * ROWS;
            rows.count = min(ROWS, rows.tokens * rows.group - rows.first);
            return true;
        }
        block -= __shfl_sync(~0u, end, 31);
    }
    return false;
}

// Visible positions of some rows.
struct PositionRange {
    u32 from, to;

    __device__ __forceinline__ bool has(u32 position) const { return position >= from && position < to; }
    __device__ __forceinline__ bool has_block(u32 start, u32 positions) const {
        return start >= from && start + positions <= to;
    }
};

// A block's work: query rows of a KV head, and a share of the splits that they attend to. Positions are
// taken in KV blocks of POSITIONS.
template <u32 DIM, u32 ROWS, u32 POSITIONS> struct PrefillBlock {
    static const bool HAS_SPLITS = DIM <= MAX_SPLIT_DIM;
    static const u32 SPLIT = HAS_SPLITS ? PREFILL_SPLIT / POSITIONS : ~0u / POSITIONS; // KV blocks of a split
    QueryRows rows;
    u32 kv_head;
    u32 row, start, end;     // first row of the span, its position, and the end of the sequence
    PositionRange any, all;  // positions that some row, and that all rows attend to
    u32 first, last;         // KV blocks that some row attends to
    u32 first_split, splits;
    bool is_shared;          // with blocks that have other splits

    // Whether there is work for this block.
    __device__ __forceinline__ bool find(const Attention &a, const StepMetadata &metadata) {
        if (!find_query_rows<ROWS>(a, metadata, rows)) return false;
        kv_head = blockIdx.y, row = metadata.first(rows.span);
        start = metadata.start(rows.span), end = start + rows.tokens;
        u32 low = position(0), high = position(rows.count - 1);
        any = {first_visible(a, low), end_visible(a, high, end)};
        all = {first_visible(a, high), end_visible(a, low, end)};
        first = any.from / POSITIONS, last = (any.to - 1) / POSITIONS;
        first_split = first / SPLIT, splits = last / SPLIT - first_split + 1;
        is_shared = gridDim.z > 1 && splits > 1;
        return blockIdx.z < splits;
    }

    __device__ __forceinline__ u32 position(u32 r) const { return start + rows.token(r); }

    // The positions that a row attends to.
    __device__ __forceinline__ PositionRange visible(const Attention &a, u32 r) const {
        return {first_visible(a, position(r)), end_visible(a, position(r), end)};
    }

    // The first KV block, whether a KV block ends its split, and the one after it: blocks that share splits
    // take every `gridDim.z`th.
    __device__ __forceinline__ u32 first_kv_block() const {
        return blockIdx.z > 0 ? (first_split + blockIdx.z) * SPLIT : first;
    }
    __device__ __forceinline__ bool ends_split(u32 kv_block) const {
        return kv_block == last || (kv_block + 1) % SPLIT == 0;
    }
    __device__ __forceinline__ u32 after(u32 kv_block) const {
        return kv_block + 1 + (ends_split(kv_block) ? (gridDim.z - 1) * SPLIT : 0);
    }
    // The number of a KV block's split among those that the rows attend to.
    __device__ __forceinline__ u32 split(u32 kv_block) const { return kv_block / SPLIT - first_split; }

    // The eight elements from `first` on of a query, as halves, times the factor of its scores: to
    // powers of two, or, of scores with a cap, to the cap.
    __device__ __forceinline__ uint4 query(const Attention &a, u32 r, u32 first) const {
        const float *q = a.q + (u64)(row + rows.token(r)) * a.q_stride
                         + (kv_head * rows.group + rows.head(r)) * a.key_dim;
        float factor = query_scale(a, position(r)) * (a.softcap > 0.0f ? 1.0f / a.softcap : LOG2_E), x[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) x[j] = first + j < a.key_dim ? clamp_half(q[first + j] * factor) : 0.0f;
        return make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
                          half_pair(x[6], x[7]));
    }
};

// Calls `see` with each of a lane's scores, its position in the KV block, and which of the lane's two
// rows.
template <u32 EIGHTS, class See> DEVICE void each(float (&scores)[EIGHTS][4], See see) {
#pragma unroll
    for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) see(scores[n][j], 8 * n + threadIdx.x % 4 * 2 + j % 2, j / 2);
    }
}

// Caps the scores of the KV block that begins at a position, and hides what a lane's rows do not attend
// to; `is_whole` if they attend to all.
template <u32 EIGHTS>
DEVICE void mask(const Attention &a, const PositionRange (&visible)[2], u32 start, bool is_whole,
                 float (&scores)[EIGHTS][4]) {
    if (a.softcap > 0.0f) each(scores, [&](float &s, u32, u32) { s = tanhf(s) * (a.softcap * LOG2_E); });
    if (is_whole) return;
    each(scores, [&](float &s, u32 at, u32 i) {
        if (!visible[i].has(start + at)) s = -INFINITY_F;
    });
}

// The softmax of a lane's two rows over some positions: row max, row sum, and sum of values. Before
// `sum_quads` a row sum is this lane's part of it.
template <u32 EIGHTS> struct LaneSoftmax {
    float row_max[2], row_sum[2], out[EIGHTS][4];

    __device__ __forceinline__ void clear() {
        row_max[0] = row_max[1] = -INFINITY_F;
        row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    }

    // Turns scores to probabilities relative to the new row max. Returns the factors of what older ones
    // gave to the outputs.
    template <u32 SCORES> __device__ __forceinline__ float2 add(float (&scores)[SCORES][4]) {
        float now[2] = {-INFINITY_F, -INFINITY_F}, reference[2], factors[2];
        each(scores, [&](float &s, u32, u32 i) { now[i] = fmaxf(now[i], s); });
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float m = fmaxf(row_max[i], quad_max(now[i]));
            // A row without visible positions so far must not become NaN.
            reference[i] = m == -INFINITY_F ? 0.0f : m;
            factors[i] = exp2_approx(row_max[i] - reference[i]);
            row_max[i] = m;
            row_sum[i] *= factors[i];
        }
        each(scores, [&](float &s, u32, u32 i) {
            s = exp2_approx(s - reference[i]);
            row_sum[i] += s;
        });
        return make_float2(factors[0], factors[1]);
    }

    // Mostly no row max changes.
    __device__ __forceinline__ void rescale(float2 factors) {
        if (!__any_sync(~0u, factors.x != 1.0f || factors.y != 1.0f)) return;
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            out[n][0] *= factors.x, out[n][1] *= factors.x;
            out[n][2] *= factors.y, out[n][3] *= factors.y;
        }
    }

    __device__ __forceinline__ void sum_quads() {
        row_sum[0] = quad_sum(row_sum[0]);
        row_sum[1] = quad_sum(row_sum[1]);
    }
};

// The results of a lane's rows over a split in memory, `[splits, value_stride + PARTIAL_EXTRA]` for each
// row.
struct LanePartials {
    float *rows[2]; // none for rows that the block does not have
    u32 c, stride;

    template <class Block>
    __device__ __forceinline__ LanePartials(const Attention &a, const Block &block, u32 first, u32 c, u32 split)
        : c(c), stride(round_up8(a.value_dim)) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 r = first + 8 * i, head = block.kv_head * block.rows.group + block.rows.head(r);
            u64 at = ((u64)(block.row + block.rows.token(r)) * a.heads + head) * a.max_splits + split;
            rows[i] = r < block.rows.count ? a.partials + at * (stride + PARTIAL_EXTRA) : nullptr;
        }
    }

    // Whether there are values of row `i` in eight `n`.
    __device__ __forceinline__ bool has(u32 i, u32 n) const { return rows[i] && 8 * n < stride; }
    // Row max and row sum.
    __device__ __forceinline__ float2 sums(u32 i) const {
        return rows[i] ? load_relaxed_pair(rows[i] + stride) : make_float2(-INFINITY_F, 0.0f);
    }
    __device__ __forceinline__ float2 values(u32 i, u32 n) const { return load_relaxed_pair(rows[i] + 8 * n + 2 * c); }
    __device__ __forceinline__ void put_sums(u32 i, float2 x) const {
        if (rows[i] && c == 0) *(float2 *)(rows[i] + stride) = x;
    }
    __device__ __forceinline__ void put_values(u32 i, u32 n, float2 x) const {
        *(float2 *)(rows[i] + 8 * n + 2 * c) = x;
    }
};

// Merges stored results with a lane's own.
template <class Stored, u32 EIGHTS> DEVICE void merge_stored(const Stored &stored, LaneSoftmax<EIGHTS> &softmax) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float2 sums = stored.sums(i);
        float m = fmaxf(softmax.row_max[i], sums.x);
        // A row without visible positions so far must not become NaN.
        float reference = m == -INFINITY_F ? 0.0f : m;
        float factor = exp2_approx(softmax.row_max[i] - reference), stored_factor = exp2_approx(sums.x - reference);
        softmax.row_max[i] = m;
        softmax.row_sum[i] = softmax.row_sum[i] * factor + sums.y * stored_factor;
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            if (!stored.has(i, n)) break;
            float &x = softmax.out[n][2 * i], &y = softmax.out[n][2 * i + 1];
            float2 values = stored.values(i, n);
            x = x * factor + values.x * stored_factor;
            y = y * factor + values.y * stored_factor;
        }
    }
}

// Stores a lane's results, and clears them.
template <class Stored, u32 EIGHTS> DEVICE void store_split(const Stored &stored, LaneSoftmax<EIGHTS> &softmax) {
    // All lanes have read the row max and the row sum that one of them replaces.
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            if (!stored.has(i, n)) break;
            stored.put_values(i, n, make_float2(softmax.out[n][2 * i], softmax.out[n][2 * i + 1]));
        }
        stored.put_sums(i, make_float2(softmax.row_max[i], softmax.row_sum[i]));
    }
    __syncwarp();
    softmax.clear();
}

// Ends a split with a KV block: it is merged with those before it, which are in `merged`, or
// stored for the last of the blocks that share splits. `first`: a lane's first row; `c`: its pair of
// columns in eight.
template <class Block, class Stored, u32 EIGHTS>
DEVICE void end_split(const Attention &a, const Block &block, u32 kv_block, u32 first, u32 c, const Stored &merged,
                      LaneSoftmax<EIGHTS> &softmax) {
    softmax.sum_quads();
    if (!Block::HAS_SPLITS) return;
    u32 split = block.split(kv_block);
    if (block.is_shared) {
        store_split(LanePartials(a, block, first, c, split), softmax);
        return;
    }
    if (split > 0) merge_stored(merged, softmax);
    if (kv_block < block.last) store_split(merged, softmax);
}

// Merges the splits that several blocks share, in the last of them. Whether this block has the
// results; THREADS, from the first on, call it.
template <u32 THREADS, class Block, u32 EIGHTS>
DEVICE bool merge_splits(const Attention &a, const Block &block, u32 first, u32 c, LaneSoftmax<EIGHTS> &softmax) {
    if (!Block::HAS_SPLITS || !block.is_shared) return true;
    u32 *arrivals = a.arrivals + blockIdx.y * gridDim.x + blockIdx.x;
    if (!is_last_block<THREADS>(arrivals, min(gridDim.z, block.splits))) return false;
    for (u32 split = 0; split < block.splits; split++) {
        merge_stored(LanePartials(a, block, first, c, split), softmax);
    }
    return true;
}

// Divides a lane's outputs by their row sums, sinks included, and stores them.
template <class Block, u32 EIGHTS>
DEVICE void store_outputs(const Attention &a, const Block &block, u32 first, u32 c,
                          const LaneSoftmax<EIGHTS> &softmax) {
    const QueryRows &rows = block.rows;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 r = first + 8 * i, head = block.kv_head * rows.group + rows.head(r);
        float all = softmax.row_sum[i], scale = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head] * LOG2_E, m = fmaxf(softmax.row_max[i], sink);
            scale = exp2_approx(softmax.row_max[i] - m);
            all = all * scale + exp2_approx(sink - m);
        }
        if (r >= rows.count) continue;
        u64 at = block.row + rows.token(r);
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            float y[2];
            u32 column = 8 * n + 2 * c, to_column = head * a.value_dim + column;
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                y[j] = softmax.out[n][2 * i + j] * scale / all;
                if (a.out && column + j < a.value_dim) store_relaxed(a.out + at * a.out_stride + to_column + j, y[j]);
            }
            // Heads have an even number of columns.
            if (a.half_out && column < a.value_dim) {
                u16 *to = a.half_out + half_at(a.half_stride, at, to_column);
                *(u32 *)to = half_pair(as_input(y[0]), as_input(y[1]));
            }
        }
    }
}

