// Decode attention on tensor cores (decode_mma.cuh), bit-identical to that of the persistent kernel.
//
// Grid: (rows, groups of up to four query heads of a KV head, blocks that share a row's splits);
// 256 threads, a warp for each 16-position tile of a 128-position split. Where a step has many rows,
// a block takes all splits of its row and combines them as it goes; where it has few, blocks write
// partials, and the last of them combines. Shared memory: the team's workspace. Bound by
// reading the KV cache.
#include "decode_mma.cuh"
#include "kv_split.cuh"

// Loads the block's queries.
template <bool ROTATES> DEVICE void put_queries(const Attention &a, const DecodeBlock &block, Workspace &workspace) {
    for (u32 i = threadIdx.x; i < BLOCK_HEADS * MAX_MMA_DIM; i += TEAM) {
        u32 head = i / MAX_MMA_DIM, at = i % MAX_MMA_DIM;
        const float *from = a.q + (u64)block.row * a.q_stride + (block.first_head + head) * a.key_dim;
        float x = 0.0f;
        if (head < block.heads && at < a.key_dim) {
            x = ROTATES ? rope_element(from, at, a.cos_sin + (u64)block.row * a.rotary_pairs, a.rotary_pairs, a.is_neox)
                        : from[at];
        }
        workspace.put_query(head, at, x);
    }
}

// A tile's keys or values in a page, from its first element.
DEVICE Slices slices_from(const u16 *first) { return {{(const uint4 *)first, (const uint4 *)first + SLICE_PIECES}}; }

// FUSED: each row is the only one of its sequence in the step, so the kernel also rotates its query
// and key and stores its key and value.
template <bool FUSED> DEVICE void decode_attention_mma(const Attention &a) {
    extern __shared__ __align__(16) float shared[];
    launch_dependents();
    u32 t = threadIdx.x, tile = t / 32, h = t / HEAD_THREADS;
    StepMetadata metadata = {a.metadata};
    if (a.skips_prefill && metadata.is_prompt(metadata.span(blockIdx.x))) return;
    DecodeBlock block(a, BLOCK_HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.first + blockIdx.z;
    if (first > last) return;
    u32 stride = round_up8(a.value_dim);
    Workspace &workspace = *(Workspace *)shared;
    const u32 *pages = metadata.pages(a.page_table, metadata.span(row));
    float row_max = -INFINITY_F, sum = 0.0f, total[MAX_ITEMS] = {};
    float query_factor = query_scale(a, block.range.y - 1);
    for (u32 split = first; split <= last; split += gridDim.z) {
        // The partials of the previous split have been read.
        if (split != first) __syncthreads();
        if (!FUSED && split == first) grid_dependency_wait();
        u32 start = tile * TILE_POSITIONS, at = split * KV_SPLIT + start;
        u32 from = block.from(split), to = block.to(split);
        TileRange tiles = TileRange::between(from, to);
        KeyFragment keys = {};
        ValueFragment values[MAX_SLICES] = {};
        if (tiles.has(tile)) {
            u64 head = (u64)pages[at / PAGE_TOKENS] * a.kv_heads + kv_head;
            u32 token = at % PAGE_TOKENS;
            keys.load<true>(slices_from(a.keys + key_at(head, token, a.key_dim, 0)), a.key_dim);
            Slices slices = slices_from(a.values + value_at(head, token, a.value_dim, 0));
            values[0].load<true>(slices, 0, a.value_dim);
            if (a.value_dim > SLICE_DIM) values[1].load<true>(slices, 1, a.value_dim);
        }
        if (split == first) {
            if (FUSED) grid_dependency_wait();
            put_queries<FUSED>(a, block, workspace);
        }
        bool has_current = FUSED && split == last;
        if (has_current) {
            u32 page = pages[(block.range.y - 1) / PAGE_TOKENS], token = (to - 1) % PAGE_TOKENS;
            u64 head = (u64)page * a.kv_heads + kv_head;
            const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
            const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
            if (t < MAX_MMA_DIM) {
                const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
                u16 x = quantize_kv(t < a.key_dim ? rope_element(k, t, angles, a.rotary_pairs, a.is_neox) : 0.0f);
                u16 y = quantize_kv(t < a.value_dim ? v[t] : 0.0f);
                workspace.current_key[t] = x;
                workspace.current_value[t] = y;
                if (block.is_first && t < round_up8(a.key_dim)) put_key(a.keys, head, token, a.key_dim, t, x);
                if (block.is_first && t < stride) put_value(a.values, head, token, a.value_dim, t, y);
            }
        }
        __syncthreads();
        if (tiles.has(tile)) {
            if (has_current && to <= start + TILE_POSITIONS) {
                keys.take_current(to - 1 - start, workspace);
                values[0].take_current(to - 1 - start, 0, workspace);
                values[1].take_current(to - 1 - start, 1, workspace);
            }
            float scores[4];
            keys.scores(a.key_dim, workspace, scores);
            u32 tile_from = max(from, start) - start, tile_to = min(to, start + TILE_POSITIONS) - start;
            Fragment probabilities = softmax_tile(a, query_factor, scores, tile, tile_from, tile_to, workspace);
            float *tile_out = workspace.tile_values[tile][t / 4 % BLOCK_HEADS];
            values[0].sum(probabilities, 0, tile_out);
            if (a.value_dim > SLICE_DIM) values[1].sum(probabilities, 1, tile_out);
        } else {
            workspace.skip(tile);
        }
        __syncthreads();
        CombinedTiles joined(workspace, h, t % HEAD_THREADS, a.value_dim);
        float2 factors = make_float2(0.0f, 0.0f);
        if (!block.is_split) factors = combine(row_max, sum, joined.row_max, joined.sum);
        float *out = block.partial(a, split, h);
#pragma unroll
        for (u32 i = 0; i < MAX_ITEMS; i++) {
            u32 column = t % HEAD_THREADS + i * HEAD_THREADS;
            if (!block.is_split) {
                total[i] = total[i] * factors.x + joined.values[i] * factors.y;
            } else if (h < block.heads && column < stride) {
                out[column] = joined.values[i];
            }
        }
        if (block.is_split && h < block.heads && t % HEAD_THREADS == 0) {
            out[stride] = joined.row_max;
            out[stride + 1] = joined.sum;
        }
    }
    if (block.is_split) {
        combine_across_blocks<BLOCK_HEADS, TEAM, MAX_ITEMS>(a, block, shared);
    } else if (h < block.heads) {
        AttentionOutput results(a, row, block.first_head + h);
        float factor = results.factor(row_max, sum);
#pragma unroll
        for (u32 i = 0; i < MAX_ITEMS; i++) results.put(t % HEAD_THREADS + i * HEAD_THREADS, total[i] * factor);
    }
}

KERNEL __launch_bounds__(TEAM, 2) decode_attention_mma(const __grid_constant__ Attention a) {
    decode_attention_mma<false>(a);
}
KERNEL __launch_bounds__(TEAM, 2) decode_attention_mma_fused(const __grid_constant__ Attention a) {
    decode_attention_mma<true>(a);
}
