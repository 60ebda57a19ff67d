// Decode attention in the persistent kernel, for heads of up to 576 dimensions. A block has two teams
// of 8 warps. A work item of a team is a KV split of 128 positions for up to four query heads of a KV
// head, items of the last split first; a warp takes a tile of 16 positions. Keys and values come
// through the rings that weights come through.
//
// One block combines each head's splits: it polls the partials, which hold sentinels until a team has
// written them, and resets them to sentinels before it writes the head's result.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

#define MAX_COMBINED 96u // splits of a head that are combined at a time, at most

// The indices of two elements of a query or key that RoPE rotates together, and their angle.
struct Rotation {
    u32 first, second;
    bool is_rotated;
    float2 angle;

    __device__ __forceinline__ Rotation(const Attention &a, u32 i) : is_rotated(i < a.rotary_pairs), angle() {
        bool are_apart = is_rotated && a.is_neox;
        first = are_apart ? i : 2 * i;
        second = are_apart ? i + a.rotary_pairs : 2 * i + 1;
        if (is_rotated) angle = a.cos_sin[i];
    }

    __device__ __forceinline__ float2 operator()(const float2 &x) const {
        if (!is_rotated) return x;
        return make_float2(fmaf(-x.y, angle.y, x.x * angle.x), fmaf(x.x, angle.y, x.y * angle.x));
    }
};

// Two elements of a head that are polled together; elements beyond the head are zero.
struct PolledPair {
    const float *at; // the first one, or none
    u32 distance;       // distance of the second one, or 0
    u32 polled[2];

    __device__ __forceinline__ PolledPair(const float *head, u32 dim, u32 first, u32 second)
        : at(head && first < dim ? head + first : 0), distance(second < dim ? second - first : 0) {
        load_relaxed();
    }

    // Loads both once.
    __device__ __forceinline__ void load_relaxed() {
        polled[0] = polled[1] = 0;
        if (!at) return;
        polled[0] = ::load_relaxed(at);
        if (distance) polled[1] = ::load_relaxed(at + distance);
    }

    __device__ __forceinline__ bool is_missing() const { return polled[0] == SENTINEL || polled[1] == SENTINEL; }

    // The elements, once none is missing.
    __device__ __forceinline__ float2 get() const {
        return make_float2(__uint_as_float(polled[0]), __uint_as_float(polled[1]));
    }
};

// The visible part of a split and of a warp's tile, packed in one register.
struct Extent {
    u32 bits;

    // Of the split: visible tiles. Of the tile: visible places, and the current token's place, or
    // 31 if it is in another tile.
    __device__ __forceinline__ Extent(const VisibleSplits &visible, u32 split, u32 tile) {
        u32 at = split * KV_SPLIT + tile * TILE_POSITIONS;
        TileRange tiles = visible.tiles(split);
        u32 from = min(max(visible.range.x, at) - at, TILE_POSITIONS);
        u32 to = min(max(visible.range.y, at) - at, TILE_POSITIONS), current_place = min(visible.range.y - 1 - at, 31);
        bits = tiles.first | tiles.end << 4 | from << 8 | to << 13 | current_place << 18;
    }

    __device__ __forceinline__ TileRange tiles() const { return {bits & 15, bits >> 4 & 15}; }
    __device__ __forceinline__ u32 from() const { return bits >> 8 & 31; }
    __device__ __forceinline__ u32 to() const { return bits >> 13 & 31; }
    __device__ __forceinline__ bool has_current() const { return current_place() < TILE_POSITIONS; }
    __device__ __forceinline__ u32 current_place() const { return bits >> 18; }
};

// Partials of a head's splits, polled until the blocks that compute them have written them.
struct AwaitedPartials {
    uint4 *from, *to;
    u32 pieces; // of a partial

    __device__ __forceinline__ void take(u32 base, u32 n) const {
        u32 len = n * pieces;
        for (u32 first = threadIdx.x; first < len; first += 4 * THREADS) {
            uint4 x[4];
            poll_all<false>(from + base * pieces + first, THREADS, len - first, x);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 i = first + j * THREADS;
                if (i < len) to[i] = x[j];
            }
        }
    }

    // Resets them to sentinels, by some threads.
    __device__ __forceinline__ void clear(u32 base, u32 n, u32 thread, u32 threads) const {
        uint4 none = make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL);
        for (u32 i = base * pieces + thread; i < (base + n) * pieces; i += threads) from[i] = none;
    }

    // Orders the resets before the results: a block that has read a result may write partials of a
    // later layer.
    __device__ __forceinline__ void finish() const { __threadfence(); }
};

