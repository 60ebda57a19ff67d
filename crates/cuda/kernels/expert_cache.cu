// The cache of experts on the device. The tiles of all experts are in memory of the host, where
// matmuls can read them; those of some experts are also in slots on the device. Experts that rows
// have just chosen take the slots of those that are used less. A table of addresses tells matmuls
// where an expert's tiles are, so the cache changes no result.
//
// In steps of several rows, the first chosen experts that get no slot are streamed: copied as well, for
// this step. All layers have the same memory for them.
//
// Where experts stay in the model's file, some of them are in memory of the host, and none of these is
// also on the device: an expert that gets a slot is exchanged with the one that had it.
//
// An expert crosses the bus once to get a slot, or once each way. In most steps it is copied before matmuls read it.
// The persistent kernel does not stop for that: it reads the expert from the host and stores it to a
// spare slot on the way. The slot of the expert that is replaced is the next spare one.
#include "device.cuh"

#define HOST_NAP 1000u // nanoseconds between polls of an answer of the host

// An expert and its score. Of equal scores the lower expert counts, so that runs repeat.
struct ScoredExpert {
    float score;
    u32 expert;
};

DEVICE ScoredExpert better(const ScoredExpert &a, const ScoredExpert &b, bool wants_highest) {
    bool is_b = wants_highest ? b.score > a.score : b.score < a.score;
    return is_b || (b.score == a.score && b.expert < a.expert) ? b : a;
}

// The experts of a layer in shared memory: what the cache will be when the kernel ends.
struct Experts {
    u32 count;
    float *scores;
    u32 *slots;
    u32 *are_chosen; // since the last update
    u32 *streamed_at; // where each is among those that are streamed, or NO_SLOT

    __device__ __forceinline__ Experts(u32 count, float *shared)
        : count(count), scores(shared), slots((u32 *)(shared + count)), are_chosen(slots + count),
          streamed_at(are_chosen + count) {}

    // Reads the cache, and adds the rows' choices to the scores.
    __device__ __forceinline__ void read(const CachedLayer &layer) {
        for (u32 expert = threadIdx.x; expert < count; expert += blockDim.x) {
            u32 is_chosen = layer.counts[expert] != layer.last_counts[expert];
            are_chosen[expert] = is_chosen;
            slots[expert] = layer.slots[expert];
            streamed_at[expert] = NO_SLOT;
            scores[expert] = layer.scores[expert] * EXPERT_SCORE_DECAY + (is_chosen ? 1.0f : 0.0f);
        }
        __syncthreads();
    }

    // By a warp: the chosen expert without a slot that has the highest score, or the expert with a
    // slot and not chosen that has the lowest.
    __device__ __forceinline__ ScoredExpert find(bool is_chosen) const {
        ScoredExpert best = {is_chosen ? -INFINITY_F : INFINITY_F, NO_SLOT};
        for (u32 expert = threadIdx.x; expert < count; expert += 32) {
            bool has_slot = slots[expert] != NO_SLOT;
            if ((are_chosen[expert] != 0) != is_chosen || has_slot == is_chosen) continue;
            best = better(best, {scores[expert], expert}, is_chosen);
        }
        for (u32 i = 16; i > 0; i /= 2) {
            ScoredExpert other = {__shfl_xor_sync(~0u, best.score, i), __shfl_xor_sync(~0u, best.expert, i)};
            best = better(best, other, is_chosen);
        }
        return best;
    }

    // By a warp: calls `take(expert, i)` for the first `most` chosen experts without a slot, by their
    // numbers. Returns their count.
    template <class Take> __device__ __forceinline__ u32 first_missed(u32 most, const Take &take) const {
        u32 found = 0;
        for (u32 first = 0; first < count && found < most; first += 32) {
            u32 expert = first + threadIdx.x;
            bool is_missed = expert < count && are_chosen[expert] && slots[expert] == NO_SLOT;
            u32 missed = __ballot_sync(~0u, is_missed), rank = found + __popc(missed & (1u << threadIdx.x) - 1);
            if (is_missed && rank < most) take(expert, rank);
            found += __popc(missed);
        }
        __syncwarp();
        return min(found, most);
    }

