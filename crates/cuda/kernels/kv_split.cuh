// KV splits of paged attention: loading, storing the current token, and sharing a row's splits
// among blocks. Strides of keys and values are multiples of a piece; padding is zero.
#pragma once
#include "attention.cuh"

// The keys and values of a split in shared memory.
struct SplitTile {
    KvElement *keys;   // [key_stride / PIECE, KV_SPLIT, PIECE]
    KvElement *values; // [KV_SPLIT, value_stride]
    u16 *key_scales;   // [KV_SPLIT, scales]
    u16 *value_scales; // [KV_SPLIT, scales]
};

// The scale of element `i` of a token of a head.
DEVICE const u16 *scale_at(const KvElement *elements, u64 head, u32 token, u32 dim, u32 i) {
    return (const u16 *)(elements + head_at(head, dim) + q8_scale(token, dim, i));
}

// Copies the scales of position `t` to shared memory asynchronously, two at a time.
DEVICE void copy_scales(u16 *to, u32 t, const KvElement *elements, u64 head, u32 dim) {
    u32 count = kv_scales(dim);
    for (u32 i = 0; i < count; i += 2) {
        copy_async4(shared_address(to + t * count + i), scale_at(elements, head, t % PAGE_TOKENS, dim, 32 * i));
    }
}