// A team's workspace.
DEVICE Workspace &team_workspace() { return ((Workspace *)shared_memory().workspace)[opaque(threadIdx.x) / TEAM]; }

// Polls pair `i` of a query and, where they are needed in f16, of the current key and value, and writes
// it to the team's workspace. The threads of the first two heads also take the key and the value.
DEVICE void gather_query(const Attention &a, const SplitItem &now, u32 i) {
    if (2 * i >= MAX_MMA_DIM) return;
    u32 t = opaque(threadIdx.x) % TEAM, h = t / HEAD_THREADS, position = shared_memory().position;
    Rotation rotation(a, i);
    const float *head = h < now.head_count(a) ? a.q + (now.first_head(a) + h) * a.key_dim : 0;
    PolledPair query(head, a.key_dim, rotation.first, rotation.second);
    if (!is_q8(a) && now.split == position / KV_SPLIT && h < 2) {
        u32 dim = h == 0 ? a.key_dim : a.value_dim;
        u32 first = h == 0 ? rotation.first : 2 * i, second = h == 0 ? rotation.second : 2 * i + 1;
        PolledPair pair((h == 0 ? a.k : a.v) + now.kv_head * dim, dim, first, second);
        while (pair.is_missing()) {
            pair.load_relaxed();
            query.load_relaxed();
        }
        float2 x = pair.get();
        if (h == 0) x = rotation(x);
        u16 *own = h == 0 ? team_workspace().current_key : team_workspace().current_value;
        own[first] = to_half(x.x);
        own[second] = to_half(x.y);
    }
    while (query.is_missing()) query.load_relaxed();
    float2 x = rotation(query.get());
    Workspace &workspace = team_workspace();
    workspace.put_query(h, key_column(is_q8(a), rotation.first), x.x);
    workspace.put_query(h, key_column(is_q8(a), rotation.second), x.y);
}

// Polls the current key and value, quantises them, a warp a block of 32 elements at a time, and writes
// them to the team's workspace and, by one team of a KV head, to their page.
DEVICE void gather_q8(const Attention &a, const SplitItem &now) {
    u32 t = opaque(threadIdx.x) % TEAM, position = shared_memory().position;
    u32 columns = (max(a.key_dim, a.value_dim) + MMA_COLUMNS - 1) / MMA_COLUMNS * MMA_COLUMNS;
    u32 blocks = min(columns, MAX_MMA_DIM) / 32;
#pragma unroll 1
    for (u32 block = t / 32; block < 2 * blocks; block += SPLIT_TILES) {
        bool is_key = block < blocks;
        u32 i = 32 * (is_key ? block : block - blocks) + t % 32, dim = is_key ? a.key_dim : a.value_dim;
        // The pair that holds the element.
        bool are_apart = is_key && a.is_neox && i < 2 * a.rotary_pairs;
        Rotation rotation(a, are_apart ? i % a.rotary_pairs : i / 2);
        u32 first = is_key ? rotation.first : i, second = is_key ? rotation.second : i;
        PolledPair pair((is_key ? a.k : a.v) + now.kv_head * dim, dim, first, second);
        while (pair.is_missing()) pair.load_relaxed();
        float2 x = pair.get();
        if (is_key) x = rotation(x);
        u16 scale;
        u8 code = quantize_q8(i == first ? x.x : x.y, scale);
        Workspace &workspace = team_workspace();
        u16 *own = is_key ? workspace.current_key : workspace.current_value;
        own[is_key ? key_column(true, i) : i] = q8_half(code, scale);
        if (now.head_group > 0) continue;
        u64 head = (u64)shared_memory().pages[a.page_table][position / PAGE_TOKENS] * a.kv_heads + now.kv_head;
        put_q8((u8 *)(is_key ? a.keys : a.values), head, position % PAGE_TOKENS, dim, i, is_key, code, scale);
    }
}

// All pairs: threads have some of a head, `HEAD_THREADS` apart.
DEVICE void gather_queries(const Attention &a, const SplitItem &now) {
    u32 i = opaque(threadIdx.x) % HEAD_THREADS;
#pragma unroll 1
    for (u32 column = 0; column < max(a.key_dim, a.value_dim); column += MMA_COLUMNS) {
        gather_query(a, now, i + column / 2);
    }
    if (is_q8(a) && now.split == shared_memory().position / KV_SPLIT) gather_q8(a, now);
}

