// Decode attention on CUDA cores, for any head width and KV layout, and the kernel that stores new
// keys and values. `decode_attention_mma` takes heads of up to 256 dimensions in f16 and in bytes.
//
// Grid: (rows, KV heads x blocks of their query heads, blocks per row that share its splits); 128
// threads, one for each position of a split. Shared memory: queries, probabilities, sums of values
// and, in the fused kernels, a split's keys and values. Bound by reading the KV cache.
#include "kv_split.cuh"

// Loads the queries of a row's heads to shared memory, rotated (RoPE) in the fused kernels.
template <int HEADS, bool FUSED>
DEVICE void load_queries(const Attention &a, const DecodeBlock &block, u32 key_stride, float *q) {
    u32 t = threadIdx.x, row = block.row;
    for (u32 i = t; i < HEADS * key_stride; i += 128) {
        u32 head = i / key_stride, at = i % key_stride;
        const float *from = a.q + (u64)row * a.q_stride + (block.first_head + head) * a.key_dim;
        bool is_in = head < block.heads && at < a.key_dim;
        if (FUSED) {
            const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
            q[i] = is_in ? rope_element(from, at, angles, a.rotary_pairs, a.is_neox) : 0.0f;
        } else {
            q[i] = is_in ? from[at] : 0.0f;
        }
    }
}

// Adds eight elements of a value times the weight of its position to each head's sums.
template <int HEADS>
DEVICE void add_weighted(const Eight &v, float step, const float *weights, float (&values)[HEADS][8]) {
    float2 x[4];
    spread(v, x);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float w = weights[h * KV_SPLIT];
        if (HAS_SCALES) w *= step;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[h][2 * k] = fmaf(w, x[k].x, values[h][2 * k]);
            values[h][2 * k + 1] = fmaf(w, x[k].y, values[h][2 * k + 1]);
        }
    }
}

// Stores eight sums of each head.
template <int HEADS> DEVICE void store_eights(const float (&values)[HEADS][8], float *to, u32 stride) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float4 *to_part = (float4 *)(to + h * stride);
        to_part[0] = make_float4(values[h][0], values[h][1], values[h][2], values[h][3]);
        to_part[1] = make_float4(values[h][4], values[h][5], values[h][6], values[h][7]);
    }
}

// P V of a split: a thread takes eight columns of every position of its share.
template <int HEADS, bool FUSED>
DEVICE void multiply_values(const Attention &a, const SplitTile &tile, const u32 (&page_of)[KV_SPLIT / PAGE_TOKENS],
                            u32 kv_head, u32 t, u32 from, u32 to, u32 stride, u32 eights, u32 splits, u32 scales,
                            const float *weights, float *split_values) {
    for (u32 column_item = t; column_item < eights * splits; column_item += 128) {
        u32 eight = column_item % eights, split = column_item / eights;
        float values[HEADS][8] = {};
        for (u32 i = from / splits * splits + split; i < to; i += 4 * splits) {
            Eight v[4];
            u16 scale[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 token = i + j * splits;
                if (token < from || token >= to) {
                    v[j] = zero_eight();
                    continue;
                }
                if (FUSED) {
                    v[j] = *(const Eight *)(tile.values + token * stride + 8 * eight);
                    if (HAS_SCALES) scale[j] = tile.value_scales[token * scales + eight / 4];
                    continue;
                }
                u64 page = page_of[token / PAGE_TOKENS], head = page * a.kv_heads + kv_head;
                v[j] = *(const Eight *)(a.values + value_at(head, token % PAGE_TOKENS, a.value_dim, 8 * eight));
                if (HAS_SCALES) scale[j] = *scale_at(a.values, head, token % PAGE_TOKENS, a.value_dim, 8 * eight);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 token = min(i + j * splits, KV_SPLIT - 1);
                float step = HAS_SCALES ? from_half(scale[j]) : 1.0f;
                add_weighted<HEADS>(v[j], step, weights + token, values);
            }
        }
        store_eights<HEADS>(values, split_values + split * HEADS * stride + 8 * eight, stride);
    }
}

