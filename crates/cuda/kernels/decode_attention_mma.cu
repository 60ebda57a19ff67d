// Decode attention on tensor cores (decode_mma.cuh), bit-identical to that of the persistent kernel.
//
// Grid: (rows, groups of up to four query heads of a KV head, blocks that share a row's splits);
// 256 threads, a warp for each 16-position tile of a 128-position split. Where a step has many rows,
// a block takes all splits of its row and combines them as it goes; where it has few, or some are much longer than
// others, blocks write partials, and the last of them combines. Shared memory: the team's workspace. Bound by
// reading the KV cache.
#include "decode_mma.cuh"
#include "kv_split.cuh"

// Loads the block's queries.
template <u32 DIM, bool ROTATES>
DEVICE void put_queries(const Attention &a, const DecodeBlock &block, Workspace &workspace) {
    for (u32 i = threadIdx.x; i < BLOCK_HEADS * DIM; i += TEAM) {
        u32 head = i / DIM, at = i % DIM;
        const float *from = a.q + (u64)block.row * a.q_stride + (block.first_head + head) * a.key_dim;
        float x = 0.0f;
        if (head < block.heads && at < a.key_dim) {
            x = ROTATES ? rope_element(from, at, a.cos_sin + (u64)block.row * a.rotary_pairs, a.rotary_pairs, a.is_neox)
                        : from[at];
        }
        workspace.put_query(head, key_column(HAS_SCALES, at), x);
    }
}

#define SLICE_BYTES (HAS_SCALES ? Q8_SLICE_BYTES : F16_SLICE_BYTES)

// A lane's keys and values as they are in a page.
#ifdef KV_Q8
typedef Q8Keys StoredKeys;
typedef Q8Values StoredValues;
#else
typedef KeyFragment StoredKeys;
typedef ValueFragment StoredValues;
#endif

// The slices from a column on of a tile's keys or values in a page.
DEVICE Slices slices_from(const u8 *tile, u32 column) {
    const u8 *first = tile + column / SLICE_DIM * SLICE_BYTES;
    return {{first, first + SLICE_BYTES}};
}

// Loads MMA_COLUMNS of a tile's values; `columns` are left.
DEVICE void load_values(StoredValues (&values)[MAX_SLICES], const Slices &slices, u32 columns) {
    values[0].load<true>(slices, 0, columns);
    if (columns > SLICE_DIM) values[1].load<true>(slices, 1, columns);
}

// Q K^T of a tile, whose first MMA_COLUMNS of keys are loaded.
template <u32 DIM> DEVICE void multiply_keys(const Attention &a, StoredKeys &stored, const u8 *key, u32 place,
                                             const Workspace &workspace, float (&scores)[4]) {
    Scores sums = {};
#pragma unroll
    for (u32 column = 0; column < DIM; column += MMA_COLUMNS) {
        if (column > 0 && column >= a.key_dim) break;
        if (column > 0) stored.load<true>(slices_from(key, column), a.key_dim - column);
        KeyFragment keys = stored.unpack();
        keys.take_current(place, column, workspace);
        keys.add_scores(column, a.key_dim - column, workspace, sums);
    }
    sums.get(scores);
}

// Rotates the row's key and stores element `i` of it and of its value.
DEVICE void put_element(const Attention &a, const DecodeBlock &block, u32 page, u32 i, Workspace &workspace) {
    u32 token = (block.range.y - 1) % PAGE_TOKENS;
    u64 head = (u64)page * a.kv_heads + block.kv_head;
    const float *k = a.k + (u64)block.row * a.k_stride + block.kv_head * a.key_dim;
    const float *v = a.v + (u64)block.row * a.v_stride + block.kv_head * a.value_dim;
    const float2 *angles = a.cos_sin + (u64)block.row * a.rotary_pairs;
    float key = i < a.key_dim ? rope_element(k, i, angles, a.rotary_pairs, a.is_neox) : 0.0f;
    float value = i < a.value_dim ? v[i] : 0.0f;
#ifdef KV_Q8
    u16 key_scale, value_scale;
    u8 x = quantize_q8(key, key_scale), y = quantize_q8(value, value_scale);
    workspace.current_key[key_column(true, i)] = q8_half(x, key_scale);
    workspace.current_value[i] = q8_half(y, value_scale);
    if (!block.is_first) return;
    put_q8(a.keys, head, token, a.key_dim, i, true, x, key_scale);
    put_q8(a.values, head, token, a.value_dim, i, false, y, value_scale);
#else
    u16 x = quantize_kv(key), y = quantize_kv(value);
    workspace.current_key[i] = x;
    workspace.current_value[i] = y;
    if (!block.is_first) return;
    if (i < round_up8(a.key_dim)) put_key(a.keys, head, token, a.key_dim, i, x);
    if (i < round_up8(a.value_dim)) put_value(a.values, head, token, a.value_dim, i, y);
#endif
}

// All elements of them: a thread takes every TEAMth.
template <u32 DIM>
DEVICE void put_current(const Attention &a, const DecodeBlock &block, u32 page, Workspace &workspace) {
#pragma unroll
    for (u32 i = 0; i < DIM; i += TEAM) {
        if (i + threadIdx.x < DIM) put_element(a, block, page, i + threadIdx.x, workspace);
    }
}

