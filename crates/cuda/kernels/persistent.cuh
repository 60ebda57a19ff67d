// What a persistent step is made of: the list of its stages, the shared memory of a block, and the
// warp that fetches weights, keys and values, stages ahead, into slots that the others take them from.
#pragma once
#include "barrier.cuh"
#include "meet.cuh"
#include "product.cuh"
#include "route.cuh"

// Whether norms are stages, and whether experts can be met: what costs registers where it is not needed.
#ifndef EXPERTS
#define EXPERTS false
#endif

#define WARPS 16u
#define THREADS (32 * WARPS)  // that compute; one of four warps more fetches
#define TEAMS (THREADS / TEAM) // of warps, in attention
#define SLOT 2560u            // bytes that a warp gets at once: chunks of one tile, or a slice of a step's keys
#define DEPTH 4u              // slots of a warp
#define NAP 200u              // nanoseconds between looks for empty slots
#define SHORT_NORM 256u       // elements of a row, or of a group, that a warp normalises
#define MOST_CHOSEN 16u       // experts of a row
#define MOST_RESULTS 64u      // of tiles of experts that a block sums, with those that others make of the last
#define NORM_QUADS 2          // four elements of a row, that each thread keeps

// What a stage does: a product with weights of a kind, plain or gated; attention; with experts, a norm, a
// product with weights in f32, or a choice of experts.
#define GATED 16u
#define ATTENTION 32u
#define NORM 33u
#define EXACT 34u
#define ROUTE 35u

#define TABLES 4 // of pages, at most
#define AHEAD 4u // stages whose descriptions are on their way to those who fetch

// The shared memory of a block.
struct Shared {
    u8 slots[WARPS][DEPTH][SLOT];
    u64 filled[WARPS][DEPTH], emptied[WARPS][DEPTH];
    float partials[2][WARPS][2][TILE_ROWS];
    Stage stages[2], ahead[AHEAD];
    const u32 *pages[TABLES];
    u32 position;
    float sums[WARPS]; // of each warp, where a block adds up
    __align__(16) u8 area[16];
};

static_assert(sizeof(Shared) == 171088 + 16, "as in persistent.rs");

#if __CUDA_ARCH__ >= 900

DEVICE Shared &shared_memory() {
    extern __shared__ __align__(128) u8 bytes[];
    return *(Shared *)bytes;
}

template <int KIND> struct Slot {
    static const u32 CHUNKS = SLOT / Planes<KIND>::BYTES < 4 ? SLOT / Planes<KIND>::BYTES : 4;
};

// Bytes of a chunk, and how many a slot holds.
DEVICE u32 slot_bytes(u32 kind, u32 &chunks) {
    chunks = kind == U4 || kind == S24_S4 ? 4 : kind == F16 ? 1 : kind == S24_S8 ? 3 : 2;
    return kind == U4 ? Planes<U4>::BYTES : kind == F16 ? Planes<F16>::BYTES
         : kind == S8 ? Planes<S8>::BYTES : kind == S24_S8 ? Planes<S24_S8>::BYTES
         : kind == S24_S4 ? Planes<S24_S4>::BYTES : Planes<U8>::BYTES;
}
static_assert(Planes<S8X16>::BYTES == Planes<U8>::BYTES, "as slot_bytes says");
static_assert(Planes<S24_F16>::BYTES == Planes<U8>::BYTES, "as slot_bytes says");
static_assert(Slot<U4>::CHUNKS == 4 && Slot<S24_S8>::CHUNKS == 3, "as slot_bytes says");

// How many tiles there are: of experts those of each chosen one. Those that are gated lie one expert's behind
// the other's; those whose results are summed lie together, the same tile of each expert.
DEVICE u32 tiles_of(const Matmul &p) { return EXPERTS && p.experts_used ? p.tiles * p.experts_used : p.tiles; }

DEVICE bool is_summed(const Matmul &p, bool is_gated) { return EXPERTS && p.experts_used && !is_gated; }

// Where results are summed, a block has neighbours, from this one on up to the next block's first.
DEVICE u32 first_summed(const Matmul &p, u32 block) { return block * tiles_of(p) / gridDim.x; }