// Stores the current key and value in f16 in their page: a thread eight elements.
DEVICE void store_current(const Attention &a, const SplitItem &now) {
    u32 position = shared_memory().position, t = opaque(threadIdx.x) % TEAM, i = t % (TEAM / 2);
    bool is_key = t < TEAM / 2;
    u32 eights = round_up8(is_key ? a.key_dim : a.value_dim) / 8, token = position % PAGE_TOKENS;
    static_assert(8 * (TEAM / 2) >= MAX_MMA_DIM, "a thread has eight elements");
    // By one team of a KV head.
    if (is_q8(a) || now.split != position / KV_SPLIT || now.head_group > 0 || i >= eights) return;
    u64 head = (u64)shared_memory().pages[a.page_table][position / PAGE_TOKENS] * a.kv_heads + now.kv_head;
    const Workspace &workspace = team_workspace();
    if (is_key) {
        *(uint4 *)(a.keys + key_at(head, token, a.key_dim, 8 * i)) = ((const uint4 *)workspace.current_key)[i];
    } else {
        *(uint4 *)(a.values + value_at(head, token, a.value_dim, 8 * i)) = ((const uint4 *)workspace.current_value)[i];
    }
}

// Visible splits. Recomputed at each use, as registers are scarce.
DEVICE u32 visible_splits(const Attention &a) { return VisibleSplits(a, shared_memory().position).splits(); }

// Publishes MMA_COLUMNS of a team's partial of a split, or of the result if there is only one split.
DEVICE void publish(const Attention &a, const SplitItem &now, u32 first_column) {
    u32 t = opaque(threadIdx.x) % TEAM, h = t / HEAD_THREADS, i = t % HEAD_THREADS, stride = round_up8(a.value_dim);
    u32 head = now.first_head(a) + h;
    bool is_alone = visible_splits(a) == 1, is_head = h < now.head_count(a);
    AttentionOutput results(a, 0, head);
    CombinedTiles joined(team_workspace(), h, i, a.value_dim - first_column);
    if (!is_head) return;
    if (is_alone) {
        // As if combined with nothing: a zero loses its sign.
        float factor = results.factor(joined.row_max, joined.sum);
#pragma unroll
        for (u32 k = 0; k < HEAD_ITEMS; k++) {
            results.put(first_column + i + k * HEAD_THREADS, (joined.values[k] + 0.0f) * factor);
        }
        return;
    }
    u64 at = (u64)head * a.max_splits + now.split - VisibleSplits(a, shared_memory().position).first;
    float *out = a.partials + at * (stride + PARTIAL_EXTRA);
#pragma unroll
    for (u32 k = 0; k < HEAD_ITEMS; k++) {
        u32 column = first_column + i + k * HEAD_THREADS;
        if (column < stride) store_relaxed(out + column, joined.values[k]);
    }
    // Once, as the block that combines the splits resets it.
    if (first_column == 0 && i < PARTIAL_EXTRA) {
        store_relaxed(out + stride + i, i == 0 ? joined.row_max : i == 1 ? joined.sum : 0.0f);
    }
}

// Slots of MMA_COLUMNS of a tile's keys, or of its values; `columns` are left.
DEVICE u32 slots_of(const Attention &a, u32 columns) { return columns > SLICE_DIM && !is_q8(a) ? 2 : 1; }

// Waits for the next slices.
DEVICE Slices take_slices(const Attention &a, SharedMemory &shared, ConsumerRing &ring, u32 columns) {
    const u8 *first = ring.take(shared);
    return {{first, slots_of(a, columns) > 1 ? ring.take(shared) : first + Q8_SLICE_BYTES}};
}

// Loads the next MMA_COLUMNS of a tile's keys.
DEVICE void take_keys(const Attention &a, SharedMemory &shared, ConsumerRing &ring, u32 columns, KeyFragment &keys) {
    Slices slices = take_slices(a, shared, ring, columns);
    if (is_q8(a)) {
        Q8Keys stored;
        stored.load<false>(slices, columns);
        keys = stored.unpack();
    } else {
        keys.load<false>(slices, columns);
    }
    ring.release(shared, slots_of(a, columns));
}

// Loads a slice of a tile's values.
DEVICE void load_values(const Attention &a, const Slices &slices, u32 slice, u32 columns, const Extent &extent,
                        ValueFragment &values) {
    if (is_q8(a)) {
        Q8Values stored;
        stored.load<false>(slices, slice, columns);
        values = stored.unpack(extent.from(), extent.to());
    } else {
        values.load<false>(slices, slice, columns);
    }
}

// Whether a team's workspace is found again at each use: in kernels with no register for its address.
#define FINDS_WORKSPACE (EXPERTS && SOFTCAPS_AND_Q8)

