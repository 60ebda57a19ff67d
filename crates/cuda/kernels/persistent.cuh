// Parts of the persistent megakernel: the shared memory of a block, how warps share a matmul, and
// the producer warp, which fills the rings of all consumer warps with weights, keys and values,
// stages ahead.
#pragma once
#define STORES_SWIZZLED false // a step of one row
#include "mbarrier.cuh"
#include "decode_mma.cuh"
#include "matmul.cuh"
#include "route.cuh"

// Whether norms are stages and experts are supported: both cost registers.
#ifndef EXPERTS
#define EXPERTS false
#endif

// Whether experts may be only in memory of the host, and stored to spare slots as they pass: looking
// for them costs time also where there are none.
#ifndef CACHES_EXPERTS
#define CACHES_EXPERTS false
#endif

#define WARPS PERSISTENT_WARPS
#define THREADS (32 * WARPS)  // consumer threads; one of four more warps is the producer
#define TEAMS (THREADS / TEAM) // of warps, in attention
#define NAP 200u              // nanoseconds between the producer's polls for empty slots
#define NORM_QUADS 2          // vectors of four elements that a thread holds in registers

#define PREFETCHED 4u // stage descriptions that the producer prefetches

// The shared memory of a block.
struct SharedMemory {
    u8 slots[WARPS][SLOT_DEPTH][SLOT_BYTES];
    u64 full[WARPS][SLOT_DEPTH], empty[WARPS][SLOT_DEPTH];
    float partials[2][WARPS][2][TILE_ROWS];
    Stage stages[2], prefetched[PREFETCHED];
    const u32 *pages[MAX_TABLES];
    const u8 *experts[2][MAX_CHOSEN]; // of the producer: packed tiles of the chosen experts
    u8 *spares[2][MAX_CHOSEN]; // and where they are stored as they pass, or none
    u8 *stored[WARPS][SLOT_DEPTH]; // where the contents of a slot are stored, or none
    u64 finished; // mbarrier: the consumers have finished
    u32 position;
    u32 stage; // that the consumers run
    u32 state_slot, is_new; // of the step's sequence: where its recurrent state is, and whether it has none yet
    float sums[WARPS]; // of each warp, in block reductions
    __align__(16) u8 workspace[16];
};

static_assert(sizeof(SharedMemory) == PERSISTENT_BYTES + 16, "PERSISTENT_BYTES and the workspace");

#if __CUDA_ARCH__ >= 900

DEVICE SharedMemory &shared_memory() {
    extern __shared__ __align__(128) u8 bytes[];
    return *(SharedMemory *)bytes;
}

// Watchdog. Pollers of a lost result would spin forever, and a running kernel cannot be cancelled.
// So a thread of each block, in a warp that is idle otherwise, watches the consumers, and with them
// everything that they wait for. When they have been in one stage for two seconds, it reports the
// stage to the host. A little later, when stuck blocks have reported theirs, it ends the grid.
#define TICK 20u // log2 of nanoseconds
#define STALL_TICKS 1907u
#define GRACE_TICKS 128u
#define MAX_TICKS 16u // between two looks at the clock: a longer time is that of a preempted grid
#define NOT_STARTED ~0u

DEVICE u32 clock_ticks() { return (u32)(nanoseconds() >> TICK); }

// Watches the consumers of this block until they have finished. `stalled` is in host memory.
DEVICE void watch(volatile u32 *stalled) {
    SharedMemory &shared = shared_memory();
    u32 stage = NOT_STARTED, idle = 0, last = clock_ticks();
    while (!mbarrier_try_wait(shared_address(&shared.finished), 0, 1u << TICK)) {
        u32 now = clock_ticks(), before = idle, current = *(volatile u32 *)&shared.stage;
        idle += min(now - last, MAX_TICKS);
        if (current != stage || current == NOT_STARTED) idle = 0;
        last = now, stage = current;
        if (before < STALL_TICKS && idle >= STALL_TICKS) stalled[blockIdx.x] = stage + 1;
        if (idle >= STALL_TICKS + GRACE_TICKS) {
            __threadfence_system();
            asm volatile("trap;");
        }
    }
}

template <int LAYOUT> struct Slot {
    static const u32 ALL = SLOT_BYTES / Packed<LAYOUT>::BYTES, CHUNKS = ALL < MAX_SLOT_CHUNKS ? ALL : MAX_SLOT_CHUNKS;
};