// Blocks that take turns with tiles: of experts without the last one, which has just chosen them and would be late.
DEVICE u32 blocks_of(const Matmul &p) { return EXPERTS && p.experts_used ? gridDim.x - 1 : gridDim.x; }

// Whether this block has any tile.
DEVICE bool has_tiles(const Matmul &p, bool is_gated) {
    if (!is_summed(p, is_gated)) return blockIdx.x < min(tiles_of(p), blocks_of(p));
    return first_summed(p, blockIdx.x) < first_summed(p, blockIdx.x + 1);
}

// How the warps of a block share a product: teams take tiles, their members parts of columns.
struct Share {
    u32 parts, warps, team, member, first, end, tile, step, tiles;

    __device__ __forceinline__ Share(const Matmul &p, bool is_gated, u32 warp) {
        parts = p.slices;
        u32 shift = parts > 8 ? 4 : parts > 4 ? 3 : parts > 2 ? 2 : parts - 1;
        warps = 1 << shift;
        team = warp >> shift;
        member = warp & (warps - 1);
        first = member * p.slice_chunks;
        end = min(first + p.slice_chunks, p.chunks);
        // The first tiles of all blocks go to their first teams.
        tile = blockIdx.x + blocks_of(p) * team;
        step = blocks_of(p) * (WARPS >> shift);
        tiles = tiles_of(p);
        if (is_summed(p, is_gated)) {
            tiles = first_summed(p, blockIdx.x + 1);
            tile = first_summed(p, blockIdx.x) + team;
            step = WARPS >> shift;
        }
    }
};

// Waits for all of a team, of so many warps.
DEVICE void team_sync(u32 team, u32 warps) {
    if (warps == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 2), "r"(32 * warps) : "memory");
    }
}

// Whether the `count`th slot of a warp was emptied.
DEVICE bool is_empty(Shared &shared, u32 warp, u32 count) {
    return has_passed(shared_address(&shared.emptied[warp][count % DEPTH]), count / DEPTH % 2 ^ 1);
}

// Asks for the next slot of a warp, the `count`th.
DEVICE void fill(Shared &shared, u32 warp, u32 count, const u8 *from, u32 bytes) {
    u32 slot = count % DEPTH, to = shared_address(shared.slots[warp][slot]);
    u32 barrier = shared_address(&shared.filled[warp][slot]);
    expect(barrier, bytes);
    copy_once(to, from, bytes, barrier);
}

// Waits for a number.
DEVICE float wait_for(const float *at) {
    u32 bits = look(at);
    while (bits == UNWRITTEN) bits = look(at);
    return __uint_as_float(bits);
}

// Fetches what a stage needs of weights: each lane what one warp does, as soon as a slot is empty.
DEVICE void fetch_weights(const Stage &stage, u32 lane, u32 &filled) {
    Shared &shared = shared_memory();
    const Matmul &p = stage.matmul;
    bool is_gated = stage.op >= GATED;
    u32 chunks, bytes = slot_bytes(stage.op % GATED, chunks);
    Share share(p, is_gated, lane);
    bool has_part = lane < WARPS && share.first < share.end;
    u32 tile = has_part ? share.tile : share.tiles, len = (share.end - share.first) * bytes;
    // What of a tile has been asked for, and which of two matrices is next.
    u32 done = 0, which = 0;
#pragma unroll 1
    while (__any_sync(~0u, tile < share.tiles)) {
        bool may = tile < share.tiles && is_empty(shared, lane, filled);
        if (may) {
            const Matrix &m = p.matrices[is_gated ? which : matrix_of(p, tile)];
            u64 first = ((u64)(tile - m.first_tile) * p.chunks + share.first) * bytes;
            u32 size = min(chunks * bytes, len - done);
            fill(shared, lane, filled++, m.packed + first + done, size);
            which ^= is_gated;
            if (which == 0) done += size;
            if (done == len) {
                done = 0;
                tile += share.step;
            }
        }
        // Whoever computes needs the scheduler more.
        if (!__any_sync(~0u, may)) __nanosleep(NAP);
    }
}

