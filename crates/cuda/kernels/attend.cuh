// What kernels of attention share: their parameters, and how segments are joined.
//
// But for prompts' rows, positions come in segments of 128, counted from position 0. A segment has its own softmax, and
// segments are joined in order, by one block or after many: a row has the same bits either way.
#pragma once
#include "kept.cuh"

#define SEGMENT 128u
#define PART_EXTRA 4u // floats of a segment beside its values: largest score, sum, and padding

// The quotient of two numbers whose product is below 2^32. Of the second one, 2^32 divided by it and
// rounded up is given, or 0 if it is 1.
DEVICE u32 divide(u32 x, u32 inverse) { return inverse ? __umulhi(x, inverse) : x; }

// Waits for all of the first `BLOCK` threads of a block.
template <u32 BLOCK> DEVICE void sync() { asm volatile("bar.sync 1, %0;" ::"n"(BLOCK) : "memory"); }

DEVICE u32 up8(u32 n) { return (n + 7) / 8 * 8; }

// What a row sees: from, to.
DEVICE uint2 seen(const Attend &a, u32 row) {
    Feed feed = {a.metadata};
    u32 position = feed.position(row), span = feed.span(row);
    if (!a.is_causal) return make_uint2(0, feed.start(span) + feed.len(span));
    u32 from = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    return make_uint2(from, position + 1);
}

// The largest score and the sum of exponentials so far, joined with those of a segment; gives the
// factors of the old sum of values and of the new one.
DEVICE float2 join(float &most, float &sum, float segment_most, float segment_sum) {
    float m = fmaxf(most, segment_most);
    float old_factor = expf(most - m), new_factor = expf(segment_most - m);
    sum = sum * old_factor + segment_sum * new_factor;
    most = m;
    return make_float2(old_factor, new_factor);
}

// Where results of a head go, and its sink: who waits for sums can have the addresses before.
struct Results {
    float *out;        // or none
    u16 *half_out;     // or none
    const float *sink; // or none
    u32 dim;

    __device__ __forceinline__ Results(const Attend &a, u32 row, u32 head)
        : out(a.out), half_out(a.half_out), sink(a.sinks), dim(a.value_dim) {
        u32 at = head * dim;
        if (out) out += (u64)row * a.out_stride + at;
        if (half_out) half_out += (u64)row * a.half_stride + at;
        if (sink) sink += head;
    }

    // What the sums of values are multiplied with in the end.
    __device__ __forceinline__ float factor(float most, float sum) const {
        if (!sink) return 1.0f / sum;
        float2 factors = join(most, sum, *sink, 1.0f);
        return factors.x / sum;
    }

    __device__ __forceinline__ void put(u32 i, float y) const {
        if (i >= dim) return;
        if (out) publish(out + i, y);
        if (half_out) publish(half_out + i, to_input(y));
    }
};

// Joins the segments of some heads that many blocks have made, in order; warps of each head make the
// factors, and a thread makes up to ITEMS results. `most_parts` segments of each head at a time, MOST at
// most, are taken to shared memory.
template <int MOST_HEADS, u32 BLOCK, int ITEMS, u32 MOST, typename Segments>
DEVICE void join_segments(const Attend &a, u32 row, u32 first_head, u32 heads, u32 count, const float *shared,
                          u32 most_parts, const Segments &segments) {
    // What sums so far are multiplied with, what a segment's values are, what its sum becomes, and the
    // largest score so far.
    __shared__ float4 factors[MOST_HEADS][MOST];
    __shared__ float mosts[MOST_HEADS];
    // In the persistent kernel threads from this one on have no results to make.
    const u32 BUSY = BLOCK / 4;
    u32 t = threadIdx.x, stride = kept_stride(a.value_dim), part = stride + PART_EXTRA, outputs = heads * stride;
    u32 h = t / 32 % MOST_HEADS;
    float sum[ITEMS] = {}, value[ITEMS] = {};
    for (u32 base = 0; base < count; base += most_parts) {
        u32 n = min(most_parts, count - base);
        sync<BLOCK>();
        segments.take(base, n);
        sync<BLOCK>();
        // By those who have least to do.
        if (t >= BUSY) segments.clear(base, n, t - BUSY, BLOCK - BUSY);
        const float *own = shared + h * most_parts * part + stride;
        float so_far = base ? mosts[h] : -INFINITY_F;
        u32 lane = t % 32;
        for (u32 begin = t / (32 * MOST_HEADS) * 32; h < heads && begin < n; begin += BLOCK / MOST_HEADS) {
            // The largest score of segments that other warps have, then of those before this lane's.
            u32 i = begin + lane;
            float last = so_far, most = i < n ? own[i * part] : -INFINITY_F, up_to = most;
            for (u32 j = lane; j < begin; j += 32) last = fmaxf(last, own[j * part]);
            last = warp_max(last);
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                float other = __shfl_up_sync(~0u, up_to, step);
                up_to = lane >= step ? fmaxf(up_to, other) : up_to;
            }
            float before = __shfl_up_sync(~0u, up_to, 1);
            last = lane > 0 ? fmaxf(last, before) : last;
            float now = fmaxf(last, most), fresh = expf(most - now);
            if (i < n) factors[h][i] = make_float4(expf(last - now), fresh, own[i * part + 1] * fresh, now);
        }
        sync<BLOCK>();
        if (t < MOST_HEADS) mosts[t] = factors[t][n - 1].w;
#pragma unroll
        for (u32 j = 0; j < ITEMS; j++) {
            u32 item = t + BLOCK * j, head = MOST_HEADS == 1 ? 0 : item / stride, column = item - head * stride;
            if (item >= outputs) break;
            const float *at = shared + head * most_parts * part + column;
            float s = sum[j], v = value[j];
#pragma unroll 8
            for (u32 i = 0; i < n; i++) {
                float4 f = factors[head][i];
                s = s * f.x + f.z;
                v = v * f.x + at[i * part] * f.y;
            }
            sum[j] = s;
            value[j] = v;
        }
    }
    if (t >= BUSY) segments.finish();
    // Everything else is done before results may be seen.
#pragma unroll
    for (u32 j = 0; j < ITEMS; j++) {
        u32 item = t + BLOCK * j, head = MOST_HEADS == 1 ? 0 : item / stride;
        if (item >= outputs) break;
        float most = factors[head][(count - 1) % most_parts].w;
        value[j] *= Results(a, row, first_head + head).factor(most, sum[j]);
    }
    sync<BLOCK>();
#pragma unroll
    for (u32 j = 0; j < ITEMS; j++) {
        u32 item = t + BLOCK * j, head = MOST_HEADS == 1 ? 0 : item / stride;
        if (item >= outputs) break;
        Results(a, row, first_head + head).put(item - head * stride, value[j]);
    }
}
