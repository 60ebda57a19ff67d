// Attention over pages. Keys and values are in half precision: keys `[page, kv_head, key_dim / 8,
// PAGE_TOKENS, 8]`, so that neighbouring tokens lie side by side; values `[page, kv_head,
// PAGE_TOKENS, value_stride]`; both strides are multiples of 8, and the rest is zero.
//
// Positions come in segments of 128, counted from position 0. A segment has its own softmax, and
// segments are joined in order, by one block or after many: a row has the same bits either way.
#include "common.cuh"

#define SEGMENT 128u

struct Attend {
    const float *q; // [rows, q_stride]
    const u16 *keys;
    const u16 *values;
    const u32 *feed;
    const float *sinks; // [heads], or none
    float *out;         // [rows, out_stride], or none
    u16 *half_out;      // [rows, half_stride], or none
    float *partials;    // [rows, heads, segments, value_stride + 2] if the segments are spread
    u32 *arrivals;      // [rows, blocks of heads]: shares of segments that are done, zero before
    float scale, softcap;
    u32 q_stride, out_stride, half_stride;
    u32 heads, kv_heads, key_dim, value_dim;
    u32 window; // 0 for none
    u32 is_causal;
    u32 table; // which of the windows' page tables
    u32 segments; // that the partials have room for
    u32 is_spread;
};

DEVICE u32 up8(u32 n) { return (n + 7) / 8 * 8; }

