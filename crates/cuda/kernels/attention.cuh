// What the decode attention kernels share: online-softmax merging, results, and the combination of
// KV splits.
//
// Decode attention is split-KV (flash decoding): positions form splits of 128, counted from
// position 0. Each split has its own softmax, and splits are combined in order (log-sum-exp merge),
// by one block or across blocks: a row has the same bits either way.
#pragma once
#include "kv_layout.cuh"

// x / n where x * n < 2^32. `inverse` is 2^32 / n rounded up, or 0 if n is 1.
DEVICE u32 divide(u32 x, u32 inverse) { return inverse ? __umulhi(x, inverse) : x; }

DEVICE u32 round_up8(u32 n) { return (n + 7) / 8 * 8; }

// The first position that a position attends to.
DEVICE u32 first_visible(const Attention &a, u32 position) {
    if (!a.window) return 0;
    if (a.is_chunked) return position / a.window * a.window;
    u32 before = a.is_causal ? a.window - 1 : a.window / 2;
    return position > before ? position - before : 0;
}

// The end of the positions that a position attends to, of a sequence that ends at `end`.
DEVICE u32 end_visible(const Attention &a, u32 position, u32 end) {
    if (a.is_causal) return position + 1;
    return a.window ? min(end, position + a.window / 2 + 1) : end;
}

// The range of positions that a row attends to: from, to.
DEVICE uint2 visible(const Attention &a, u32 row) {
    StepMetadata metadata = {a.metadata};
    u32 position = metadata.position(row), span = metadata.span(row);
    return make_uint2(first_visible(a, position), end_visible(a, position, metadata.start(span) + metadata.len(span)));
}

// The factor of the scores of a query at a position.
DEVICE float query_scale(const Attention &a, u32 position) {
    if (a.temperature_length == 0) return a.scale;
    float steps = (float)((position + a.temperature_offset) / a.temperature_length);
    return a.scale * (1.0f + a.temperature_growth * log1pf(steps));
}

// Merges a split's softmax into the running one: updates the row max and row sum, and returns the
// factors of the old and of the new sum of values.
DEVICE float2 combine(float &row_max, float &row_sum, float split_max, float split_sum) {
    float m = fmaxf(row_max, split_max);
    float old_factor = expf(row_max - m), new_factor = expf(split_max - m);
    row_sum = row_sum * old_factor + split_sum * new_factor;
    row_max = m;
    return make_float2(old_factor, new_factor);
}

// Destination of a head's results, and its attention sink. Addresses are computed before the sums
// arrive.
struct AttentionOutput {
    float *out;        // or none
    u16 *half_out;     // or none
    u32 half_stride, row, column; // of its first element
    const float *sink; // or none
    u32 dim;

    __device__ __forceinline__ AttentionOutput(const Attention &a, u32 row, u32 head)
        : out(a.out), half_out(a.half_out), half_stride(a.half_stride), row(row), column(head * a.value_dim),
          sink(a.sinks), dim(a.value_dim) {
        if (out) out += (u64)row * a.out_stride + column;
        if (sink) sink += head;
    }

    // The final factor of the sums of values: one over the row sum with the sink.
    __device__ __forceinline__ float factor(float row_max, float row_sum) const {
        if (!sink) return 1.0f / row_sum;
        float2 factors = combine(row_max, row_sum, *sink, 1.0f);
        return factors.x / row_sum;
    }

    __device__ __forceinline__ void put(u32 i, float y) const {
        if (i >= dim) return;
        if (out) store_relaxed(out + i, y);
        if (half_out) store_relaxed(half_out + half_at(half_stride, row, column + i), to_input(y));
    }
};

