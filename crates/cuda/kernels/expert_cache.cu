// The cache of experts on the device. The tiles of all experts are in memory of the host, where
// matmuls can read them; those of some experts are also in slots on the device. Between two steps,
// experts that are used more take the slots of those that are used less. A table of addresses tells
// matmuls where an expert's tiles are, so the cache changes no result.
#include "device.cuh"

// An expert and its score. Of equal scores the lower expert counts, so that runs repeat.
struct ScoredExpert {
    float score;
    u32 expert;
};

DEVICE ScoredExpert better(const ScoredExpert &a, const ScoredExpert &b, bool wants_highest) {
    bool is_b = wants_highest ? b.score > a.score : b.score < a.score;
    return is_b || (b.score == a.score && b.expert < a.expert) ? b : a;
}

// The highest score of experts without a slot, or the lowest of those with one, by a warp.
DEVICE ScoredExpert find_expert(const CachedLayer &layer, bool has_slot) {
    ScoredExpert best = {has_slot ? INFINITY_F : -INFINITY_F, NO_SLOT};
    for (u32 expert = threadIdx.x; expert < layer.experts; expert += 32) {
        ScoredExpert self = {layer.scores[expert], expert};
        if ((layer.slots[expert] != NO_SLOT) == has_slot) best = better(best, self, !has_slot);
    }
    for (u32 i = 16; i > 0; i /= 2) {
        ScoredExpert other = {__shfl_xor_sync(~0u, best.score, i), __shfl_xor_sync(~0u, best.expert, i)};
        best = better(best, other, !has_slot);
    }
    return best;
}

// Adds a step to the scores, and counts its experts.
DEVICE void add_step(const CachedLayer &layer) {
    u32 hits = 0, misses = 0;
    for (u32 expert = threadIdx.x; expert < layer.experts; expert += 32) {
        u32 count = layer.counts[expert];
        bool is_chosen = count != layer.last_counts[expert], is_cached = layer.slots[expert] != NO_SLOT;
        layer.last_counts[expert] = count;
        layer.scores[expert] = layer.scores[expert] * EXPERT_SCORE_DECAY + (is_chosen ? 1.0f : 0.0f);
        hits += is_chosen && is_cached;
        misses += is_chosen && !is_cached;
    }
    for (u32 i = 16; i > 0; i /= 2) {
        hits += __shfl_xor_sync(~0u, hits, i);
        misses += __shfl_xor_sync(~0u, misses, i);
    }
    if (threadIdx.x == 0) {
        layer.counters[0] += hits;
        layer.counters[1] += misses;
    }
    __syncwarp();
}

// Gives slots to experts with higher scores than those that have them. Grid: one warp for each layer.
KERNEL update_expert_cache(const __grid_constant__ UpdateExpertCache p) {
    const CachedLayer &layer = p.layers[blockIdx.x];
    grid_dependency_wait();
    add_step(layer);
    u32 fills = 0;
    for (; fills < MAX_FILLS; fills++) {
        ScoredExpert in = find_expert(layer, false), out = find_expert(layer, true);
        if (!(in.score > out.score)) break;
        if (threadIdx.x == 0) {
            u32 slot = layer.slots[out.expert];
            layer.slots[out.expert] = NO_SLOT;
            layer.slots[in.expert] = slot;
            layer.fills[fills] = in.expert;
            for (u32 i = 0; i < layer.weight_count; i++) {
                const CachedWeight &weight = layer.weights[i];
                weight.table[out.expert] = (u64)(weight.host + out.expert * weight.expert_bytes);
                weight.table[in.expert] = (u64)(weight.slots + slot * weight.expert_bytes);
            }
        }
        __syncwarp();
    }
    if (threadIdx.x == 0) {
        layer.counters[2] += fills;
        layer.counters[3] = fills;
    }
}

// Copies the experts that have new slots from the host. Grid: (any, layers). The next step's kernels
// start when all blocks have ended.
KERNEL fill_expert_cache(const __grid_constant__ UpdateExpertCache p) {
    const CachedLayer &layer = p.layers[blockIdx.y];
    grid_dependency_wait();
    u32 fills = (u32)layer.counters[3];
    for (u32 i = 0; i < fills; i++) {
        u32 expert = layer.fills[i];
        for (u32 j = 0; j < layer.weight_count; j++) {
            const CachedWeight &weight = layer.weights[j];
            const uint4 *from = (const uint4 *)(weight.host + expert * weight.expert_bytes);
            uint4 *to = (uint4 *)(weight.slots + layer.slots[expert] * weight.expert_bytes);
            u32 count = (u32)(weight.expert_bytes / sizeof(uint4)), step = gridDim.x * blockDim.x;
            for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += 4 * step) {
                uint4 parts[4];
#pragma unroll
                for (u32 k = 0; k < 4; k++) if (at + k * step < count) parts[k] = from[at + k * step];
#pragma unroll
                for (u32 k = 0; k < 4; k++) if (at + k * step < count) to[at + k * step] = parts[k];
            }
        }
    }
}