// The same of experts, once they are chosen. Where their tiles begin is found once for each tile.
DEVICE void fetch_experts(Stage &stage, u32 lane, u32 &filled) {
    Shared &shared = shared_memory();
    const Matmul &p = stage.matmul;
    bool is_gated = stage.op >= GATED;
    if (!has_tiles(p, is_gated)) return;
    // Experts' products have no other matrices.
    u32 *chosen = (u32 *)&stage.matmul.matrices[2];
    if (lane < p.experts_used) chosen[lane] = (u32)wait_for(p.route + p.experts_used + lane);
    __syncwarp();
    u32 chunks, bytes = slot_bytes(stage.op % GATED, chunks);
    Share share(p, is_gated, lane);
    bool has_part = lane < WARPS && share.first < share.end;
    u32 tile = has_part ? share.tile : share.tiles, which = 0, left = 0;
    // What is next of a matrix, in lines of 64 bytes, of which all chunks have some.
    u32 line = 0;
#pragma unroll 1
    while (__any_sync(~0u, tile < share.tiles)) {
        bool may = tile < share.tiles && is_empty(shared, lane, filled);
        if (may) {
            if (left == 0) {
                u32 base = is_gated ? p.tiles : p.experts_used, high = tile / base, low = tile - high * base;
                u32 number = chosen[is_gated ? high : low] * p.tiles + (is_gated ? low : high);
                line = (number * p.chunks + share.first) * (bytes / 64);
                left = (share.end - share.first) * bytes;
            }
            u32 size = min(chunks * bytes, left);
            fill(shared, lane, filled++, p.matrices[which].packed + (u64)line * 64, size);
            which ^= is_gated;
            if (which == 0) {
                line += size / 64;
                left -= size;
                if (left == 0) tile += share.step;
            }
        }
        if (!__any_sync(~0u, may)) __nanosleep(NAP);
    }
}

// Asks for the description of a stage.
DEVICE void describe(const Stage *from, Stage &to, u32 lane) {
    if (lane < sizeof(Stage) / 16) copy_async(shared_address(&to) + 16 * lane, (const uint4 *)from + lane);
}

// What attention of a step of one row sees: its segments, from the first to the last.
struct Seen {
    uint2 range;
    u32 first, last;

    __device__ __forceinline__ Seen(const Attend &a, u32 position) {
        u32 end = position + 1;
        range = make_uint2(a.window && end > a.window ? end - a.window : 0, end);
        first = range.x / SEGMENT;
        last = (range.y - 1) / SEGMENT;
    }

    __device__ __forceinline__ u32 segments() const { return last - first + 1; }

    // Of a segment.
    __device__ __forceinline__ Steps steps(u32 segment) const {
        u32 start = segment * SEGMENT;
        return Steps::between(max(range.x, start) - start, min(range.y, start + SEGMENT) - start);
    }
};

// What a team takes at once: a segment that some query heads of a key head meet, the last segment first,
// as the row's own position is there.
struct Item {
    u32 segment, kv_head, block; // of the key head's query heads

    __device__ __forceinline__ Item(const Attend &a, const Seen &seen, u32 item) {
        u32 back = divide(item, a.head_blocks_inverse), of_all = item - back * a.head_blocks;
        segment = seen.last - back;
        kv_head = divide(of_all, a.group_blocks_inverse);
        block = of_all - kv_head * ((a.group_heads + HEADS - 1) / HEADS);
    }

    __device__ __forceinline__ u32 first_head(const Attend &a) const { return kv_head * a.group_heads + block * HEADS; }
    __device__ __forceinline__ u32 head_count(const Attend &a) const { return min(HEADS, a.group_heads - block * HEADS); }
};

// The first item of this block: the last blocks begin, as they have fewer tiles of the products before.
DEVICE u32 first_item() { return gridDim.x - 1 - blockIdx.x; }

#define FED 15 // the barrier behind which attention finds what it needs of the feed

// Those who compute have written that down.
DEVICE void tell_fed() { asm volatile("bar.arrive %0, %1;" ::"n"(FED), "n"(THREADS + 32) : "memory"); }

// Those who fetch wait for it, and for earlier steps, which have written keys and values in another way than that in
// which they are fetched.
DEVICE void wait_fed() {
    wait_for_inputs();
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"n"(FED), "n"(THREADS + 32) : "memory");
}