// Tiles of a matmul; with experts, those of each chosen one. Gated tiles are ordered by expert;
// others by tile, then by expert, as results of experts may be summed.
DEVICE u32 tiles_of(const Matmul &p) { return EXPERTS && p.experts_used ? p.tiles * p.experts_used : p.tiles; }

DEVICE bool has_ungated_experts(const Matmul &p, bool is_gated) { return EXPERTS && p.experts_used && !is_gated; }

// With ungated experts, a block has consecutive tiles: from this one to the next block's first.
DEVICE u32 first_tile_of_block(const Matmul &p, u32 block) { return block * tiles_of(p) / p.blocks; }

// Whether this block has any tile.
DEVICE bool has_tiles(const Matmul &p, bool is_gated) {
    if (!has_ungated_experts(p, is_gated)) return blockIdx.x < min(tiles_of(p), p.blocks);
    bool has_any = first_tile_of_block(p, blockIdx.x) < first_tile_of_block(p, blockIdx.x + 1);
    return has_any && blockIdx.x < p.blocks;
}

// How the warps of a block share a matmul: teams take tiles, their members take split-K slices.
struct Partition {
    u32 slices, warps, team, member, first, end, tile, step, tiles;

    __device__ __forceinline__ Partition(const Matmul &p, bool is_gated, u32 warp) {
        slices = p.slices;
        u32 shift = slices > 8 ? 4 : slices > 4 ? 3 : slices > 2 ? 2 : slices - 1;
        warps = 1 << shift;
        team = warp >> shift;
        member = warp & (warps - 1);
        first = member * p.slice_chunks;
        end = min(first + p.slice_chunks, p.chunks);
        // The first teams of all blocks take the first tiles.
        tile = blockIdx.x + p.blocks * team;
        step = p.blocks * (WARPS >> shift);
        tiles = tiles_of(p);
        if (has_ungated_experts(p, is_gated)) {
            tiles = first_tile_of_block(p, blockIdx.x + 1);
            tile = first_tile_of_block(p, blockIdx.x) + team;
            step = WARPS >> shift;
        }
    }
};

// The sum of the sums of all consumer warps, in their order. `t` is the thread's number; what is to
// be loaded while warps are late comes before the barrier.
template <class F> DEVICE float sum_of_warps(float of_warp, u32 t, const F &before_barrier) {
    float(&sums)[WARPS] = shared_memory().sums;
    if (t % 32 == 0) sums[t / 32] = of_warp;
    before_barrier();
    sync<THREADS>();
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += sums[i];
    return sum;
}

#define TEAM_BARRIER 2u // the named barrier of the first team

// Whether the consumer has emptied the `count`th slot of a warp's ring.
DEVICE bool is_empty(SharedMemory &shared, u32 warp, u32 count) {
    return mbarrier_test(shared_address(&shared.empty[warp][count % SLOT_DEPTH]), count / SLOT_DEPTH % 2 ^ 1);
}

// Fills the `count`th slot of a warp's ring. The consumer stores the contents at `stored`, if that is
// somewhere.
DEVICE void fill(SharedMemory &shared, u32 warp, u32 count, const u8 *from, u32 bytes, u8 *stored = 0) {
    u32 slot = count % SLOT_DEPTH, to = shared_address(shared.slots[warp][slot]);
    u32 barrier = shared_address(&shared.full[warp][slot]);
    if (CACHES_EXPERTS) shared.stored[warp][slot] = stored;
    mbarrier_expect_tx(barrier, bytes);
    bulk_copy_evict_first(to, from, bytes, barrier);
}

// Loads a number, which is missing until it is written.
DEVICE float load_once(const float *at) { return __uint_as_float(load_relaxed(at)); }

DEVICE bool is_missing(float x) { return __float_as_uint(x) == SENTINEL; }

// Polls a number until it is written. Of several numbers, one after the other, each takes as long as a
// load from L2: it is faster to load them together, again and again until none is missing.
DEVICE float poll(const float *at) {
    float x = load_once(at);
    while (is_missing(x)) x = load_once(at);
    return x;
}

// Producer of a matmul's weights: each lane serves one consumer warp, as soon as a slot is empty.
DEVICE void produce_weights(const Stage &stage, u32 lane, u32 &full) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = stage.matmul;
    bool is_gated = stage.op >= OP_GATED;
    Partition share(p, is_gated, lane);
    bool has_part = lane < WARPS && share.first < share.end;
    u32 tile = has_part ? share.tile : share.tiles, len = (share.end - share.first) * p.chunk_bytes;
    // Bytes of the tile that were fetched, and which of two matrices is next.
    u32 done = 0, matrix_index = 0;