// DIM: the widest key or value. FUSED: each row is the only one of its sequence in the step, so the
// kernel also rotates its query and key and stores its key and value.
template <u32 DIM, bool FUSED> DEVICE void decode_attention_mma(const Attention &a) {
    extern __shared__ __align__(16) float shared[];
    launch_dependents();
    u32 t = threadIdx.x, tile = t / 32, h = t / HEAD_THREADS;
    StepMetadata metadata = {a.metadata};
    if (a.skips_prefill && metadata.is_prompt(metadata.span(blockIdx.x))) return;
    DecodeBlock block(a, BLOCK_HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.own_first();
    if (first > last) return;
    u32 stride = kv_stride(a.value_dim);
    Workspace &workspace = *(Workspace *)shared;
    const u32 *pages = metadata.pages(a.page_table, metadata.span(row));
    float row_max = -INFINITY_F, sum = 0.0f, total[(DIM + MMA_COLUMNS - 1) / MMA_COLUMNS][HEAD_ITEMS] = {};
    float query_factor = query_scale(a, block.range.y - 1);
    for (u32 split = first; split <= last; split += block.distance()) {
        // The partials of the previous split have been read.
        if (split != first) __syncthreads();
        if (!FUSED && split == first) grid_dependency_wait();
        u32 start = tile * TILE_POSITIONS, at = split * KV_SPLIT + start;
        u32 from = block.from(split), to = block.to(split);
        TileRange tiles = TileRange::between(from, to);
        StoredKeys keys = {};
        StoredValues values[MAX_SLICES] = {};
        const u8 *key = 0, *value = 0;
        if (tiles.has(tile)) {
            u64 head = (u64)pages[at / PAGE_TOKENS] * a.kv_heads + kv_head;
            u32 token = at % PAGE_TOKENS;
            key = (const u8 *)(a.keys + key_at(head, token, a.key_dim, 0));
            value = (const u8 *)(a.values + value_at(head, token, a.value_dim, 0));
            keys.load<true>(slices_from(key, 0), a.key_dim);
            load_values(values, slices_from(value, 0), a.value_dim);
        }
        if (split == first) {
            if (FUSED) grid_dependency_wait();
            put_queries<DIM, FUSED>(a, block, workspace);
        }
        bool has_current = FUSED && split == last;
        if (has_current) put_current<DIM>(a, block, pages[(block.range.y - 1) / PAGE_TOKENS], workspace);
        __syncthreads();
        Fragment probabilities = {};
        float2 factors = make_float2(0.0f, 0.0f);
#pragma unroll
        for (u32 column = 0; column < DIM; column += MMA_COLUMNS) {
            u32 columns = a.value_dim - column;
            if (column > 0 && column >= a.value_dim) break;
            if (column > 0) __syncthreads(); // the values before these have been combined
            if (tiles.has(tile)) {
                // The current token's place in the tile, if it is there.
                u32 place = has_current && to <= start + TILE_POSITIONS ? to - 1 - start : TILE_POSITIONS;
                if (column > 0) load_values(values, slices_from(value, column), columns);
                if (column == 0) {
                    float scores[4];
                    multiply_keys<DIM>(a, keys, key, place, workspace, scores);
                    u32 tile_from = max(from, start) - start, tile_to = min(to, start + TILE_POSITIONS) - start;
                    probabilities = softmax_tile(a, query_factor, scores, tile, tile_from, tile_to, workspace);
                }
                ValueFragment slices[MAX_SLICES];
#pragma unroll
                for (u32 i = 0; i < MAX_SLICES; i++) {
                    slices[i] = values[i].unpack(max(from, start) - start, min(to, start + TILE_POSITIONS) - start);
                    slices[i].take_current(place, i, column, workspace);
                }
                float *tile_out = workspace.tile_values[tile][t / 4 % BLOCK_HEADS];
                slices[0].sum(probabilities, 0, tile_out);
                if (columns > SLICE_DIM) slices[1].sum(probabilities, 1, tile_out);
            } else if (column == 0) {
                workspace.skip(tile);
            }
            __syncthreads();
            CombinedTiles joined(workspace, h, t % HEAD_THREADS, columns);
            if (!block.is_split && column == 0) factors = combine(row_max, sum, joined.row_max, joined.sum);
            float *out = block.partial(a, split, h);
#pragma unroll
            for (u32 i = 0; i < HEAD_ITEMS; i++) {
                u32 to_column = column + t % HEAD_THREADS + i * HEAD_THREADS;
                if (!block.is_split) {
                    float &x = total[column / MMA_COLUMNS][i];
                    x = x * factors.x + joined.values[i] * factors.y;
                } else if (h < block.heads && to_column < stride) {
                    out[to_column] = joined.values[i];
                }
            }
            if (column == 0 && block.is_split && h < block.heads && t % HEAD_THREADS == 0) {
                out[stride] = joined.row_max;
                out[stride + 1] = joined.sum;
            }
        }
    }
    if (block.is_split) {
        combine_across_blocks<BLOCK_HEADS, TEAM, DIM / HEAD_THREADS>(a, block, shared);
    } else if (h < block.heads) {
        AttentionOutput results(a, row, block.first_head + h);
        float factor = results.factor(row_max, sum);
#pragma unroll
        for (u32 i = 0; i < DIM / HEAD_THREADS; i++) {
            results.put(t % HEAD_THREADS + i * HEAD_THREADS, total[i / HEAD_ITEMS][i % HEAD_ITEMS] * factor);
        }
    }
}

#define ATTENTION_KERNELS(dim, blocks) \
    KERNEL __launch_bounds__(TEAM, blocks) decode_attention_mma_##dim(const __grid_constant__ Attention a) { \
        decode_attention_mma<dim, false>(a); \
    } \
    KERNEL __launch_bounds__(TEAM, blocks) decode_attention_mma_##dim##_fused(const __grid_constant__ Attention a) { \
        decode_attention_mma<dim, true>(a); \
    }

ATTENTION_KERNELS(128, 2)
ATTENTION_KERNELS(256, 1)
ATTENTION_KERNELS(576, 1)