    // By a warp: the chosen experts that have a slot, or those that have none.
    __device__ __forceinline__ u32 count_chosen(bool have_slot) const {
        u32 sum = 0;
        for (u32 expert = threadIdx.x; expert < count; expert += 32) {
            sum += are_chosen[expert] && (slots[expert] != NO_SLOT) == have_slot;
        }
        for (u32 i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        return sum;
    }
};

// An expert that gets a slot, and the one that has none any more.
struct Fill {
    u32 expert, slot, evicted;
    bool is_copied; // or already there
};

// The experts of a layer that get slots, and the layer's spare slots afterwards.
struct Fills {
    Fill list[MAX_FILLS];
    u32 count, spares[SPARE_SLOTS];

    // By a warp: an expert takes the slot of the one that is used least if that one is used less.
    // Its tiles are copied, or they are in a spare slot, and the slot of the other is the next spare.
    __device__ __forceinline__ bool add(const Experts &experts, const ScoredExpert &in, u32 *spare) {
        ScoredExpert out = experts.find(false);
        if (!(in.score > out.score) || count == MAX_FILLS) return false;
        __syncwarp();
        if (threadIdx.x == 0) {
            u32 freed = experts.slots[out.expert], slot = spare ? *spare : freed;
            experts.slots[out.expert] = NO_SLOT;
            experts.slots[in.expert] = slot;
            list[count++] = {in.expert, slot, out.expert, !spare};
            if (spare) *spare = freed;
        }
        __syncwarp();
        return true;
    }

    // By a warp: gives slots to chosen experts, to the ones in spare slots first.
    __device__ __forceinline__ void choose(const CachedLayer &layer, const Experts &experts, bool uses_spares,
                                           u32 *missed) {
        if (threadIdx.x < SPARE_SLOTS) spares[threadIdx.x] = layer.spares[threadIdx.x];
        if (threadIdx.x == 0) count = 0;
        __syncwarp();
        auto list_missed = [&](u32 expert, u32 i) { missed[i] = expert; };
        u32 in_spares = uses_spares ? experts.first_missed(SPARE_SLOTS, list_missed) : 0;
        for (u32 i = 0; i < in_spares && spares[i] != NO_SLOT; i++) {
            add(experts, {experts.scores[missed[i]], missed[i]}, spares + i);
        }
        while (add(experts, experts.find(true), 0)) {}
    }
};

// Copies the block's part of an expert's tiles from the host to place `i` of `places`.
DEVICE void copy_tiles(const CachedWeight &weight, u32 expert, u8 *places, u32 i) {
    const uint4 *from = (const uint4 *)weight.host[expert];
    uint4 *to = (uint4 *)(places + i * weight.expert_bytes);
    u32 count = (u32)(weight.expert_bytes / sizeof(uint4)), step = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 4 * step) {
        uint4 parts[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) if (at + k * step < count) parts[k] = from[at + k * step];
#pragma unroll
        for (u32 k = 0; k < 4; k++) if (at + k * step < count) to[at + k * step] = parts[k];
    }
}

// Exchanges the block's part of an expert's tiles in memory of the host with those in the slot it gets.
DEVICE void exchange_tiles(const CachedWeight &weight, const Fill &fill) {
    uint4 *on_host = (uint4 *)weight.host[fill.expert];
    uint4 *slot = (uint4 *)(weight.slots + fill.slot * weight.expert_bytes);
    u32 count = (u32)(weight.expert_bytes / sizeof(uint4)), step = gridDim.x * blockDim.x;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 4 * step) {
        uint4 in[4], out[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) if (at + k * step < count) in[k] = on_host[at + k * step];
#pragma unroll
        for (u32 k = 0; k < 4; k++) if (at + k * step < count) out[k] = slot[at + k * step];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            if (at + k * step < count) slot[at + k * step] = in[k], on_host[at + k * step] = out[k];
        }
    }
}

