// Top-k routing, shared by the `route` kernel and the persistent kernel.
#pragma once
#include "device.cuh"

// The experts' count rounded up to 16: four lanes read four ranks each at once.
DEVICE u32 padded_experts(const Route &p) { return (p.experts + 15) & ~15u; }

// Masks all expert groups but the best ones, ranked by the sums of their two best experts.
DEVICE void mask_groups(const Route &p, u32 lane, float *ranks, float *group_scores) {
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
        group_scores[group] = size > 1 ? best + second : best;
    }
    __syncwarp();
    // A group stays if fewer than `groups_used` groups rank before it.
#pragma unroll 1
    for (u32 expert = lane; expert < p.experts; expert += 32) {
        u32 group = expert / size, before = 0;
#pragma unroll 1
        for (u32 i = 0; i < p.groups; i++) {
            before += group_scores[i] > group_scores[group] || (group_scores[i] == group_scores[group] && i < group);
        }
        if (before >= p.groups_used) ranks[expert] = -INFINITY_F;
    }
    __syncwarp();
}

// The probabilities of a row's experts from their scores, by a warp.
DEVICE void find_probabilities(const Route &p, u32 lane, const float *scores, float *probabilities) {
    float max_score = -INFINITY_F, sum = 0.0f;
#pragma unroll 1
    for (u32 i = lane; i < p.experts; i += 32) max_score = fmaxf(max_score, scores[i]);
    max_score = warp_max(max_score);
#pragma unroll 1
    for (u32 i = lane; i < p.experts; i += 32) {
        probabilities[i] = expf(scores[i] - max_score);
        sum += probabilities[i];
    }
    sum = warp_sum(sum);
#pragma unroll 1
    for (u32 i = lane; i < p.experts; i += 32) {
        float s = scores[i];
        switch (p.gating) {
        case 0: s = probabilities[i] / sum; break;
        case 1: s = sigmoid(s); break;
        case 3: s = sqrtf(softplus(s)); break;
        }
        probabilities[i] = s;
    }
}

// Turns the probabilities of the chosen experts to weights. `store` receives each choice.
template <class Store>
DEVICE void weigh_experts(const Route &p, u32 t, u32 threads, const float *weights, const u32 *chosen, Store store) {
#pragma unroll 1
    for (u32 self = t; self < p.experts_used; self += threads) {
        float total = 0.0f, weight = 0.0f;
#pragma unroll 1
        for (u32 k = 0; k < p.experts_used; k++) {
            float y = p.gating == 2 ? expf(weights[k] - weights[0]) : weights[k];
            total += y;
            if (k == self) weight = y;
        }
        if (p.gating == 2) weight /= total;
        if (p.normalize) weight /= fmaxf(p.gating == 2 ? 1.0f : total, 1.0f / 16384.0f);
        store(self, weight * p.scale, chosen[self]);
    }
}

// Chooses a row's experts from its scores with the first `threads` threads of a block, a multiple
// of 32; `sync` is their barrier. `workspace` (16-byte aligned) holds two floats for each padded
// and each chosen expert, and one for each group. `store` receives each choice: its index, its
// weight, and the expert's id.
template <class Sync, class Store>
DEVICE void choose_experts(const Route &p, u32 t, u32 threads, const float *scores, float *workspace,
    Sync sync, Store store) {
    float *probabilities = workspace, *ranks = workspace + padded_experts(p),
        *group_scores = ranks + padded_experts(p), *weights = group_scores + p.groups;
    u32 *chosen = (u32 *)(weights + p.experts_used);
    if (t < 32) {
        find_probabilities(p, t, scores, probabilities);
#pragma unroll 1
        for (u32 i = t; i < p.experts; i += 32) {
            float y = probabilities[i];
            float rank = p.bias ? y + p.bias[i] : y;
            // NaN ranks last.
            ranks[i] = rank == rank ? rank : -INFINITY_F;
        }
        if (p.experts + t < padded_experts(p)) ranks[p.experts + t] = -INFINITY_F;
        __syncwarp();
        if (p.groups > 1) mask_groups(p, t, ranks, group_scores);
    }
    sync();
    // An expert's place is the count of better ones; ties go to the lower id. Four lanes count
    // together.
#pragma unroll 1
    for (u32 first = 0; first < p.experts; first += threads / 4) {
        u32 i = first + t / 4, position = 0;
        float self = i < p.experts ? ranks[i] : 0.0f;
        auto count = [&](float rank, u32 j) { position += (rank > self) | ((rank == self) & (j < i)); };
#pragma unroll 2
        for (u32 j = 4 * (t % 4); j < padded_experts(p); j += 16) {
            float4 four = *(const float4 *)(ranks + j);
            count(four.x, j), count(four.y, j + 1), count(four.z, j + 2), count(four.w, j + 3);
        }
        position += __shfl_xor_sync(~0u, position, 1);
        position += __shfl_xor_sync(~0u, position, 2);
        if (t % 4 > 0 || i >= p.experts || position >= p.experts_used) continue;
        weights[position] = probabilities[i];
        chosen[position] = i;
        atomicAdd(p.counts + i, 1);
    }
    sync();
    weigh_experts(p, t, threads, weights, chosen, store);
}