// Stores a row's outputs, divided by their row sums.
template <int HEADS>
DEVICE void store_outputs(const Attention &a, const DecodeBlock &block, const float *total, u32 stride, u32 t,
                          const float (&row_max)[HEADS], const float (&row_sum)[HEADS]) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if ((u32)h >= block.heads) continue;
        AttentionOutput results(a, block.row, block.first_head + h);
        float factor = results.factor(row_max[h], row_sum[h]);
        for (u32 i = t; i < stride; i += KV_SPLIT) results.put(i, total[h * stride + i] * factor);
    }
}

// Completes the keys and values of a split in shared memory: prefetches them, but for the first
// split's, waits for them, and adds the row's own to the last split.
DEVICE void complete_split(const Attention &a, u32 row, u32 kv_head, const u32 *split_pages, u32 from, u32 to,
                           bool has_current, bool is_prefetched, bool is_first, const SplitTile &tile) {
    if (!is_prefetched) {
        load_split(a, kv_head, split_pages, from, has_current ? to - 1 : to, tile);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (has_current) {
        u32 own_page = split_pages[(to - 1) / PAGE_TOKENS];
        store_current(a, row, kv_head, own_page, to - 1, is_first, tile);
    }
}

// The keys and values of a split in shared memory from `to` on.
DEVICE SplitTile split_tile(const Attention &a, float *to, u32 key_stride, u32 stride) {
    SplitTile tile;
    tile.keys = (KvElement *)to;
    tile.values = tile.keys + KV_SPLIT * key_stride;
    tile.key_scales = (u16 *)(tile.values + KV_SPLIT * stride);
    tile.value_scales = tile.key_scales + KV_SPLIT * kv_scales(a.key_dim);
    return tile;
}

// Scales a position's scores and stores each head's row max of the warp.
template <int HEADS>
DEVICE void store_row_max(const Attention &a, float scale, u32 t, bool is_in, float (&scores)[HEADS],
                          float (&scratch)[4][HEADS]) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float s = scores[h] * scale;
        if (a.softcap > 0.0f) s = tanhf(s / a.softcap) * a.softcap;
        scores[h] = is_in ? s : -INFINITY_F;
        float m = warp_max(scores[h]);
        if (t % 32 == 0) scratch[t / 32][h] = m;
    }
}

// Adds the product of eight elements of a query and of a key to a score.
DEVICE float dot_eight(const float4 &low, const float4 &high, const float2 *x, float s) {
    s = fmaf(low.x, x[0].x, s);
    s = fmaf(low.y, x[0].y, s);
    s = fmaf(low.z, x[1].x, s);
    s = fmaf(low.w, x[1].y, s);
    s = fmaf(high.x, x[2].x, s);
    s = fmaf(high.y, x[2].y, s);
    s = fmaf(high.z, x[3].x, s);
    s = fmaf(high.w, x[3].y, s);
    return s;
}

// Adds the products of a piece of a key and of the queries of all heads, which begin at the shared
// address `to_q`, to the scores.
template <int HEADS>
DEVICE void add_products(const Piece &piece, float scale, u32 to_q, u32 key_stride, float (&scores)[HEADS]) {
    float2 x[PIECE / 2];
#pragma unroll
    for (int j = 0; j < PIECE / 8; j++) spread(piece.eights[j], x + 4 * j);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        u32 at = to_q + 4 * h * key_stride;
        float s = HAS_SCALES ? 0.0f : scores[h];
#pragma unroll
        for (int j = 0; j < PIECE / 8; j++) {
            float4 low = load_shared(at + 32 * j), high = load_shared(at + 32 * j + 16);
            s = dot_eight(low, high, x + 4 * j, s);
        }
        scores[h] = HAS_SCALES ? fmaf(s, scale, scores[h]) : s;
    }
}

// Turns the scores of a position to its weights, relative to the split's row max. `scratch` then
// holds the weights' sums of each warp.
template <int HEADS>
DEVICE void weigh_positions(const Attention &a, float query_factor, u32 t, bool is_in, float (&scores)[HEADS],
                            float (&scratch)[4][HEADS], float (&split_max)[HEADS], float *weights) {
    float split_sum[HEADS];
    store_row_max(a, query_factor, t, is_in, scores, scratch);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        split_max[h] = fmaxf(fmaxf(scratch[0][h], scratch[1][h]), fmaxf(scratch[2][h], scratch[3][h]));
        float w = is_in ? expf(scores[h] - split_max[h]) : 0.0f;
        weights[h * KV_SPLIT + t] = w;
        split_sum[h] = warp_sum(w);
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (t % 32 == 0) scratch[t / 32][h] = split_sum[h];
    }
}