// What a row sees: from, to.
DEVICE uint2 seen(const Attend &a, u32 row) {
    Feed feed = {a.feed};
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

// The result of a head from all its segments.
DEVICE void finish(const Attend &a, u32 row, u32 head, u32 i, float most, float sum, float value) {
    if (i >= a.value_dim) return;
    if (a.sinks) {
        float2 factors = join(most, sum, a.sinks[head], 1.0f);
        value = value * factors.x;
    }
    float y = value / sum;
    u32 at = head * a.value_dim + i;
    if (a.out) a.out[(u64)row * a.out_stride + at] = y;
    if (a.half_out) a.half_out[(u64)row * a.half_stride + at] = to_input(y);
}

// Joins the segments of a head that many blocks have made.
DEVICE void join_segments(const Attend &a, u32 row, u32 head, u32 count) {
    u32 stride = up8(a.value_dim);
    const float *from = a.partials + ((u64)row * a.heads + head) * a.segments * (stride + 2);
    for (u32 i = threadIdx.x; i < stride; i += blockDim.x) {
        float most = -INFINITY_F, sum = 0.0f, value = 0.0f;
        for (u32 segment = 0; segment < count; segment++) {
            const float *at = from + segment * (stride + 2);
            float2 factors = join(most, sum, __ldcg(at + stride), __ldcg(at + stride + 1));
            value = value * factors.x + __ldcg(at + i) * factors.y;
        }
        finish(a, row, head, i, most, sum, value);
    }
}

// Whether this block is the last of so many that come here, whose writes it can then read.
DEVICE bool is_last(u32 *arrivals, u32 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals, 1) + 1 == blocks;
        if (last) *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Blocks are a row, some query heads of a key head, and one of the shares of segments.
template <int HEADS> DEVICE void attend(const Attend &a) {
    extern __shared__ float shared[];
    __shared__ float room[4][HEADS];
    __shared__ u32 page_of[SEGMENT / PAGE_TOKENS];
    let_next_start();
    wait_for_inputs();
    u32 t = threadIdx.x, row = blockIdx.x;
    uint2 range = seen(a, row);
    u32 first = range.x / SEGMENT, last = (range.y - 1) / SEGMENT;
    if (first + blockIdx.z > last) return;
    u32 group = a.heads / a.kv_heads, per_kv = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.y / per_kv, first_head = kv_head * group + blockIdx.y % per_kv * HEADS;
    u32 count = min((u32)HEADS, (kv_head + 1) * group - first_head);
    u32 key_stride = up8(a.key_dim), stride = up8(a.value_dim), eights = stride / 8;
    u32 splits = eights >= 128 ? 1 : 128 / eights;

    // Of a single segment nothing is left to join.
    bool is_spread = a.is_spread && first < last;
    float *q = shared;                          // [HEADS, key_stride]
    float *weights = q + HEADS * key_stride;    // [HEADS, SEGMENT]
    float *part = weights + HEADS * SEGMENT;    // [splits, HEADS, stride]
    float *total = part + splits * HEADS * stride; // [HEADS, stride]
    for (u32 i = t; i < HEADS * key_stride; i += 128) {
        u32 head = i / key_stride, at = i % key_stride;
        bool is_in = head < count && at < a.key_dim;
        q[i] = is_in ? a.q[(u64)row * a.q_stride + (first_head + head) * a.key_dim + at] : 0.0f;
    }
    for (u32 i = t; i < HEADS * stride; i += 128) total[i] = 0.0f;
    Feed feed = {a.feed};
    const u32 *pages = feed.pages(a.table, feed.span(row));
    float most[HEADS], sum[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        most[h] = -INFINITY_F;
        sum[h] = 0.0f;
    }
    __syncthreads();

    for (u32 segment = first + blockIdx.z; segment <= last; segment += gridDim.z) {
        u32 from = max(range.x, segment * SEGMENT) - segment * SEGMENT;
        u32 to = min(range.y, (segment + 1) * SEGMENT) - segment * SEGMENT;
        float scores[HEADS] = {};
        bool is_in = t >= from && t < to;
        if (is_in) {
            u32 position = segment * SEGMENT + t;
            u64 page = pages[position / PAGE_TOKENS];
            page_of[t / PAGE_TOKENS] = page;
            const uint4 *k = (const uint4 *)a.keys
                + (page * a.kv_heads + kv_head) * key_stride / 8 * PAGE_TOKENS + position % PAGE_TOKENS;
#pragma unroll 4
            for (u32 i = 0; i < key_stride / 8; i++) {
                uint4 eight = k[i * PAGE_TOKENS];
                float2 x0 = from_half_pair(eight.x), x1 = from_half_pair(eight.y);
                float2 x2 = from_half_pair(eight.z), x3 = from_half_pair(eight.w);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float4 *at = (const float4 *)(q + h * key_stride + 8 * i);
                    float4 low = at[0], high = at[1];
                    float s = scores[h];
                    s = fmaf(low.x, x0.x, s);
                    s = fmaf(low.y, x0.y, s);
                    s = fmaf(low.z, x1.x, s);
                    s = fmaf(low.w, x1.y, s);
                    s = fmaf(high.x, x2.x, s);
                    s = fmaf(high.y, x2.y, s);
                    s = fmaf(high.z, x3.x, s);
                    scores[h] = fmaf(high.w, x3.y, s);
                }
            }
        }
        float segment_most[HEADS], segment_sum[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float s = scores[h] * a.scale;
            if (a.softcap > 0.0f) s = tanhf(s / a.softcap) * a.softcap;
            scores[h] = is_in ? s : -INFINITY_F;
            float m = warp_max(scores[h]);
            if (t % 32 == 0) room[t / 32][h] = m;
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            segment_most[h] = fmaxf(fmaxf(room[0][h], room[1][h]), fmaxf(room[2][h], room[3][h]));
            float w = is_in ? expf(scores[h] - segment_most[h]) : 0.0f;
            weights[h * SEGMENT + t] = w;
            segment_sum[h] = warp_sum(w);
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (t % 32 == 0) room[t / 32][h] = segment_sum[h];
        }
        // Of the values, a thread takes eight columns and every token that is its split's.
        for (u32 item = t; item < eights * splits; item += 128) {
            u32 eight = item % eights, split = item / eights;
            float sums[HEADS][8] = {};
            for (u32 i = from / splits * splits + split; i < to; i += 4 * splits) {
                uint4 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 token = i + j * splits;
                    if (token < from || token >= to) {
                        v[j] = make_uint4(0, 0, 0, 0);
                        continue;
                    }
                    u64 page = page_of[token / PAGE_TOKENS];
                    u64 at = ((page * a.kv_heads + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS) * stride;
                    v[j] = *(const uint4 *)(a.values + at + 8 * eight);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 token = min(i + j * splits, SEGMENT - 1);
                    float2 x[4] = {from_half_pair(v[j].x), from_half_pair(v[j].y),
                                   from_half_pair(v[j].z), from_half_pair(v[j].w)};
#pragma unroll
                    for (int h = 0; h < HEADS; h++) {
                        float w = weights[h * SEGMENT + token];
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            sums[h][2 * k] = fmaf(w, x[k].x, sums[h][2 * k]);
                            sums[h][2 * k + 1] = fmaf(w, x[k].y, sums[h][2 * k + 1]);
                        }
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float4 *to_part = (float4 *)(part + (split * HEADS + h) * stride + 8 * eight);
                to_part[0] = make_float4(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
                to_part[1] = make_float4(sums[h][4], sums[h][5], sums[h][6], sums[h][7]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            segment_sum[h] = (room[0][h] + room[1][h]) + (room[2][h] + room[3][h]);
            float2 factors = make_float2(0.0f, 0.0f);
            if (!is_spread) factors = join(most[h], sum[h], segment_most[h], segment_sum[h]);
            u64 at = ((u64)row * a.heads + first_head + h) * a.segments + segment - first;
            float *out = a.partials + at * (stride + 2);
            if (is_spread && (u32)h < count && t == 0) {
                out[stride] = segment_most[h];
                out[stride + 1] = segment_sum[h];
            }
            for (u32 i = t; i < stride; i += 128) {
                float v = 0.0f;
                for (u32 split = 0; split < splits; split++) v += part[(split * HEADS + h) * stride + i];
                if (!is_spread) {
                    float &x = total[h * stride + i];
                    x = x * factors.x + v * factors.y;
                } else if ((u32)h < count) {
                    out[i] = v;
                }
            }
        }
        __syncthreads();
    }
    if (is_spread) {
        u32 shares = min(gridDim.z, last - first + 1);
        if (!is_last(a.arrivals + row * gridDim.y + blockIdx.y, shares)) return;
        for (u32 h = 0; h < count; h++) join_segments(a, row, first_head + h, last - first + 1);
        return;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if ((u32)h >= count) continue;
        for (u32 i = t; i < stride; i += 128) {
            finish(a, row, first_head + h, i, most[h], sum[h], total[h * stride + i]);
        }
    }
}

KERNEL __launch_bounds__(128, 1) attend_1(const __grid_constant__ Attend a) { attend<1>(a); }
KERNEL __launch_bounds__(128, 1) attend_4(const __grid_constant__ Attend a) { attend<4>(a); }

struct Store {
    const float *q;       // [rows, q_stride], or none if queries are not rotated
    const float *k;       // [rows, k_stride]
    const float *v;       // [rows, v_stride]
    const float2 *angles; // [rows, pairs]: cosines and sines
    float *q_out;         // [rows, q_out_stride]
    u16 *keys;
    u16 *values;
    const u32 *feed;
    u32 q_stride, k_stride, v_stride, q_out_stride;
    u32 heads, kv_heads, key_dim, value_dim, table;
    u32 pairs; // 0 if keys are not rotated
    u32 is_neox;
};

// Puts a row's keys and values into its sequence's pages, and rotates keys and queries on the way.
KERNEL store(const __grid_constant__ Store s) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {s.feed};
    u32 row = blockIdx.x, position = feed.position(row);
    u64 page = feed.pages(s.table, feed.span(row))[position / PAGE_TOKENS];
    u32 token = position % PAGE_TOKENS, key_stride = up8(s.key_dim), stride = up8(s.value_dim);
    u32 q_len = s.q ? s.heads * s.key_dim : 0, k_len = s.kv_heads * s.key_dim;
    u32 v_len = s.kv_heads * s.value_dim;
    const float2 *angles = s.angles + (u64)row * s.pairs;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < q_len + k_len + v_len;
         i += blockDim.x * gridDim.y) {
        if (i < q_len) {
            const float *q = s.q + (u64)row * s.q_stride + i / s.key_dim * s.key_dim;
            float y = rotated(q, i % s.key_dim, angles, s.pairs, s.is_neox);
            s.q_out[(u64)row * s.q_out_stride + i] = y;
        } else if (i < q_len + k_len) {
            u32 head = (i - q_len) / s.key_dim, at = (i - q_len) % s.key_dim;
            const float *k = s.k + (u64)row * s.k_stride + head * s.key_dim;
            u64 eight = ((page * s.kv_heads + head) * (key_stride / 8) + at / 8) * PAGE_TOKENS + token;
            s.keys[eight * 8 + at % 8] = to_half(rotated(k, at, angles, s.pairs, s.is_neox));
        } else {
            u32 v = i - q_len - k_len, head = v / s.value_dim, at = v % s.value_dim;
            u64 cell = ((page * s.kv_heads + head) * PAGE_TOKENS + token) * stride;
            s.values[cell + at] = to_half(s.v[(u64)row * s.v_stride + v]);
        }
    }
}