// Combines the KV splits of some heads, whose partials many blocks have made, in order. Warps
// compute each split's factors; a thread computes up to ITEMS results. At most `max_partials` <=
// MAX partials per head are in shared memory at a time.
//
// A partial is `stride` values, the row max, the row sum, and padding to PARTIAL_EXTRA floats.
// `Partials` brings them: `take` copies some splits' to shared memory, `clear` resets them in memory
// to sentinels, `finish` orders the resets before the results. After grids there is nothing to reset
// (`CopiedPartials`); in the persistent kernel they are polled (`AwaitedPartials`).
template <int MAX_HEADS, u32 BLOCK, int ITEMS, u32 MAX, typename Partials>
DEVICE void combine_splits(const Attention &a, u32 row, u32 first_head, u32 heads, u32 count, const float *shared,
                          u32 max_partials, const Partials &partials) {
    // Per split: the factor of the running sums, the factor of the split's values, its rescaled row
    // sum, and the running row max.
    __shared__ float4 factors[MAX_HEADS][MAX];
    __shared__ float row_maxes[MAX_HEADS];
    // Threads from this one on have no results in the persistent kernel: they reset sentinels.
    const u32 BUSY = BLOCK / 4;
    u32 t = threadIdx.x, stride = kv_stride(a.value_dim), part = stride + PARTIAL_EXTRA, outputs = heads * stride;
    u32 h = t / 32 % MAX_HEADS;
    float row_sum[ITEMS] = {}, value[ITEMS] = {};
    for (u32 base = 0; base < count; base += max_partials) {
        u32 n = min(max_partials, count - base);
        sync<BLOCK>();
        partials.take(base, n);
        sync<BLOCK>();
        // By the threads with the least work.
        if (t >= BUSY) partials.clear(base, n, t - BUSY, BLOCK - BUSY);
        const float *partial = shared + h * max_partials * part + stride;
        float running_max = base ? row_maxes[h] : -INFINITY_F;
        u32 lane = t % 32;
        for (u32 begin = t / (32 * MAX_HEADS) * 32; h < heads && begin < n; begin += BLOCK / MAX_HEADS) {
            // The running row max before this warp's splits, then (by a warp scan) before this
            // lane's.
            u32 i = begin + lane;
            float max_before = running_max, row_max = i < n ? partial[i * part] : -INFINITY_F, scan = row_max;
            for (u32 j = lane; j < begin; j += 32) max_before = fmaxf(max_before, partial[j * part]);
            max_before = warp_max(max_before);
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                float other = __shfl_up_sync(~0u, scan, step);
                scan = lane >= step ? fmaxf(scan, other) : scan;
            }
            float before = __shfl_up_sync(~0u, scan, 1);
            max_before = lane > 0 ? fmaxf(max_before, before) : max_before;
            float now = fmaxf(max_before, row_max), split_factor = expf(row_max - now);
            if (i < n) factors[h][i] = make_float4(expf(max_before - now), split_factor,
                partial[i * part + 1] * split_factor, now);
        }
        sync<BLOCK>();
        if (t < MAX_HEADS) row_maxes[t] = factors[t][n - 1].w;
#pragma unroll
        for (u32 j = 0; j < ITEMS; j++) {
            u32 item = t + BLOCK * j, head = MAX_HEADS == 1 ? 0 : item / stride, column = item - head * stride;
            if (item >= outputs) break;
            const float *at = shared + head * max_partials * part + column;
            float s = row_sum[j], v = value[j];
#pragma unroll 8
            for (u32 i = 0; i < n; i++) {
                float4 f = factors[head][i];
                s = s * f.x + f.z;
                v = v * f.x + at[i * part] * f.y;
            }
            row_sum[j] = s;
            value[j] = v;
        }
    }
    if (t >= BUSY) partials.finish();
    // Sentinels are reset before other blocks may see the results.
#pragma unroll
    for (u32 j = 0; j < ITEMS; j++) {
        u32 item = t + BLOCK * j, head = MAX_HEADS == 1 ? 0 : item / stride;
        if (item >= outputs) break;
        float row_max = factors[head][(count - 1) % max_partials].w;
        value[j] *= AttentionOutput(a, row, first_head + head).factor(row_max, row_sum[j]);
    }
    sync<BLOCK>();
#pragma unroll
    for (u32 j = 0; j < ITEMS; j++) {
        u32 item = t + BLOCK * j, head = MAX_HEADS == 1 ? 0 : item / stride;
        if (item >= outputs) break;
        AttentionOutput(a, row, first_head + head).put(item - head * stride, value[j]);
    }
}