#pragma unroll 1
    while (__any_sync(~0u, tile < share.tiles)) {
        bool can_fill = tile < share.tiles && is_empty(shared, lane, full);
        if (can_fill) {
            const Matrix &m = p.matrices[is_gated ? matrix_index : matrix_of(p, tile)];
            u64 first = ((u64)(tile - m.first_tile) * p.chunks + share.first) * p.chunk_bytes;
            u32 size = min(p.persistent_slot_bytes, len - done);
            fill(shared, lane, full++, (const u8 *)m.packed + first + done, size);
            matrix_index ^= is_gated;
            if (matrix_index == 0) done += size;
            if (done == len) {
                done = 0;
                tile += share.step;
            }
        }
        // Sleeps, to leave the scheduler to the consumers.
        if (!__any_sync(~0u, can_fill)) __nanosleep(NAP);
    }
}

// Finds the tiles of the chosen experts, a lane for each.
DEVICE void find_experts(const Matmul &p, u32 i, bool is_gated) {
    SharedMemory &shared = shared_memory();
    if (i >= p.experts_used) return;
    u32 expert = (u32)poll(p.route + p.experts_used + i);
    shared.experts[0][i] = packed_tiles(p, p.matrices[0], expert);
    if (is_gated) shared.experts[1][i] = packed_tiles(p, p.matrices[1], expert);
}

// Finds where the chosen experts are stored as they pass, a lane for each. The first of those that are
// only in memory of the host, by their numbers, have the layer's spare slots, whose addresses follow
// in the table.
DEVICE void find_spares(const Matmul &p, u32 i, u32 matrices) {
    SharedMemory &shared = shared_memory();
    u32 expert = i < p.experts_used ? (u32)poll(p.route + p.experts_used + i) : 0;
    bool is_missed = i < p.experts_used && (expert_entry(p.matrices[0], expert) & ON_HOST);
    u32 rank = 0, missed = __ballot_sync(~0u, is_missed);
#pragma unroll 1
    for (u32 j = 0; j < p.experts_used; j++) {
        u32 other = __shfl_sync(~0u, expert, j);
        rank += (missed >> j & 1) && other < expert;
    }
    if (i >= p.experts_used) return;
#pragma unroll 1
    for (u32 j = 0; j < matrices; j++) {
        bool has_spare = is_missed && rank < SPARE_SLOTS;
        shared.spares[j][i] = has_spare ? (u8 *)expert_entry(p.matrices[j], p.experts + rank) : 0;
    }
}

// Producer of experts' weights, once the experts are chosen. A tile's address is computed once.
DEVICE void produce_expert_weights(const Stage &stage, u32 lane, u32 &full) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = stage.matmul;
    bool is_gated = stage.op >= OP_GATED;
    if (!has_tiles(p, is_gated)) return;
    prefetch_experts(p, lane, is_gated ? 2 : 1);
    // A lane that is not known to be the same in each stage keeps no address in a register.
    find_experts(p, opaque(lane), is_gated);
    if (CACHES_EXPERTS) find_spares(p, opaque(lane), is_gated ? 2 : 1);
    __syncwarp();
    Partition share(p, is_gated, lane);
    bool has_part = lane < WARPS && share.first < share.end;
    u32 tile = has_part ? share.tile : share.tiles, matrix_index = 0, left = 0;
    // The next weights: the expert's place among the chosen, and where its tiles have them, in lines
    // of 32 bytes, of which chunk sizes are multiples.
    u32 place = 0, line = 0;
#pragma unroll 1
    while (__any_sync(~0u, tile < share.tiles)) {
        bool can_fill = tile < share.tiles && is_empty(shared, lane, full);
        if (can_fill) {
            if (left == 0) {
                u32 base = is_gated ? p.tiles : p.experts_used, high = tile / base, low = tile - high * base;
                place = is_gated ? high : low;
                line = ((is_gated ? low : high) * p.chunks + share.first) * (p.chunk_bytes / 32);
                left = (share.end - share.first) * p.chunk_bytes;
            }
            u32 size = min(p.persistent_slot_bytes, left);
            u8 *spare = CACHES_EXPERTS ? shared.spares[matrix_index][place] : 0;
            u8 *stored = spare ? spare + (u64)line * 32 : 0;
            fill(shared, lane, full++, shared.experts[matrix_index][place] + (u64)line * 32, size, stored);
            matrix_index ^= is_gated;
            if (matrix_index == 0) {
                line += size / 32;
                left -= size;
                if (left == 0) tile += share.step;
            }
        }
        if (!__any_sync(~0u, can_fill)) __nanosleep(NAP);
    }
}