// Copies a split's cached keys and values, positions [from, to), to shared memory asynchronously.
DEVICE void load_split(const Attention &a, u32 kv_head, const u32 *pages, u32 from, u32 to, const SplitTile &tile) {
    u32 t = threadIdx.x, pieces = kv_stride(a.key_dim) / PIECE;
    u32 eights = kv_stride(a.value_dim) / 8;
    u32 to_keys = (u32)__cvta_generic_to_shared(tile.keys);
    u32 to_values = (u32)__cvta_generic_to_shared(tile.values);
    if (t >= from && t < to) {
        u64 head = (u64)pages[t / PAGE_TOKENS] * a.kv_heads + kv_head;
        for (u32 i = 0; i < pieces; i++) {
            const KvElement *key = a.keys + key_at(head, t % PAGE_TOKENS, a.key_dim, i * PIECE);
            copy_piece<Piece>(to_keys + sizeof(Piece) * (i * KV_SPLIT + t), key);
        }
        if (HAS_SCALES) {
            copy_scales(tile.key_scales, t, a.keys, head, a.key_dim);
            copy_scales(tile.value_scales, t, a.values, head, a.value_dim);
        }
    }
    for (u32 i = from * eights + t; i < to * eights; i += 128) {
        u32 token = i / eights;
        u64 head = (u64)pages[token / PAGE_TOKENS] * a.kv_heads + kv_head;
        u64 at = value_at(head, token % PAGE_TOKENS, a.value_dim, 8 * (i % eights));
        copy_piece<Eight>(to_values + sizeof(Eight) * i, a.values + at);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

#ifdef KV_Q8
// Stores the current token's key and value in their page and in the split in shared memory; a warp
// quantises a block at a time.
DEVICE void store_current(const Attention &a, u32 row, u32 kv_head, u32 page, u32 at, bool is_first,
    const SplitTile &tile) {
    u32 token = at % PAGE_TOKENS, key_end = (a.key_dim + 31) / 32 * 32;
    u64 head = (u64)page * a.kv_heads + kv_head;
    const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
    const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
    const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
    u16 scale;
    for (u32 i = threadIdx.x; i < key_end; i += 128) {
        u8 x = quantize_q8(i < a.key_dim ? rope_element(k, i, angles, a.rotary_pairs, a.is_neox) : 0.0f, scale);
        if (i < kv_stride(a.key_dim)) tile.keys[(i / PIECE * KV_SPLIT + at) * PIECE + i % PIECE] = x;
        if (i % 32 == 0) tile.key_scales[at * kv_scales(a.key_dim) + i / 32] = scale;
        if (is_first) put_q8(a.keys, head, token, a.key_dim, i, true, x, scale);
    }
    for (u32 i = threadIdx.x; i < (a.value_dim + 31) / 32 * 32; i += 128) {
        u8 x = quantize_q8(i < a.value_dim ? v[i] : 0.0f, scale);
        if (i < kv_stride(a.value_dim)) tile.values[at * kv_stride(a.value_dim) + i] = x;
        if (i % 32 == 0) tile.value_scales[at * kv_scales(a.value_dim) + i / 32] = scale;
        if (is_first) put_q8(a.values, head, token, a.value_dim, i, false, x, scale);
    }
}
#else
// Stores an element of a token's key or value in a page.
DEVICE void put_key(KvElement *elements, u64 head, u32 token, u32 dim, u32 i, KvElement x) {
    elements[key_at(head, token, dim, i)] = x;
}

DEVICE void put_value(KvElement *elements, u64 head, u32 token, u32 dim, u32 i, KvElement x) {
    elements[value_at(head, token, dim, i)] = x;
}

// Stores the current token's key and value in their page and in the split in shared memory.
DEVICE void store_current(const Attention &a, u32 row, u32 kv_head, u32 page, u32 at, bool is_first,
    const SplitTile &tile) {
    u32 eights = round_up8(a.key_dim) / 8, stride = round_up8(a.value_dim), token = at % PAGE_TOKENS;
    u64 head = (u64)page * a.kv_heads + kv_head;
    const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
    const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
    for (u32 i = threadIdx.x; i < 8 * eights; i += 128) {
        float y = i < a.key_dim
                ? rope_element(k, i, a.cos_sin + (u64)row * a.rotary_pairs, a.rotary_pairs, a.is_neox) : 0.0f;
        KvElement x = quantize_kv(y);
        tile.keys[(i / 8 * KV_SPLIT + at) * 8 + i % 8] = x;
        if (is_first) put_key(a.keys, head, token, a.key_dim, i, x);
    }
    for (u32 i = threadIdx.x; i < stride; i += 128) {
        KvElement x = quantize_kv(i < a.value_dim ? v[i] : 0.0f);
        tile.values[at * stride + i] = x;
        if (is_first) put_value(a.values, head, token, a.value_dim, i, x);
    }
}
#endif

// Copies finished partials of some heads to shared memory.
struct CopiedPartials {
    const float *from; // the first head's first partial
    u32 to, heads, partial_len, splits, max_partials;

    __device__ __forceinline__ void take(u32 base, u32 n) const {
        u32 pieces = n * partial_len / 4;
        for (u32 i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
            u32 head = i / pieces, at = i % pieces * 4;
            const float *piece = from + ((u64)head * splits + base) * partial_len + at;
            copy_async(to + 4 * (head * max_partials * partial_len + at), piece);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    __device__ __forceinline__ void clear(u32, u32, u32, u32) const {}
    __device__ __forceinline__ void finish() const {}
};

// Whether this block arrives last of `blocks`: it can then read what the others wrote.
template <u32 THREADS> DEVICE bool is_last_block(u32 *arrivals, u32 blocks) {
    __shared__ bool last;
    __threadfence();
    sync<THREADS>();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrivals, 1) + 1 == blocks;
        if (last) *arrivals = 0;
        __threadfence();
    }
    sync<THREADS>();
    return last;
}

// A block's work: a row, some query heads of a KV head, and a share of the row's splits.
struct DecodeBlock {
    uint2 range; // positions that the row attends to
    u32 row, first, last; // splits of these positions
    u32 kv_head, first_head, heads;
    u32 first_partial; // of the row, or NO_PARTIALS
    bool is_first; // of the blocks of its KV head: it stores the current token
    bool is_split; // blocks share the splits: there are several, and memory for their results

    __device__ __forceinline__ DecodeBlock(const Attention &a, u32 max_heads) : row(blockIdx.x) {
        range = visible(a, row);
        first = range.x / KV_SPLIT, last = (range.y - 1) / KV_SPLIT;
        u32 group = a.heads / a.kv_heads, per_kv = (group + max_heads - 1) / max_heads;
        kv_head = blockIdx.y / per_kv, first_head = kv_head * group + blockIdx.y % per_kv * max_heads;
        heads = min(max_heads, (kv_head + 1) * group - first_head);
        is_first = blockIdx.y % per_kv == 0;
        first_partial = a.is_split ? StepMetadata{a.metadata}.first_partial(row) : NO_PARTIALS;
        is_split = first < last && first_partial != NO_PARTIALS;
    }

    __device__ __forceinline__ u32 splits() const { return last - first + 1; }

    // The block's first split, and the distance to its next one. Where a row's splits are not shared, only one block
    // has any.
    __device__ __forceinline__ u32 own_first() const {
        return is_split || blockIdx.z == 0 ? first + blockIdx.z : last + 1;
    }
    __device__ __forceinline__ u32 distance() const { return is_split ? gridDim.z : 1; }

    // The positions of a split that the row attends to.
    __device__ __forceinline__ u32 from(u32 split) const { return max(range.x, split * KV_SPLIT) - split * KV_SPLIT; }
    __device__ __forceinline__ u32 to(u32 split) const {
        return min(range.y, (split + 1) * KV_SPLIT) - split * KV_SPLIT;
    }

    // Destination of a head's partial.
    __device__ __forceinline__ float *partial(const Attention &a, u32 split, u32 h) const {
        u64 at = (u64)first_partial * a.heads + (first_head + h) * splits() + split - first;
        return a.partials + at * (kv_stride(a.value_dim) + PARTIAL_EXTRA);
    }
};

// Writes a split's partial to memory if blocks share the splits, or else merges it into `total`.
// `value_of(i)` is element i of the split's sum of values.
template <typename Value>
DEVICE void add_split(const Attention &a, const DecodeBlock &block, u32 split, u32 h, float2 of_split, float &row_max,
                        float &row_sum, float *total, const Value &value_of) {
    u32 stride = kv_stride(a.value_dim);
    float2 factors = make_float2(0.0f, 0.0f);
    if (!block.is_split) factors = combine(row_max, row_sum, of_split.x, of_split.y);
    float *out = block.partial(a, split, h);
    if (block.is_split && h < block.heads && threadIdx.x == 0) {
        out[stride] = of_split.x;
        out[stride + 1] = of_split.y;
    }
    for (u32 i = threadIdx.x; i < stride; i += KV_SPLIT) {
        float v = value_of(i);
        if (!block.is_split) {
            float &x = total[h * stride + i];
            x = x * factors.x + v * factors.y;
        } else if (h < block.heads) {
            out[i] = v;
        }
    }
}

// Finishes a block's share of the splits: the last block combines all of them.
template <int MAX_HEADS, u32 THREADS, int ITEMS> DEVICE void combine_across_blocks(const Attention &a,
    const DecodeBlock &block, float *shared) {
    const u32 MAX = 32;
    u32 floats = kv_stride(a.value_dim) + PARTIAL_EXTRA, splits = block.splits(), bytes;
    u32 *arrivals = a.arrivals + block.row * gridDim.y + blockIdx.y;
    if (!is_last_block<THREADS>(arrivals, min(gridDim.z, splits))) return;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    u32 max_partials = min(MAX, bytes / (4 * MAX_HEADS * floats));
    const float *from = block.partial(a, block.first, 0);
    u32 to = (u32)__cvta_generic_to_shared(shared);
    CopiedPartials copied = {from, to, block.heads, floats, splits, max_partials};
    combine_splits<MAX_HEADS, THREADS, ITEMS, MAX>(a, block.row, block.first_head, block.heads, splits, shared,
                                                    max_partials, copied);
}
