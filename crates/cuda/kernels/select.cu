// What sparse attention does before it attends: the compression of blocks of tokens to one row
// each, and the selection of entries by an indexer, whose keys are f32.
#define KV_F32
#include "entries.cuh"

// The online softmax-weighted sum of a column over the tokens of a block so far.
struct OnlineSoftmaxSum {
    float max_score, sum, value;

    __device__ __forceinline__ void clear() {
        max_score = -INFINITY_F;
        sum = value = 0.0f;
    }

    __device__ __forceinline__ void add(float score, float x) {
        float m = fmaxf(max_score, score), keep = expf(max_score - m), weight = expf(score - m);
        sum = fmaf(sum, keep, weight);
        value = fmaf(value, keep, weight * x);
        max_score = m;
    }

    // `dim` is the distance of the three numbers in a state slot.
    __device__ __forceinline__ void load(const float *from, u32 dim) {
        max_score = from[0], sum = from[dim], value = from[2 * dim];
    }

    __device__ __forceinline__ void store(float *to, u32 dim) const {
        to[0] = max_score, to[dim] = sum, to[2 * dim] = value;
    }
};

// A thread takes a column of a sequence, one token after the other, so that a row does not depend
// on where a step ends. Grid: (spans, blocks of columns). Bound by latency.
KERNEL compress(const __grid_constant__ Compress p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.dim) return;
    u32 first = metadata.first(span), len = metadata.len(span), start = metadata.start(span);
    float *state = p.states + (u64)metadata.state_slot(span) * (p.overlaps ? 6 : 3) * p.dim + column;
    OnlineSoftmaxSum own, next;
    own.clear(), next.clear();
    if (start > 0) {
        own.load(state, p.dim);
        if (p.overlaps) next.load(state + 3 * p.dim, p.dim);
    }
    // Where blocks overlap, a row's first half is for the next block, the second for its own.
    u32 own_half = p.overlaps ? p.dim : 0;
    for (u32 row = first; row < first + len; row++) {
        u32 position = start + row - first;
        const float *x = p.x + (u64)row * p.stride + column, *scores = p.scores + (u64)row * p.score_stride + column;
        if (position % p.ratio == 0) {
            own.clear();
            if (p.overlaps && position > 0) own = next;
            next.clear();
        }
        own.add(scores[own_half], x[own_half]);
        if (p.overlaps) next.add(scores[0], x[0]);
        bool is_last = (position + 1) % p.ratio == 0;
        p.out[(u64)row * p.out_stride + column] = is_last ? own.value / own.sum : 0.0f;
    }
    own.store(state, p.dim);
    if (p.overlaps) next.store(state + 3 * p.dim, p.dim);
}

#define SCORE_THREADS 128u // each scores an entry at a time
#define INDEX_HEADS 8u  // heads whose queries are in shared memory at once

// The scores of a row's entries: the sum over heads, in order, of `weight * max(q . k, 0)`. Grid:
// (rows, blocks of entries). Shared memory: queries of some heads. Bound by arithmetic.
KERNEL __launch_bounds__(SCORE_THREADS) score_entries(const __grid_constant__ ScoreEntries p) {
    extern __shared__ __align__(16) float queries[]; // [INDEX_HEADS, key_stride]
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 t = threadIdx.x, row = p.first_row + blockIdx.x, key_stride = entry_elements(p.dim);
    u32 entries = (metadata.position(row) + 1) / p.ratio;
    // All are selected.
    if (entries <= p.top_k) return;
    const u32 *pages = metadata.pages(p.page_table, metadata.span(row));
    const float *q = p.q + (u64)row * p.q_stride, *weights = p.weights + (u64)row * p.weight_stride;
    u32 to_queries = (u32)__cvta_generic_to_shared(queries);
    for (u32 start = blockIdx.y * SCORE_THREADS; start < entries; start += gridDim.y * SCORE_THREADS) {
        u32 entry = min(start + t, entries - 1);
        const float *key = p.keys + entry_row(pages, entry, p.ratio) * key_stride;
        float score = 0.0f;
        for (u32 first = 0; first < p.heads; first += INDEX_HEADS) {
            __syncthreads();
            for (u32 i = t; i < INDEX_HEADS * key_stride; i += SCORE_THREADS) {
                u32 head = first + i / key_stride, at = i % key_stride;
                queries[i] = head < p.heads && at < p.dim ? q[head * p.dim + at] : 0.0f;
            }
            __syncthreads();
            float dots[INDEX_HEADS] = {};
            for (u32 i = 0; i < key_stride; i += 4) {
                float4 k = *(const float4 *)(key + i);
#pragma unroll
                for (u32 h = 0; h < INDEX_HEADS; h++) {
                    float4 x = load_shared(to_queries + 4 * (h * key_stride + i));
                    dots[h] = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, fmaf(x.x, k.x, dots[h]))));
                }
            }
