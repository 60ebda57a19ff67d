// Attention over pages, in plain arithmetic: for any heads and anything that is kept. Heads of up to 128
// dimensions with keys and values in half precision are `attend_meet`'s.
#include "segment.cuh"

#define JOINED 16 // elements of a block's results for a thread to join, at most

// As assembly, since the compiler joins loads of one width into others in an order that depends on
// addresses of its own: the same source would have several PTX.
DEVICE float4 load_shared(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
    return x;
}

// ALONE: no row's sequence has another row in the step. Then a row rotates its own key and query and
// stores its key and value, and what the sequence has from earlier steps is asked for before the
// row's own numbers are there.
template <int HEADS, bool ALONE> DEVICE void attend(const Attend &a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float room[4][HEADS];
    __shared__ u32 page_of[SEGMENT / PAGE_TOKENS];
    let_next_start();
    u32 t = threadIdx.x;
    Feed feed = {a.metadata};
    if (a.skips_prefill && feed.is_prompt(feed.span(blockIdx.x))) return;
    Block block(a, HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.first + blockIdx.z;
    if (first > last) return;
    u32 key_stride = kept_stride(a.key_dim), stride = kept_stride(a.value_dim), eights = stride / 8;
    u32 splits = eights >= 128 ? 1 : 128 / eights, scales = kept_scales(a.value_dim);

    float *q = shared;                          // [HEADS, key_stride]
    float *weights = q + HEADS * key_stride;    // [HEADS, SEGMENT]
    float *part = weights + HEADS * SEGMENT;    // [splits, HEADS, stride]
    float *total = part + splits * HEADS * stride; // [HEADS, stride]
    Own own;
    own.keys = (KvElement *)(total + HEADS * stride);
    own.values = own.keys + SEGMENT * key_stride;
    own.key_scales = (u16 *)(own.values + SEGMENT * stride);
    own.value_scales = own.key_scales + SEGMENT * kept_scales(a.key_dim);
    const u32 *pages = feed.pages(a.page_table, feed.span(row));
    if (ALONE) {
        u32 to = block.to(first) - (first == last);
        fetch_segment(a, kv_head, pages + first * (SEGMENT / PAGE_TOKENS), block.from(first), to, own);
    }
    for (u32 i = t; i < HEADS * stride; i += 128) total[i] = 0.0f;
    wait_for_inputs();
    for (u32 i = t; i < HEADS * key_stride; i += 128) {
        u32 head = i / key_stride, at = i % key_stride;
        const float *from = a.q + (u64)row * a.q_stride + (block.first_head + head) * a.key_dim;
        bool is_in = head < block.heads && at < a.key_dim;
        if (ALONE) {
            const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
            q[i] = is_in ? rotated(from, at, angles, a.rotary_pairs, a.is_neox) : 0.0f;
        } else {
            q[i] = is_in ? from[at] : 0.0f;
        }
    }
    float most[HEADS], sum[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        most[h] = -INFINITY_F;
        sum[h] = 0.0f;
    }
    __syncthreads();

    for (u32 segment = first; segment <= last; segment += gridDim.z) {
        u32 from = block.from(segment), to = block.to(segment);
        const u32 *segment_pages = pages + segment * (SEGMENT / PAGE_TOKENS);
        if (ALONE) {
            bool has_own = segment == last;
            if (segment != first) {
                fetch_segment(a, kv_head, segment_pages, from, has_own ? to - 1 : to, own);
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            if (has_own) {
                u32 own_page = segment_pages[(to - 1) / PAGE_TOKENS];
                store_own(a, row, kv_head, own_page, to - 1, block.is_first, own);
            }
            __syncthreads();
        }
        float scores[HEADS] = {};
        bool is_in = t >= from && t < to;
        if (is_in) {
            const Piece *k = (const Piece *)own.keys;
            const u16 *scales = own.key_scales + t * kept_scales(a.key_dim);
            u32 to_q = (u32)__cvta_generic_to_shared(q);
            if (!ALONE) {
                u64 page = segment_pages[t / PAGE_TOKENS], head = page * a.kv_heads + kv_head;
                page_of[t / PAGE_TOKENS] = page;
                k = (const Piece *)(a.keys + head * kept_cells(a.key_dim) * PAGE_TOKENS);
                scales = scales_of(a.keys, head, t % PAGE_TOKENS, a.key_dim);
            }
#pragma unroll 4
            for (u32 i = 0; i < key_stride / PIECE; i++) {
                Piece piece = k[ALONE ? i * SEGMENT + t : key_piece(t % PAGE_TOKENS, i, key_stride / PIECE)];
                float2 x[PIECE / 2];
#pragma unroll
                for (int j = 0; j < PIECE / 8; j++) spread(piece.eights[j], x + 4 * j);
                float scale = HAS_SCALES ? from_half(scales[i * PIECE / 32]) : 1.0f;
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    u32 at = to_q + 4 * (h * key_stride + PIECE * i);
                    float s = HAS_SCALES ? 0.0f : scores[h];
#pragma unroll
                    for (int j = 0; j < PIECE / 8; j++) {
                        float4 low = load_shared(at + 32 * j), high = load_shared(at + 32 * j + 16);
                        s = fmaf(low.x, x[4 * j].x, s);
                        s = fmaf(low.y, x[4 * j].y, s);
                        s = fmaf(low.z, x[4 * j + 1].x, s);
                        s = fmaf(low.w, x[4 * j + 1].y, s);
                        s = fmaf(high.x, x[4 * j + 2].x, s);
                        s = fmaf(high.y, x[4 * j + 2].y, s);
                        s = fmaf(high.z, x[4 * j + 3].x, s);
                        s = fmaf(high.w, x[4 * j + 3].y, s);
                    }
                    scores[h] = HAS_SCALES ? fmaf(s, scale, scores[h]) : s;
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
                Eight v[4];
                u16 scale[4] = {};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 token = i + j * splits;
                    if (token < from || token >= to) {
                        v[j] = no_eight();
                        continue;
                    }
                    if (ALONE) {
                        v[j] = *(const Eight *)(own.values + token * stride + 8 * eight);
                        if (HAS_SCALES) scale[j] = own.value_scales[token * scales + eight / 4];
                        continue;
                    }
                    u64 page = page_of[token / PAGE_TOKENS], head = page * a.kv_heads + kv_head;
                    v[j] = *(const Eight *)(a.values + value_at(head, token % PAGE_TOKENS, a.value_dim, 8 * eight));
                    if (HAS_SCALES) scale[j] = scales_of(a.values, head, token % PAGE_TOKENS, a.value_dim)[eight / 4];
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 token = min(i + j * splits, SEGMENT - 1);
                    float step = HAS_SCALES ? from_half(scale[j]) : 1.0f;
                    float2 x[4];
                    spread(v[j], x);
#pragma unroll
                    for (int h = 0; h < HEADS; h++) {
                        float w = weights[h * SEGMENT + token];
                        if (HAS_SCALES) w *= step;
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
            float2 of_segment = {segment_most[h], (room[0][h] + room[1][h]) + (room[2][h] + room[3][h])};
            add_segment(a, block, segment, h, of_segment, most[h], sum[h], total, [&](u32 i) {
                float v = 0.0f;
                for (u32 split = 0; split < splits; split++) v += part[(split * HEADS + h) * stride + i];
                return v;
            });
        }
        __syncthreads();
    }
    if (block.is_spread) return join_spread<HEADS, SEGMENT, JOINED>(a, block, shared);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if ((u32)h >= block.heads) continue;
        Results results(a, row, block.first_head + h);
        float factor = results.factor(most[h], sum[h]);
        for (u32 i = t; i < stride; i += SEGMENT) results.put(i, total[h * stride + i] * factor);
    }
}

#define ATTEND(NAME, HEADS, ALONE)                                                                 \
    KERNEL __launch_bounds__(128, 1) NAME(const __grid_constant__ Attend a) { attend<HEADS, ALONE>(a); }
ATTEND(attend_1, 1, false)
ATTEND(attend_4, 4, false)
ATTEND(attend_1_alone, 1, true)
ATTEND(attend_4_alone, 4, true)

#ifdef KV_Q8
// Rounds a row's keys and values, a warp a block at a time.
DEVICE void store_blocks(const StoreKv &s, u32 row, u64 page, u32 token, const float2 *angles) {
    u32 key_blocks = (s.key_dim + 31) / 32, value_blocks = (s.value_dim + 31) / 32;
    u32 warps = blockDim.x / 32 * gridDim.y, warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    u32 keys = s.kv_heads * key_blocks, values = s.kv_heads * value_blocks;
    u16 scale;
    for (u32 block = warp; block < keys; block += warps) {
        u32 head = block / key_blocks, i = block % key_blocks * 32 + threadIdx.x % 32;
        const float *k = s.k + (u64)row * s.k_stride + head * s.key_dim;
        u8 x = keep(i < s.key_dim ? rotated(k, i, angles, s.rotary_pairs, s.is_neox) : 0.0f, scale);
        put_key(s.keys, page * s.kv_heads + head, token, s.key_dim, i, x, scale);
    }
    for (u32 block = warp; block < values; block += warps) {
        u32 head = block / value_blocks, i = block % value_blocks * 32 + threadIdx.x % 32;
        const float *v = s.v + (u64)row * s.v_stride + head * s.value_dim;
        u8 x = keep(i < s.value_dim ? v[i] : 0.0f, scale);
        put_value(s.values, page * s.kv_heads + head, token, s.value_dim, i, x, scale);
    }
}
#endif

// Puts a row's keys and values into its sequence's pages, and rotates keys and queries on the way.
KERNEL store(const __grid_constant__ StoreKv s) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {s.metadata};
    u32 row = blockIdx.x, position = feed.position(row);
    u64 page = feed.pages(s.page_table, feed.span(row))[position / PAGE_TOKENS];
    u32 token = position % PAGE_TOKENS, q_len = s.q ? s.heads * s.key_dim : 0;
    const float2 *angles = s.cos_sin + (u64)row * s.rotary_pairs;
#ifdef KV_Q8
    store_blocks(s, row, page, token, angles);
    u32 len = q_len;
#else
    u32 k_len = s.kv_heads * s.key_dim, v_len = s.kv_heads * s.value_dim, len = q_len + k_len + v_len;
#endif
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < len; i += blockDim.x * gridDim.y) {
        if (i < q_len) {
            const float *q = s.q + (u64)row * s.q_stride + i / s.key_dim * s.key_dim;
            float y = rotated(q, i % s.key_dim, angles, s.rotary_pairs, s.is_neox);
            s.q_out[(u64)row * s.q_out_stride + i] = y;
            continue;
        }
#ifndef KV_Q8
        if (i < q_len + k_len) {
            u32 head = (i - q_len) / s.key_dim, at = (i - q_len) % s.key_dim;
            const float *k = s.k + (u64)row * s.k_stride + head * s.key_dim;
            KvElement x = keep(rotated(k, at, angles, s.rotary_pairs, s.is_neox));
            put_key(s.keys, page * s.kv_heads + head, token, s.key_dim, at, x);
        } else {
            u32 v = i - q_len - k_len, head = v / s.value_dim, at = v % s.value_dim;
            KvElement x = keep(s.v[(u64)row * s.v_stride + v]);
            put_value(s.values, page * s.kv_heads + head, token, s.value_dim, at, x);
        }
#endif
    }
}