// Fetches the keys and values that this block's teams look at: each lane what one warp does, as soon as a slot is
// empty.
DEVICE void fetch_kept(const Attend &a, u32 lane, u32 &filled) {
    Shared &shared = shared_memory();
    Seen seen(a, shared.position);
    u32 items = a.head_blocks * seen.segments(), step = lane % SEGMENT_STEPS;
    if (first_item() >= items) return;
    const u32 *pages = shared.pages[a.page_table];
    u32 key_bytes = STEP_POSITIONS * 2 * up8(a.key_dim), value_bytes = STEP_POSITIONS * 2 * up8(a.value_dim);
    u32 number = lane < WARPS ? first_item() + lane / SEGMENT_STEPS * gridDim.x : items;
#pragma unroll 1
    for (; __any_sync(~0u, number < items); number += TEAMS * gridDim.x) {
        u32 key_left = 0, value_left = 0;
        const u8 *key = 0, *value = 0;
        if (number < items) {
            Item item(a, seen, number);
            u32 position = item.segment * SEGMENT + step * STEP_POSITIONS;
            if (seen.steps(item.segment).has(step)) {
                u64 head = (u64)pages[position / PAGE_TOKENS] * a.kv_heads + item.kv_head;
                u32 token = position % PAGE_TOKENS;
                key = (const u8 *)(a.keys + key_at(head, token, a.key_dim, 0));
                value = (const u8 *)(a.values + value_at(head, token, a.value_dim, 0));
                key_left = key_bytes, value_left = value_bytes;
            }
        }
#pragma unroll 1
        while (__any_sync(~0u, key_left + value_left > 0)) {
            bool may = key_left + value_left > 0 && is_empty(shared, lane, filled);
            if (may) {
                bool is_key = key_left > 0;
                u32 size = min(is_key ? key_left : value_left, SLICE_BYTES);
                fill(shared, lane, filled++, is_key ? key : value, size);
                if (is_key) {
                    key += size, key_left -= size;
                } else {
                    value += size, value_left -= size;
                }
            }
            if (!__any_sync(~0u, may)) __nanosleep(NAP);
        }
    }
}

// Fetches the weights of all stages, and what attention looks at.
DEVICE void fetch_all(const Stage *stages, u32 count) {
    Shared &shared = shared_memory();
    u32 lane = threadIdx.x % 32, filled = 0;
    bool is_fed = false;
    for (u32 i = 0; i < AHEAD - 1; i++) {
        if (i < count) describe(stages + i, shared.ahead[i], lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 2) : "memory");
        __syncwarp();
        u32 next = i + AHEAD - 1;
        if (next < count) describe(stages + next, shared.ahead[next % AHEAD], lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const Stage &stage = shared.ahead[i % AHEAD];
        if (EXPERTS && stage.op > ATTENTION) continue;
        bool has_experts = EXPERTS && stage.op < ATTENTION && stage.matmul.experts_used;
        if (stage.op != ATTENTION && !has_experts) {
            fetch_weights(stage, lane, filled);
            continue;
        }
        // Others look at more than weights.
        if (!is_fed) wait_fed();
        is_fed = true;
        if (has_experts) {
            fetch_experts(shared.ahead[i % AHEAD], lane, filled);
        } else {
            fetch_kept(stage.attention, lane, filled);
        }
    }
    // Nobody may be left at that barrier.
    if (!is_fed) wait_fed();
}

// Where a warp is in its slots: how many it has taken.
struct Ring {
    u32 warp, lane, taken;

    // Waits for the next slot.
    __device__ __forceinline__ const u8 *take(Shared &shared) {
        u32 slot = taken % DEPTH;
        wait_phase(shared_address(&shared.filled[warp][slot]), taken / DEPTH % 2);
        taken++;
        return shared.slots[warp][slot];
    }

    // Whether the next slot is filled, for all lanes.
    __device__ __forceinline__ bool has_next(Shared &shared) const {
        return __all_sync(~0u, has_passed(shared_address(&shared.filled[warp][taken % DEPTH]), taken / DEPTH % 2));
    }

    // The last slots that were taken, of this number, have been read.
    __device__ __forceinline__ void release(Shared &shared, u32 slots) const {
        __syncwarp();
        if (lane < slots) arrive(shared_address(&shared.emptied[warp][(taken - 1 - lane) % DEPTH]));
    }
};

#endif