// Adds the parts of a split's outputs in order and merges them with the earlier splits'.
template <int HEADS>
DEVICE void merge_split(const Attention &a, const DecodeBlock &block, u32 split, u32 splits, u32 stride,
                        const float (&scratch)[4][HEADS], const float (&split_max)[HEADS], const float *split_values,
                        float (&row_max)[HEADS], float (&row_sum)[HEADS], float *total) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float2 of_split = {split_max[h], (scratch[0][h] + scratch[1][h]) + (scratch[2][h] + scratch[3][h])};
        add_split(a, block, split, h, of_split, row_max[h], row_sum[h], total, [&](u32 i) {
            float v = 0.0f;
            for (u32 split = 0; split < splits; split++) v += split_values[(split * HEADS + h) * stride + i];
            return v;
        });
    }
}

// FUSED: every row is the only one of its sequence in the step. Then a row rotates its own key and
// query and stores its key and value, and a split's cached keys and values are prefetched before
// the row's own arrive.
template <int HEADS, bool FUSED> DEVICE void attention(const Attention &a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float scratch[4][HEADS];
    __shared__ u32 page_of[KV_SPLIT / PAGE_TOKENS];
    launch_dependents();
    u32 t = threadIdx.x;
    StepMetadata metadata = {a.metadata};
    if (a.skips_prefill && metadata.is_prompt(metadata.span(blockIdx.x))) return;
    DecodeBlock block(a, HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.own_first();
    if (first > last) return;
    u32 key_stride = kv_stride(a.key_dim), stride = kv_stride(a.value_dim), eights = stride / 8;
    u32 splits = eights >= 128 ? 1 : 128 / eights, scales = kv_scales(a.value_dim);

    float *q = shared;                          // [HEADS, key_stride]
    float *weights = q + HEADS * key_stride;    // [HEADS, KV_SPLIT]
    float *split_values = weights + HEADS * KV_SPLIT;    // [splits, HEADS, stride]
    float *total = split_values + splits * HEADS * stride; // [HEADS, stride]
    SplitTile tile = split_tile(a, total + HEADS * stride, key_stride, stride);
    const u32 *pages = metadata.pages(a.page_table, metadata.span(row));
    if (FUSED) {
        u32 to = block.to(first) - (first == last);
        load_split(a, kv_head, pages + first * (KV_SPLIT / PAGE_TOKENS), block.from(first), to, tile);
    }
    for (u32 i = t; i < HEADS * stride; i += 128) total[i] = 0.0f;
    float query_factor = query_scale(a, block.range.y - 1);
    grid_dependency_wait();
    load_queries<HEADS, FUSED>(a, block, key_stride, q);
    float row_max[HEADS], row_sum[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        row_max[h] = -INFINITY_F;
        row_sum[h] = 0.0f;
    }
    __syncthreads();

    for (u32 split = first; split <= last; split += block.distance()) {
        u32 from = block.from(split), to = block.to(split);
        const u32 *split_pages = pages + split * (KV_SPLIT / PAGE_TOKENS);
        if (FUSED) {
            complete_split(a, row, kv_head, split_pages, from, to, split == last, split == first,
                           block.is_first, tile);
            __syncthreads();
        }
        float scores[HEADS] = {};
        bool is_in = t >= from && t < to;
        if (is_in) {
            u32 to_q = (u32)__cvta_generic_to_shared(q), token = t % PAGE_TOKENS;
            u64 head = 0;
            if (!FUSED) {
                u32 page = split_pages[t / PAGE_TOKENS];
                page_of[t / PAGE_TOKENS] = page;
                head = (u64)page * a.kv_heads + kv_head;
            }
#pragma unroll 4
            for (u32 i = 0; i < key_stride / PIECE; i++) {
                const Piece *from = (const Piece *)tile.keys + i * KV_SPLIT + t;
                const u16 *scales = tile.key_scales + t * kv_scales(a.key_dim) + i * PIECE / 32;
                if (!FUSED) {
                    from = (const Piece *)(a.keys + key_at(head, token, a.key_dim, i * PIECE));
                    scales = scale_at(a.keys, head, token, a.key_dim, i * PIECE);
                }
                Piece piece = *from;
                float scale = HAS_SCALES ? from_half(*scales) : 1.0f;
                add_products<HEADS>(piece, scale, to_q + 4 * PIECE * i, key_stride, scores);
            }
        }
        float split_max[HEADS];
        weigh_positions(a, query_factor, t, is_in, scores, scratch, split_max, weights);
        multiply_values<HEADS, FUSED>(a, tile, page_of, kv_head, t, from, to, stride, eights, splits, scales,
                                      weights, split_values);
        __syncthreads();
        merge_split(a, block, split, splits, stride, scratch, split_max, split_values, row_max, row_sum, total);
        __syncthreads();
    }
    if (block.is_split) return combine_across_blocks<HEADS, KV_SPLIT, COMBINED_PER_THREAD>(a, block, shared);
    store_outputs(a, block, total, stride, t, row_max, row_sum);
}

#define ATTEND(NAME, HEADS, FUSED)                                                                 \
    KERNEL __launch_bounds__(128, 1) NAME(const __grid_constant__ Attention a) { attention<HEADS, FUSED>(a); }
ATTEND(attention_1, 1, false)
ATTEND(attention_4, 4, false)
ATTEND(attention_1_fused, 1, true)
ATTEND(attention_4_fused, 4, true)

#ifdef KV_Q8
// Quantises a row's keys and values, a warp a block of 32 at a time.
DEVICE void store_blocks(const StoreKv &s, u32 row, u64 page, u32 token, const float2 *angles) {
    u32 key_blocks = (s.key_dim + 31) / 32, value_blocks = (s.value_dim + 31) / 32;
    u32 warps = blockDim.x / 32 * gridDim.y, warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    u32 keys = s.kv_heads * key_blocks, values = s.kv_heads * value_blocks;
    u16 scale;
    for (u32 block = warp; block < keys; block += warps) {
        u32 head = block / key_blocks, i = block % key_blocks * 32 + threadIdx.x % 32;
        const float *k = s.k + (u64)row * s.k_stride + head * s.key_dim;
        u8 x = quantize_q8(i < s.key_dim ? rope_element(k, i, angles, s.rotary_pairs, s.is_neox) : 0.0f, scale);
        put_q8(s.keys, page * s.kv_heads + head, token, s.key_dim, i, true, x, scale);
    }
    for (u32 block = warp; block < values; block += warps) {
        u32 head = block / value_blocks, i = block % value_blocks * 32 + threadIdx.x % 32;
        const float *v = s.v + (u64)row * s.v_stride + head * s.value_dim;
        u8 x = quantize_q8(i < s.value_dim ? v[i] : 0.0f, scale);
        put_q8(s.values, page * s.kv_heads + head, token, s.value_dim, i, false, x, scale);
    }
}
#endif

// Stores a row's keys and values in its sequence's pages, rotating keys and queries (RoPE). Grid:
// (rows, blocks of elements).
KERNEL store_kv(const __grid_constant__ StoreKv s) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {s.metadata};
    u32 row = blockIdx.x, position = metadata.position(row);
    u64 page = metadata.pages(s.page_table, metadata.span(row))[position / PAGE_TOKENS];
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
            float y = rope_element(q, i % s.key_dim, angles, s.rotary_pairs, s.is_neox);
            s.q_out[(u64)row * s.q_out_stride + i] = y;
            continue;
        }
#ifndef KV_Q8
        if (i < q_len + k_len) {
            u32 head = (i - q_len) / s.key_dim, at = (i - q_len) % s.key_dim;
            const float *k = s.k + (u64)row * s.k_stride + head * s.key_dim;
            KvElement x = quantize_kv(rope_element(k, at, angles, s.rotary_pairs, s.is_neox));
            put_key(s.keys, page * s.kv_heads + head, token, s.key_dim, at, x);
        } else {
            u32 v = i - q_len - k_len, head = v / s.value_dim, at = v % s.value_dim;
            KvElement x = quantize_kv(s.v[(u64)row * s.v_stride + v]);
            put_value(s.values, page * s.kv_heads + head, token, s.value_dim, at, x);
        }
#endif
    }
}

#include "attend_entries.cuh"
