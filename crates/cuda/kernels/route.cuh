// The choice of experts, as `route` and the persistent kernel make it.
#pragma once
#include "device.cuh"

// The experts' places in shared memory, of which four lanes take four each at once.
DEVICE u32 places(const Route &p) { return (p.experts + 15) & ~15u; }

// Closes all groups but the best ones, by the sums of their two best ranks.
DEVICE void close_groups(const Route &p, u32 lane, float *ranks, float *sums) {
    u32 size = p.experts / p.groups;
#pragma unroll 1
    for (u32 group = lane; group < p.groups; group += 32) {
        float best = -INFINITY_F, second = -INFINITY_F;
#pragma unroll 1
        for (u32 i = 0; i < size; i++) {
            float rank = ranks[group * size + i];
            second = fmaxf(second, fminf(best, rank));
            best = fmaxf(best, rank);
        }
        sums[group] = size > 1 ? best + second : best;
    }
    __syncwarp();
    // A group is open if fewer than `groups_used` come before it.
#pragma unroll 1
    for (u32 expert = lane; expert < p.experts; expert += 32) {
        u32 group = expert / size, before = 0;
#pragma unroll 1
        for (u32 i = 0; i < p.groups; i++) {
            before += sums[i] > sums[group] || (sums[i] == sums[group] && i < group);
        }
        if (before >= p.groups_used) ranks[expert] = -INFINITY_F;
    }
    __syncwarp();
}

// The first threads of a block, a multiple of 32, choose the experts of a row by its scores; `sync` lets them
// wait for each other. `room` has two floats for each place of an expert and each chosen one, and one for each
// group, from an address on that is a multiple of sixteen.
// `tell` is told each choice: its number, the weight, and the expert.
template <class Sync, class Tell>
DEVICE void choose_experts(const Route &p, u32 t, u32 threads, const float *scores, float *room, Sync sync, Tell tell) {
    float *probabilities = room, *ranks = room + places(p), *sums = ranks + places(p), *weights = sums + p.groups;
    u32 *chosen = (u32 *)(weights + p.experts_used);
    if (t < 32) {
        float most = -INFINITY_F, sum = 0.0f;
#pragma unroll 1
        for (u32 i = t; i < p.experts; i += 32) most = fmaxf(most, scores[i]);
        most = warp_max(most);
#pragma unroll 1
        for (u32 i = t; i < p.experts; i += 32) {
            probabilities[i] = expf(scores[i] - most);
            sum += probabilities[i];
        }
        sum = warp_sum(sum);
#pragma unroll 1
        for (u32 i = t; i < p.experts; i += 32) {
            float s = scores[i];
            float y = p.gating == 0 ? probabilities[i] / sum : p.gating == 1 ? sigmoid(s) : s;
            probabilities[i] = y;
            float rank = p.bias ? y + p.bias[i] : y;
            // What is no number comes last.
            ranks[i] = rank == rank ? rank : -INFINITY_F;
        }
        if (p.experts + t < places(p)) ranks[p.experts + t] = -INFINITY_F;
        __syncwarp();
        if (p.groups > 1) close_groups(p, t, ranks, sums);
    }
    sync();
    // An expert's place is how many are better; of equals the first is. Four lanes count.
#pragma unroll 1
    for (u32 first = 0; first < p.experts; first += threads / 4) {
        u32 i = first + t / 4, place = 0;
        float own = i < p.experts ? ranks[i] : 0.0f;
        auto count = [&](float rank, u32 j) { place += (rank > own) | ((rank == own) & (j < i)); };
#pragma unroll 2
        for (u32 j = 4 * (t % 4); j < places(p); j += 16) {
            float4 four = *(const float4 *)(ranks + j);
            count(four.x, j), count(four.y, j + 1), count(four.z, j + 2), count(four.w, j + 3);
        }
        place += __shfl_xor_sync(~0u, place, 1);
        place += __shfl_xor_sync(~0u, place, 2);
        if (t % 4 > 0 || i >= p.experts || place >= p.experts_used) continue;
        weights[place] = probabilities[i];
        chosen[place] = i;
        atomicAdd(p.counts + i, 1);
    }
    sync();
#pragma unroll 1
    for (u32 own = t; own < p.experts_used; own += threads) {
        float total = 0.0f, weight = 0.0f;
#pragma unroll 1
        for (u32 k = 0; k < p.experts_used; k++) {
            float y = p.gating == 2 ? expf(weights[k] - weights[0]) : weights[k];
            total += y;
            if (k == own) weight = y;
        }
        if (p.gating == 2) weight /= total;
        if (p.normalize) weight /= fmaxf(p.gating == 2 ? 1.0f : total, 1.0f / 16384.0f);
        tell(own, weight * p.scale, chosen[own]);
    }
}