#pragma unroll
            for (u32 h = 0; h < INDEX_HEADS; h++) {
                if (first + h < p.heads) score = fmaf(weights[first + h], fmaxf(dots[h], 0.0f), score);
            }
        }
        if (start + t < entries) p.scores[(u64)blockIdx.x * p.score_stride + start + t] = score;
    }
}

#define SELECT_THREADS 256u

// How many threads of the thread block before this one, and how many in all, have `x` set.
DEVICE uint2 count_threads(bool x) {
    __shared__ u32 counts[SELECT_THREADS / 32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, bits = __ballot_sync(~0u, x);
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(bits);
    __syncthreads();
    uint2 count = make_uint2(__popc(bits & ((1u << lane) - 1)), 0);
    for (u32 i = 0; i < SELECT_THREADS / 32; i++) {
        if (i < warp) count.x += counts[i];
        count.y += counts[i];
    }
    return count;
}

// Maps a score to an integer with the same order, which NaN has a place in, too: so exactly `top_k`
// entries are selected.
DEVICE u32 sort_key(float score) {
    u32 bits = __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Radix select, the highest byte first. Returns the `count`-th largest key, and how many of the
// entries with this key are among the `count` largest.
DEVICE uint2 kth_largest(const float *scores, u32 entries, u32 count) {
    __shared__ u32 histogram[256];
    __shared__ uint2 found;
    u32 t = threadIdx.x, prefix = 0, prefix_mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[t] = 0;
        __syncthreads();
        for (u32 i = t; i < entries; i += SELECT_THREADS) {
            u32 key = sort_key(scores[i]);
            if ((key & prefix_mask) == prefix) atomicAdd(histogram + (key >> shift & 255), 1);
        }
        __syncthreads();
        u32 above = 0;
        for (u32 i = t + 1; i < 256; i++) above += histogram[i];
        if (above < count && above + histogram[t] >= count) found = make_uint2(t, count - above);
        __syncthreads();
        prefix |= found.x << shift, prefix_mask |= 255u << shift, count = found.y;
    }
    return make_uint2(prefix, count);
}

// Writes the indices of a row's entries with the highest scores as floats, ascending, then -1. Ties
// go to the lower index. A block takes a row. Bound by latency.
KERNEL __launch_bounds__(SELECT_THREADS) select_entries(const __grid_constant__ SelectEntries p) {
    launch_dependents();
    grid_dependency_wait();
    u32 t = threadIdx.x, row = p.first_row + blockIdx.x;
    u32 entries = (StepMetadata{p.metadata}.position(row) + 1) / p.ratio;
    float *out = p.out + (u64)row * p.out_stride;
    if (entries <= p.top_k) {
        for (u32 i = t; i < p.top_k; i += SELECT_THREADS) out[i] = i < entries ? (float)i : -1.0f;
        return;
    }
    const float *scores = p.scores + (u64)blockIdx.x * p.score_stride;
    uint2 threshold = kth_largest(scores, entries, p.top_k);
    u32 selected = 0, ties_before = 0;
    for (u32 start = 0; start < entries; start += SELECT_THREADS) {
        u32 i = start + t, key = i < entries ? sort_key(scores[i]) : 0;
        bool is_tie = i < entries && key == threshold.x;
        uint2 ties = count_threads(is_tie);
        bool is_selected = i < entries && (key > threshold.x || (is_tie && ties_before + ties.x < threshold.y));
        uint2 before = count_threads(is_selected);
        if (is_selected) out[selected + before.x] = (float)i;
        selected += before.y, ties_before += ties.y;
    }
}