// Whether a layer's experts stay in the model's file.
DEVICE bool are_in_file(const CachedLayer &layer) { return layer.weights[0].exponent_bytes > 0; }

// Waits for the chosen experts that have neither a slot nor are in memory of the host: a thread of the
// host reads them from the model's file. While it reads some ahead, for those as well, as it takes memory
// from others. Behind the choice, before the update. Grid: one block.
KERNEL request_experts(const __grid_constant__ RequestExperts p) {
    __shared__ u32 now, are_missing;
    const CachedLayer &layer = *p.layer;
    grid_dependency_wait();
    if (threadIdx.x == 0) {
        now = max(p.mailbox[CLOCK] + 1, 1u); // 0 is the time of experts that were never chosen
        p.mailbox[CLOCK] = now;
        are_missing = load_acquire_system(p.mailbox + IS_READING_AHEAD);
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < layer.experts; expert += blockDim.x) {
        if (layer.counts[expert] == layer.last_counts[expert] || layer.slots[expert] != NO_SLOT) continue;
        p.used_at[expert] = now;
        if (load_acquire_system(layer.weights[0].host + expert) == 0) are_missing = 1;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || !are_missing) return;
    p.mailbox[REQUESTED_ROUTING] = p.routing;
    __threadfence_system();
    *(volatile u32 *)(p.mailbox + REQUEST) = now;
    while (load_acquire_system(p.mailbox + ANSWER) != now) {
        if (load_acquire_system(p.mailbox + READER_HAS_ENDED)) return;
        __nanosleep(HOST_NAP);
    }
}

// Copies the block's part of the exponents of chosen experts without a slot, whose tiles have just come
// to the host from the model's file. An expert that is exchanged gets its own to the host.
DEVICE void copy_exponents(const CachedLayer &layer, const Experts &experts, const Fills &fills) {
    for (u32 expert = blockIdx.x; expert < experts.count; expert += gridDim.x) {
        // The last block to end stores the new slots.
        if (!experts.are_chosen[expert] || layer.slots[expert] != NO_SLOT) continue;
        u32 evicted = NO_SLOT;
        for (u32 i = 0; i < fills.count; i++) if (fills.list[i].expert == expert) evicted = fills.list[i].evicted;
        for (u32 i = 0; i < layer.weight_count; i++) {
            const CachedWeight &weight = layer.weights[i];
            u8 *on_host = (u8 *)weight.host[expert] + weight.expert_bytes;
            for (u32 at = threadIdx.x; at < weight.exponent_bytes; at += blockDim.x) {
                u8 exponent = on_host[at];
                if (evicted != NO_SLOT) on_host[at] = weight.exponents[evicted * weight.exponent_bytes + at];
                weight.exponents[expert * weight.exponent_bytes + at] = exponent;
            }
        }
    }
}

// Stores where experts that were exchanged are now in memory of the host. By a block.
DEVICE void store_exchanges(const CachedLayer &layer, const Fills &fills) {
    for (u32 i = threadIdx.x; i < fills.count * layer.weight_count; i += blockDim.x) {
        const CachedWeight &weight = layer.weights[i % layer.weight_count];
        const Fill &fill = fills.list[i / layer.weight_count];
        weight.host[fill.evicted] = weight.host[fill.expert];
        weight.host[fill.expert] = 0;
    }
    __syncthreads();
}

// Stores where matmuls find the experts without a slot. Those in memory of the host may have come there
// just now, or gone. By a block.
DEVICE void store_misses(const CachedLayer &layer, const Experts &experts) {
    for (u32 i = threadIdx.x; i < experts.count * layer.weight_count; i += blockDim.x) {
        const CachedWeight &weight = layer.weights[i / experts.count];
        u32 expert = i % experts.count, streamed = experts.streamed_at[expert];
        if (experts.slots[expert] != NO_SLOT) continue;
        u64 on_device = (u64)(weight.streamed_tiles + streamed * weight.expert_bytes);
        weight.table[expert] = streamed != NO_SLOT ? on_device : weight.host[expert] | ON_HOST;
    }
}

