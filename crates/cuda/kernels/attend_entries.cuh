// Attention to entries that are not consecutive: tokens that an indexer selects, or the tokens of a
// window and blocks of tokens. Entries form splits of 128 in their order, and a block takes all
// splits of some heads of a row, so that a row's bits depend on its own entries alone.
//
// Grid: (rows, KV heads x blocks of their query heads); 128 threads, one for each entry of a split.
// Shared memory: queries, probabilities, sums of values. Bound by reading the KV cache.
#include "entries.cuh"

#define OWN_ROW ~0u

// Where the key and the value of an entry are.
struct Entry {
    const KvElement *key, *value; // of its head's page, or of its row
    u32 token;                    // in the page, or OWN_ROW

    __device__ __forceinline__ const Eight &key_eight(u32 i, u32 dim) const {
        return *(const Eight *)(key + (token == OWN_ROW ? i : (u32)key_at(0, token, dim, i)));
    }

    __device__ __forceinline__ const Eight &value_eight(u32 i, u32 dim) const {
        return *(const Eight *)(value + (token == OWN_ROW ? i : (u32)value_at(0, token, dim, i)));
    }

    // The scale of element `i` of the key or of the value.
    __device__ __forceinline__ float scale(const KvElement *elements, u32 i, u32 dim) const {
        if (!HAS_SCALES) return 1.0f;
        if (token != OWN_ROW) return from_half(*scale_at(elements, 0, token, dim, i));
        return from_half(((const u16 *)(elements + kv_stride(dim)))[i / 32]);
    }
};

// The entries of a row: tokens, then blocks; or tokens alone.
struct RowEntries {
    const u32 *pages, *block_pages;
    const float *selected; // or none: all
    u32 first, tokens, count;

    __device__ __forceinline__ RowEntries(const AttendEntries &e, const DecodeBlock &block) {
        const Attention &a = e.attention;
        StepMetadata metadata = {a.metadata};
        u32 span = metadata.span(block.row), ratio = e.blocks ? e.block_ratio : 1;
        pages = metadata.pages(a.page_table, span);
        block_pages = metadata.pages(e.block_page_table, span);
        selected = e.selected ? e.selected + (u64)block.row * e.selected_stride : nullptr;
        first = block.range.x, tokens = e.blocks ? block.range.y - block.range.x : 0;
        u32 complete = block.range.y / ratio;
        count = tokens + (selected ? min(e.top_k, complete) : complete);
    }

    __device__ __forceinline__ Entry get(const AttendEntries &e, u32 kv_head, u32 i) const {
        const Attention &a = e.attention;
        u32 number = first + i;
        if (i >= tokens) number = selected ? (u32)selected[i - tokens] : i - tokens;
        if (e.blocks && i >= tokens) {
            const KvElement *row = e.blocks + entry_row(block_pages, number, e.block_ratio) * entry_elements(a.key_dim);
            return {row, row, OWN_ROW};
        }
        u64 head = (u64)pages[number / PAGE_TOKENS] * a.kv_heads + kv_head;
        return {a.keys + key_at(head, 0, a.key_dim, 0), a.values + value_at(head, 0, a.value_dim, 0),
                number % PAGE_TOKENS};
    }
};

// P V of a split: a thread takes eight columns of every entry of its share.
template <int HEADS>
DEVICE void multiply_entry_values(const Entry *entries, u32 count, u32 dim, u32 stride, u32 eights, u32 splits,
                                  const float *weights, float *split_values) {
    for (u32 item = threadIdx.x; item < eights * splits; item += KV_SPLIT) {
        u32 column = item % eights * 8, split = item / eights;
        float values[HEADS][8] = {};
        for (u32 i = split; i < count; i += splits) {
            const Entry &entry = entries[i];
            float step = entry.scale(entry.value, column, dim);
            add_weighted<HEADS>(entry.value_eight(column, dim), step, weights + i, values);
        }
        store_eights<HEADS>(values, split_values + split * HEADS * stride + column, stride);
    }
}