// Attention of the row: each team takes other splits; a warp takes a tile, whose keys and values
// are in its slots, then a thread some columns of a head. Returns the slots taken so far.
DEVICE u32 attention(u32 stage, u32 taken, u32 workspace) {
    SharedMemory &shared = shared_memory();
    const Attention &a = shared.stages[opaque(stage % 2)].attention;
    u32 items = a.head_blocks * visible_splits(a);
    // A block that combines splits but computes none must not take an earlier layer's partials for
    // this one's. Those are reset once queries exist, which need all results of earlier layers. A
    // block that combines none must not wait: nothing waits for its reads.
    if (first_item() - items < a.heads && items > a.head_blocks && opaque(threadIdx.x) == 0) {
        while (load_relaxed(a.q) == SENTINEL) {}
    }
    u32 t = opaque(threadIdx.x), team = t / TEAM, tile = t / 32 % SPLIT_TILES;
    ConsumerRing ring = {t / 32, t % 32, taken};
#pragma unroll 1
    for (u32 item = first_item() + team * gridDim.x; item < a.head_blocks * visible_splits(a);
         item += TEAMS * gridDim.x) {
        VisibleSplits visible(a, shared.position);
        SplitItem now(a, visible, item);
        Extent extent(visible, now.split, tile);
        Workspace &held = team_workspace();
        auto own_workspace = [&]() -> Workspace & { return FINDS_WORKSPACE ? team_workspace() : held; };
        KeyFragment keys = {};
        // The same order as in `produce_kv`.
        if (extent.tiles().has(tile)) {
            take_keys(a, shared, ring, a.key_dim, keys);
        }
        gather_queries(a, now);
        team_sync(TEAM_BARRIER + team, SPLIT_TILES);
        bool has_tile = extent.tiles().has(tile);
        if (!has_tile) own_workspace().skip(tile);
        Fragment probabilities;
        if (has_tile) {
            Scores scores = {};
            u32 column = 0;
#pragma unroll 1
            while (true) {
                if (extent.has_current()) keys.take_current(extent.current_place(), column, own_workspace());
                keys.add_scores(column, a.key_dim - column, own_workspace(), scores);
                column += MMA_COLUMNS;
                if (column >= a.key_dim) break;
                take_keys(a, shared, ring, a.key_dim - column, keys);
            }
            float x[4], factor = query_scale(a, shared.position);
            scores.get(x);
            probabilities = softmax_tile(a, factor, x, tile, extent.from(), extent.to(), own_workspace());
        }
#pragma unroll 1
        for (u32 column = 0; column < a.value_dim; column += MMA_COLUMNS) {
            u32 columns = a.value_dim - column;
            if (has_tile) {
                Slices slices = take_slices(a, shared, ring, columns);
                ValueFragment values;
                load_values(a, slices, 0, columns, extent, values);
                float *out = own_workspace().tile_values[tile][t / 4 % BLOCK_HEADS];
                if (extent.has_current()) values.take_current(extent.current_place(), 0, column, own_workspace());
                values.sum(probabilities, 0, out);
                if (columns > SLICE_DIM) {
                    load_values(a, slices, 1, columns, extent, values);
                    if (extent.has_current()) values.take_current(extent.current_place(), 1, column, own_workspace());
                    values.sum(probabilities, 1, out);
                }
                ring.release(shared, slots_of(a, columns));
            }
            team_sync(TEAM_BARRIER + team, SPLIT_TILES);
            publish(a, now, column);
            if (column == 0) store_current(a, now);
            team_sync(TEAM_BARRIER + team, SPLIT_TILES);
        }
    }
    u32 splits = visible_splits(a);
    if (splits == 1) return ring.taken;
    u32 floats = round_up8(a.value_dim) + PARTIAL_EXTRA, max_partials = min(MAX_COMBINED, workspace / (4 * floats));
    // The blocks behind those with one more split.
    u32 head = first_item() + gridDim.x - a.head_blocks * splits % gridDim.x;
    head -= head >= gridDim.x ? gridDim.x : 0;
    for (; head < a.heads; head += gridDim.x) {
        AwaitedPartials partials = {(uint4 *)(a.partials + (u64)head * a.max_splits * floats),
            (uint4 *)shared.workspace, floats / 4};
        combine_splits<1, THREADS, 1, MAX_COMBINED>(a, 0, head, 1, splits, (float *)shared.workspace,
            max_partials, partials);
    }
    return ring.taken;
}

#endif