// Updates the caches of some layers whose experts rows have chosen: behind the choice, before
// matmuls read the experts, or at the end of a step. Grid: (any, layers). Each block finds out by
// itself which experts get slots and copies a part of their tiles; the last one to end stores the
// layer's new state, which the others have read by then. It lets no dependent kernel start early: those
// prefetch the tables of addresses before they wait for it.
KERNEL update_expert_cache(const __grid_constant__ UpdateExpertCache p) {
    extern __shared__ __align__(16) float shared[]; // [4, experts]
    __shared__ Fills fills;
    __shared__ u32 missed[SPARE_SLOTS], hits, misses, is_last;
    const CachedLayer &layer = p.layers[blockIdx.y];
    Experts experts(layer.experts, shared);
    grid_dependency_wait();
    experts.read(layer);
    if (threadIdx.x < 32) {
        u32 with_slot = experts.count_chosen(true), without = experts.count_chosen(false);
        if (threadIdx.x == 0) hits = with_slot, misses = without;
        fills.choose(layer, experts, p.uses_spares, missed);
        experts.first_missed(p.most_streamed, [&](u32 expert, u32 i) { experts.streamed_at[expert] = i; });
    }
    __syncthreads();
    // The update behind the choice has been this layer's. What it streamed is gone.
    if (hits + misses == 0) {
        if (blockIdx.x == 0) store_misses(layer, experts);
        return;
    }
    bool in_file = are_in_file(layer);
    for (u32 i = 0; i < fills.count; i++) {
        if (!fills.list[i].is_copied) continue;
        for (u32 j = 0; j < layer.weight_count; j++) {
            if (in_file) exchange_tiles(layer.weights[j], fills.list[i]);
            else copy_tiles(layer.weights[j], fills.list[i].expert, layer.weights[j].slots, fills.list[i].slot);
        }
    }
    for (u32 expert = 0; expert < experts.count; expert++) {
        if (experts.streamed_at[expert] == NO_SLOT) continue;
        for (u32 j = 0; j < layer.weight_count; j++) {
            copy_tiles(layer.weights[j], expert, layer.weights[j].streamed_tiles, experts.streamed_at[expert]);
        }
    }
    if (in_file) copy_exponents(layer, experts, fills);
    if (in_file) __threadfence_system();
    else __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(layer.finished_blocks, 1) + 1 == gridDim.x;
    __syncthreads();
    if (!is_last) return;
    if (in_file) store_exchanges(layer, fills);
    for (u32 expert = threadIdx.x; expert < experts.count; expert += blockDim.x) {
        layer.last_counts[expert] = layer.counts[expert];
        layer.scores[expert] = experts.scores[expert];
        layer.slots[expert] = experts.slots[expert];
    }
    store_misses(layer, experts);
    for (u32 i = threadIdx.x; i < fills.count * layer.weight_count; i += blockDim.x) {
        const CachedWeight &weight = layer.weights[i % layer.weight_count];
        const Fill &fill = fills.list[i / layer.weight_count];
        weight.table[fill.expert] = (u64)(weight.slots + fill.slot * weight.expert_bytes);
    }
    for (u32 i = threadIdx.x; i < SPARE_SLOTS * layer.weight_count; i += blockDim.x) {
        const CachedWeight &weight = layer.weights[i / SPARE_SLOTS];
        u32 spare = fills.spares[i % SPARE_SLOTS];
        layer.spares[i % SPARE_SLOTS] = spare;
        u64 address = (u64)(weight.slots + spare * weight.expert_bytes);
        weight.table[layer.experts + i % SPARE_SLOTS] = spare == NO_SLOT ? 0 : address;
    }
    if (threadIdx.x == 0) {
        layer.counters[0] += hits;
        layer.counters[1] += misses;
        layer.counters[2] += fills.count;
        *layer.finished_blocks = 0;
    }
}