// Prefetches the description of a stage.
DEVICE void prefetch_stage(const Stage *from, Stage &to, u32 lane) {
    if (lane < sizeof(Stage) / 16) copy_async(shared_address(&to) + 16 * lane, (const uint4 *)from + lane);
}

// The KV splits that the row attends to, from the first to the last.
struct VisibleSplits {
    uint2 range;
    u32 first, last;

    __device__ __forceinline__ VisibleSplits(const Attention &a, u32 position) {
        u32 end = position + 1;
        range = make_uint2(first_visible(a, position), end);
        first = range.x / KV_SPLIT;
        last = (range.y - 1) / KV_SPLIT;
    }

    __device__ __forceinline__ u32 splits() const { return last - first + 1; }

    // The visible tiles of a split.
    __device__ __forceinline__ TileRange tiles(u32 split) const {
        u32 start = split * KV_SPLIT;
        return TileRange::between(max(range.x, start) - start, min(range.y, start + KV_SPLIT) - start);
    }
};

// A team's unit of work: a split and up to four query heads of a KV head. The last split, which
// holds the row's own position, comes first.
struct SplitItem {
    u32 split, kv_head, head_group; // of up to BLOCK_HEADS of the KV head's query heads

    __device__ __forceinline__ SplitItem(const Attention &a, const VisibleSplits &visible, u32 item) {
        u32 back = divide(item, a.head_blocks_inverse), of_all = item - back * a.head_blocks;
        split = visible.last - back;
        kv_head = divide(of_all, a.group_blocks_inverse);
        head_group = of_all - kv_head * ((a.group_heads + BLOCK_HEADS - 1) / BLOCK_HEADS);
    }

    __device__ __forceinline__ u32 first_head(const Attention &a) const {
        return kv_head * a.group_heads + head_group * BLOCK_HEADS;
    }
    __device__ __forceinline__ u32 head_count(const Attention &a) const {
        return min(BLOCK_HEADS, a.group_heads - head_group * BLOCK_HEADS);
    }
};

// The first item of this block. The last blocks begin, as they have fewer tiles of the matmuls
// before.
DEVICE u32 first_item() { return gridDim.x - 1 - blockIdx.x; }

#define METADATA_BARRIER 15 // named barrier: the metadata that attention needs is in shared memory

// Consumers: the metadata is in shared memory.
DEVICE void arrive_metadata() {
    asm volatile("bar.arrive %0, %1;" ::"n"(METADATA_BARRIER), "n"(THREADS + 32) : "memory");
}

// Producer: waits for the metadata, and for earlier steps, whose stores of keys and values went
// through the generic proxy.
DEVICE void wait_metadata() {
    grid_dependency_wait();
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"n"(METADATA_BARRIER), "n"(THREADS + 32) : "memory");
}

DEVICE bool is_q8(const Attention &a) { return SOFTCAPS_AND_Q8 && a.is_q8; }

// Bytes of a tile of a head's keys or values.
DEVICE u32 kv_tile_bytes(const Attention &a, u32 dim) {
    return is_q8(a) ? q8_tile_bytes(dim) : 2 * TILE_POSITIONS * round_up8(dim);
}

// Bytes of a slot with keys or values: a slice of halves, or MMA_COLUMNS of bytes.
DEVICE u32 kv_slot_bytes(const Attention &a) { return is_q8(a) ? MAX_SLICES * Q8_SLICE_BYTES : F16_SLICE_BYTES; }
static_assert(F16_SLICE_BYTES <= SLOT_BYTES && MAX_SLICES * Q8_SLICE_BYTES <= SLOT_BYTES, "keys have slots");