template <int HEADS> DEVICE void attend_entries(const AttendEntries &e) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float scratch[4][HEADS];
    __shared__ Entry entries[KV_SPLIT];
    launch_dependents();
    grid_dependency_wait();
    const Attention &a = e.attention;
    u32 t = threadIdx.x, key_stride = kv_stride(a.key_dim), stride = kv_stride(a.value_dim), eights = stride / 8;
    u32 splits = eights >= 128 ? 1 : 128 / eights;
    DecodeBlock block(a, HEADS);
    RowEntries row_entries(e, block);
    float *q = shared;                                     // [HEADS, key_stride]
    float *weights = q + HEADS * key_stride;               // [HEADS, KV_SPLIT]
    float *split_values = weights + HEADS * KV_SPLIT;      // [splits, HEADS, stride]
    float *total = split_values + splits * HEADS * stride; // [HEADS, stride]
    for (u32 i = t; i < HEADS * stride; i += KV_SPLIT) total[i] = 0.0f;
    load_queries<HEADS, false>(a, block, key_stride, q);
    u32 to_q = (u32)__cvta_generic_to_shared(q);
    float query_factor = query_scale(a, block.range.y - 1), row_max[HEADS], row_sum[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) row_max[h] = -INFINITY_F, row_sum[h] = 0.0f;
    for (u32 start = 0; start < row_entries.count; start += KV_SPLIT) {
        u32 count = min(KV_SPLIT, row_entries.count - start);
        bool is_in = t < count;
        float scores[HEADS] = {}, split_max[HEADS];
        if (is_in) entries[t] = row_entries.get(e, block.kv_head, start + t);
        __syncthreads();
        for (u32 i = 0; is_in && i < key_stride; i += PIECE) {
            const Entry &entry = entries[t];
            Piece piece;
#pragma unroll
            for (u32 j = 0; j < PIECE / 8; j++) piece.eights[j] = entry.key_eight(i + 8 * j, a.key_dim);
            float scale = entry.scale(entry.key, i, a.key_dim);
            add_products<HEADS>(piece, scale, to_q + 4 * i, key_stride, scores);
        }
        weigh_positions(a, query_factor, t, is_in, scores, scratch, split_max, weights);
        multiply_entry_values<HEADS>(entries, count, a.value_dim, stride, eights, splits, weights, split_values);
        __syncthreads();
        merge_split(a, block, start / KV_SPLIT, splits, stride, scratch, split_max, split_values, row_max, row_sum,
                    total);
        __syncthreads();
    }
    store_outputs(a, block, total, stride, t, row_max, row_sum);
}

KERNEL __launch_bounds__(128, 1) attend_entries_1(const __grid_constant__ AttendEntries e) { attend_entries<1>(e); }
KERNEL __launch_bounds__(128, 1) attend_entries_4(const __grid_constant__ AttendEntries e) { attend_entries<4>(e); }

// Stores the entries that end with the step's tokens, a block for each row.
KERNEL store_entries(const __grid_constant__ StoreEntries s) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {s.metadata};
    u32 row = blockIdx.x, position = metadata.position(row), stride = kv_stride(s.dim);
    if ((position + 1) % s.ratio != 0) return;
    const u32 *pages = metadata.pages(s.page_table, metadata.span(row));
    KvElement *to = s.entries + entry_row(pages, position / s.ratio, s.ratio) * entry_elements(s.dim);
    const float *x = s.x + (u64)row * s.stride;
#ifdef KV_Q8
    // A warp quantises a block of 32 at a time.
    for (u32 i = threadIdx.x; i < (s.dim + 31) / 32 * 32; i += blockDim.x) {
        u16 scale;
        u8 code = quantize_q8(i < s.dim ? x[i] : 0.0f, scale);
        if (i < stride) to[i] = code;
        if (i % 32 == 0) ((u16 *)(to + stride))[i / 32] = scale;
    }
#else
    for (u32 i = threadIdx.x; i < stride; i += blockDim.x) to[i] = quantize_kv(i < s.dim ? x[i] : 0.0f);
#endif
}
