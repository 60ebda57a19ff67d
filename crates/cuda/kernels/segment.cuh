// Attention over segments of pages. Strides of keys and values are multiples of a piece; the rest is zero.
#pragma once
#include "attend.cuh"

// What a block has of a segment in shared memory.
struct Own {
    KvElement *keys;   // [key_stride / PIECE, SEGMENT, PIECE]
    KvElement *values; // [SEGMENT, value_stride]
    u16 *key_scales;   // [SEGMENT, scales]
    u16 *value_scales; // [SEGMENT, scales]
};

// The scales of a head of a token of a page: its cells come first, those of the pages' heads before it.
DEVICE u16 *scales_of(KvElement *cells, u64 head, u32 token, u32 dim) {
    u64 at = head * kept_cells(dim) + kept_stride(dim);
    return (u16 *)(cells + at * PAGE_TOKENS) + token * kept_scales(dim);
}

// What a row's sequence keeps of a segment, on its way to shared memory: the positions from `from` up
// to `to` in the segment.
DEVICE void fetch_segment(const Attend &a, u32 kv_head, const u32 *pages, u32 from, u32 to, const Own &own) {
    u32 t = threadIdx.x, pieces = kept_stride(a.key_dim) / PIECE;
    u32 value_pieces = kept_stride(a.value_dim) / PIECE;
    u32 to_keys = (u32)__cvta_generic_to_shared(own.keys);
    u32 to_values = (u32)__cvta_generic_to_shared(own.values);
    if (t >= from && t < to) {
        u64 head = (u64)pages[t / PAGE_TOKENS] * a.kv_heads + kv_head;
        for (u32 i = 0; i < pieces; i++) {
            const KvElement *key = a.keys + key_at(head, t % PAGE_TOKENS, a.key_dim, i * PIECE);
            copy_piece(to_keys + sizeof(Piece) * (i * SEGMENT + t), key);
        }
        if (HAS_SCALES) {
            u32 count = kept_scales(a.key_dim), value_count = kept_scales(a.value_dim);
            u32 to_scales = (u32)__cvta_generic_to_shared(own.key_scales + t * count);
            copy_scales(to_scales, scales_of(a.keys, head, t % PAGE_TOKENS, a.key_dim), count);
            to_scales = (u32)__cvta_generic_to_shared(own.value_scales + t * value_count);
            copy_scales(to_scales, scales_of(a.values, head, t % PAGE_TOKENS, a.value_dim), value_count);
        }
    }
    for (u32 i = from * value_pieces + t; i < to * value_pieces; i += 128) {
        u32 token = i / value_pieces;
        u64 head = (u64)pages[token / PAGE_TOKENS] * a.kv_heads + kv_head;
        u64 at = value_at(head, token % PAGE_TOKENS, a.value_dim, i % value_pieces * PIECE);
        copy_piece(to_values + sizeof(Piece) * i, a.values + at);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

#ifdef KV_Q8
// Puts a block of a key, of which a lane has element `i`, into a page.
DEVICE void put_key(u8 *cells, u64 head, u32 token, u32 dim, u32 i, u8 x, u16 scale) {
    if (i < kept_stride(dim)) cells[key_at(head, token, dim, i)] = x;
    if (i % 32 == 0) scales_of(cells, head, token, dim)[i / 32] = scale;
}

// Likewise a block of a value.
DEVICE void put_value(u8 *cells, u64 head, u32 token, u32 dim, u32 i, u8 x, u16 scale) {
    if (i < kept_stride(dim)) cells[value_at(head, token, dim, i)] = x;
    if (i % 32 == 0) scales_of(cells, head, token, dim)[i / 32] = scale;
}

// Puts a row's own key and value among the sequence's, and where a block has its last segment: a warp
// rounds a block at a time.
DEVICE void store_own(const Attend &a, u32 row, u32 kv_head, u32 page, u32 at, bool is_first, const Own &own) {
    u32 token = at % PAGE_TOKENS, key_end = (a.key_dim + 31) / 32 * 32;
    u64 head = (u64)page * a.kv_heads + kv_head;
    const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
    const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
    const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
    u16 scale;
    for (u32 i = threadIdx.x; i < key_end; i += 128) {
        u8 x = keep(i < a.key_dim ? rotated(k, i, angles, a.rotary_pairs, a.is_neox) : 0.0f, scale);
        if (i < kept_stride(a.key_dim)) own.keys[(i / PIECE * SEGMENT + at) * PIECE + i % PIECE] = x;
        if (i % 32 == 0) own.key_scales[at * kept_scales(a.key_dim) + i / 32] = scale;
        if (is_first) put_key(a.keys, head, token, a.key_dim, i, x, scale);
    }
    for (u32 i = threadIdx.x; i < (a.value_dim + 31) / 32 * 32; i += 128) {
        u8 x = keep(i < a.value_dim ? v[i] : 0.0f, scale);
        if (i < kept_stride(a.value_dim)) own.values[at * kept_stride(a.value_dim) + i] = x;
        if (i % 32 == 0) own.value_scales[at * kept_scales(a.value_dim) + i / 32] = scale;
        if (is_first) put_value(a.values, head, token, a.value_dim, i, x, scale);
    }
}
#else
// Puts an element of a token's key, or of its value, into a page.
DEVICE void put_key(KvElement *cells, u64 head, u32 token, u32 dim, u32 i, KvElement x) {
    cells[key_at(head, token, dim, i)] = x;
}

DEVICE void put_value(KvElement *cells, u64 head, u32 token, u32 dim, u32 i, KvElement x) {
    cells[value_at(head, token, dim, i)] = x;
}

// Puts a row's own key and value among the sequence's, and where a block has its last segment.
DEVICE void store_own(const Attend &a, u32 row, u32 kv_head, u32 page, u32 at, bool is_first, const Own &own) {
    u32 eights = up8(a.key_dim) / 8, stride = up8(a.value_dim), token = at % PAGE_TOKENS;
    u64 head = (u64)page * a.kv_heads + kv_head;
    const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
    const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
    for (u32 i = threadIdx.x; i < 8 * eights; i += 128) {
        float y = i < a.key_dim ? rotated(k, i, a.cos_sin + (u64)row * a.rotary_pairs, a.rotary_pairs, a.is_neox) : 0.0f;
        KvElement x = keep(y);
        own.keys[(i / 8 * SEGMENT + at) * 8 + i % 8] = x;
        if (is_first) put_key(a.keys, head, token, a.key_dim, i, x);
    }
    for (u32 i = threadIdx.x; i < stride; i += 128) {
        KvElement x = keep(i < a.value_dim ? v[i] : 0.0f);
        own.values[at * stride + i] = x;
        if (is_first) put_value(a.values, head, token, a.value_dim, i, x);
    }
}
#endif

// Segments of some heads, which are there, on their way to shared memory.
struct Copied {
    const float *from; // of the first head's first one
    u32 to, heads, part, segments, most_parts;

    __device__ __forceinline__ void take(u32 base, u32 n) const {
        u32 pieces = n * part / 4;
        for (u32 i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
            u32 head = i / pieces, at = i % pieces * 4;
            const float *piece = from + ((u64)head * segments + base) * part + at;
            copy_async(to + 4 * (head * most_parts * part + at), piece);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    __device__ __forceinline__ void clear(u32, u32, u32, u32) const {}
    __device__ __forceinline__ void finish() const {}
};

// Whether this block is the last of so many that come here, whose writes it can then read.
template <u32 THREADS> DEVICE bool is_last(u32 *arrivals, u32 blocks) {
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

// What a block does: a row, some query heads of a key head, and one of the shares of segments.
struct Block {
    uint2 range; // positions that the row sees
    u32 row, first, last; // segments of them
    u32 kv_head, first_head, heads;
    bool is_first; // of the blocks of its key head
    bool is_spread; // of a single segment nothing is left to join

    __device__ __forceinline__ Block(const Attend &a, u32 most_heads) : row(blockIdx.x) {
        range = seen(a, row);
        first = range.x / SEGMENT, last = (range.y - 1) / SEGMENT;
        u32 group = a.heads / a.kv_heads, per_kv = (group + most_heads - 1) / most_heads;
        kv_head = blockIdx.y / per_kv, first_head = kv_head * group + blockIdx.y % per_kv * most_heads;
        heads = min(most_heads, (kv_head + 1) * group - first_head);
        is_first = blockIdx.y % per_kv == 0;
        is_spread = a.is_split && first < last;
    }

    // The positions of a segment that the row sees.
    __device__ __forceinline__ u32 from(u32 segment) const { return max(range.x, segment * SEGMENT) - segment * SEGMENT; }
    __device__ __forceinline__ u32 to(u32 segment) const {
        return min(range.y, (segment + 1) * SEGMENT) - segment * SEGMENT;
    }

    // Where what a head has of a spread segment goes.
    __device__ __forceinline__ float *part(const Attend &a, u32 segment, u32 h) const {
        u64 at = ((u64)row * a.heads + first_head + h) * a.max_splits + segment - first;
        return a.partials + at * (kept_stride(a.value_dim) + PART_EXTRA);
    }
};

// Puts what a head has of a segment with what it has of others: in memory if segments are spread, or
// with `total`. `value_of(i)` is a value of the segment.
template <typename Value>
DEVICE void add_segment(const Attend &a, const Block &block, u32 segment, u32 h, float2 of_segment, float &most,
                        float &sum, float *total, const Value &value_of) {
    u32 stride = kept_stride(a.value_dim);
    float2 factors = make_float2(0.0f, 0.0f);
    if (!block.is_spread) factors = join(most, sum, of_segment.x, of_segment.y);
    float *out = block.part(a, segment, h);
    if (block.is_spread && h < block.heads && threadIdx.x == 0) {
        out[stride] = of_segment.x;
        out[stride + 1] = of_segment.y;
    }
    for (u32 i = threadIdx.x; i < stride; i += SEGMENT) {
        float v = value_of(i);
        if (!block.is_spread) {
            float &x = total[h * stride + i];
            x = x * factors.x + v * factors.y;
        } else if (h < block.heads) {
            out[i] = v;
        }
    }
}

// Ends a block's part of spread segments: the last block joins all of them.
template <int MOST_HEADS, u32 THREADS, int ITEMS> DEVICE void join_spread(const Attend &a, const Block &block, float *shared) {
    const u32 MOST = 32;
    u32 floats = kept_stride(a.value_dim) + PART_EXTRA, segments = block.last - block.first + 1, bytes;
    u32 *arrivals = a.arrivals + block.row * gridDim.y + blockIdx.y;
    if (!is_last<THREADS>(arrivals, min(gridDim.z, segments))) return;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    u32 most_parts = min(MOST, bytes / (4 * MOST_HEADS * floats));
    const float *from = block.part(a, block.first, 0);
    u32 to = (u32)__cvta_generic_to_shared(shared);
    Copied copied = {from, to, block.heads, floats, a.max_splits, most_parts};
    join_segments<MOST_HEADS, THREADS, ITEMS, MOST>(a, block.row, block.first_head, block.heads, segments, shared,
                                                    most_parts, copied);
}