// Producer of the keys and values of this block's splits: each lane serves one consumer warp, as
// soon as a slot is empty.
DEVICE void produce_kv(const Attention &a, u32 lane, u32 &full) {
    SharedMemory &shared = shared_memory();
    VisibleSplits visible(a, shared.position);
    u32 items = a.head_blocks * visible.splits(), step = lane % SPLIT_TILES;
    if (first_item() >= items) return;
    const u32 *pages = shared.pages[a.page_table];
    u32 key_bytes = kv_tile_bytes(a, a.key_dim), value_bytes = kv_tile_bytes(a, a.value_dim);
    u32 number = lane < WARPS ? first_item() + lane / SPLIT_TILES * gridDim.x : items;
#pragma unroll 1
    for (; __any_sync(~0u, number < items); number += TEAMS * gridDim.x) {
        u32 key_left = 0, value_left = 0;
        const u8 *key = 0, *value = 0;
        if (number < items) {
            SplitItem item(a, visible, number);
            u32 position = item.split * KV_SPLIT + step * TILE_POSITIONS;
            if (visible.tiles(item.split).has(step)) {
                u64 head = (u64)pages[position / PAGE_TOKENS] * a.kv_heads + item.kv_head;
                u64 tile = head * (PAGE_TOKENS / TILE_POSITIONS) + position % PAGE_TOKENS / TILE_POSITIONS;
                key = (const u8 *)a.keys + tile * key_bytes;
                value = (const u8 *)a.values + tile * value_bytes;
                key_left = key_bytes, value_left = value_bytes;
            }
        }
#pragma unroll 1
        while (__any_sync(~0u, key_left + value_left > 0)) {
            bool can_fill = key_left + value_left > 0 && is_empty(shared, lane, full);
            if (can_fill) {
                bool is_key = key_left > 0;
                u32 size = min(is_key ? key_left : value_left, kv_slot_bytes(a));
                fill(shared, lane, full++, is_key ? key : value, size);
                if (is_key) {
                    key += size, key_left -= size;
                } else {
                    value += size, value_left -= size;
                }
            }
            if (!__any_sync(~0u, can_fill)) __nanosleep(NAP);
        }
    }
}

// The producer warp: fills the rings for all stages.
DEVICE void produce_all(const Stage *stages, u32 count) {
    SharedMemory &shared = shared_memory();
    u32 lane = threadIdx.x % 32, full = 0;
    bool has_metadata = false;
    for (u32 i = 0; i < PREFETCHED - 1; i++) {
        if (i < count) prefetch_stage(stages + i, shared.prefetched[i], lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(PREFETCHED - 2) : "memory");
        __syncwarp();
        u32 next = i + PREFETCHED - 1;
        if (next < count) prefetch_stage(stages + next, shared.prefetched[next % PREFETCHED], lane);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const Stage &stage = shared.prefetched[i % PREFETCHED];
        if (EXPERTS && stage.op > OP_ATTENTION) continue;
        bool has_experts = EXPERTS && stage.op < OP_ATTENTION && stage.matmul.experts_used;
        if (stage.op != OP_ATTENTION && !has_experts) {
            produce_weights(stage, lane, full);
            continue;
        }
        // Experts and attention depend on metadata and on routing.
        if (!has_metadata) wait_metadata();
        has_metadata = true;
        if (has_experts) {
            produce_expert_weights(stage, lane, full);
        } else {
            produce_kv(stage.attention, lane, full);
        }
    }
    // All threads of the barrier must arrive.
    if (!has_metadata) wait_metadata();
}

// A consumer warp's position in its ring: how many slots it has taken.
struct ConsumerRing {
    u32 warp, lane, taken;

    // Waits for the next slot.
    __device__ __forceinline__ const u8 *take(SharedMemory &shared) {
        u32 slot = taken % SLOT_DEPTH;
        mbarrier_wait(shared_address(&shared.full[warp][slot]), taken / SLOT_DEPTH % 2);
        taken++;
        return shared.slots[warp][slot];
    }

    // Whether the next slot is full, for all lanes.
    __device__ __forceinline__ bool has_next(SharedMemory &shared) const {
        return __all_sync(~0u, mbarrier_test(shared_address(&shared.full[warp][taken % SLOT_DEPTH]),
                                             taken / SLOT_DEPTH % 2));
    }

    // Stores `bytes` of each of the last `slots` slots that were taken, where the producer says so.
    __device__ __forceinline__ void store(SharedMemory &shared, u32 slots, u32 bytes) const {
        if (!CACHES_EXPERTS) return;
#pragma unroll 1
        for (u32 i = 0; i < slots; i++) {
            u32 slot = (taken - 1 - i) % SLOT_DEPTH;
            u8 *to = shared.stored[warp][slot];
            if (!to) continue;
            const uint4 *from = (const uint4 *)shared.slots[warp][slot];
            for (u32 at = lane; at < bytes / 16; at += 32) ((uint4 *)to)[at] = from[at];
        }
    }

    // Releases the last `slots` slots that were taken.
    __device__ __forceinline__ void release(SharedMemory &shared, u32 slots) const {
        __syncwarp();
        if (lane < slots) mbarrier_arrive(shared_address(&shared.empty[warp][(taken - 1 - lane) % SLOT_DEPTH]));
    }
};

#endif
