// Sampling without sorting, for more candidates than `sample_sorted` takes. Filters keep the
// candidates above a rank. That rank, and the sampled token, are where a cumulative weight reaches
// a target: found by bisection over bits, in passes over the groups that can matter, until the rest
// fits a list.
#pragma once
#include "sampling.cuh"

// Weight of a token: its probability at a temperature, relative to the best one's; 1 at temperature
// 0.
struct TokenWeights {
    float max_logit, temperature;

    __device__ __forceinline__ double operator()(u64 rank) const {
        return temperature == 0.0f ? 1.0 : (double)expf(tempered(logit_of(rank), max_logit, temperature));
    }
};

// Candidates above a rank, ordered by rank or by token id; larger keys come first.
struct CandidateOrder {
    LogitGroups groups_of_row;
    u64 floor, peak; // ranks
    bool by_rank;

    __device__ __forceinline__ u64 key(u64 rank) const { return by_rank ? rank : (u32)rank; }
    __device__ __forceinline__ u64 low() const { return by_rank ? floor : ~(groups_of_row.width - 1); }
    __device__ __forceinline__ u64 high() const { return by_rank ? peak : ~0u; }

    // Calls `see` with a thread's share of the candidates with keys in [first, end).
    template <class See> __device__ __forceinline__ void each(u64 first, u64 end, See see) const {
        auto show = [&](u64 rank) {
            if (rank >= floor && key(rank) >= first && key(rank) < end) see(rank);
        };
        if (by_rank) return groups_of_row.each(max(floor, first), show);
        // Keys are inverted token ids, so the groups in question are contiguous.
        u32 from = end > ~0u ? 0 : ~(u32)(end - 1) / groups_of_row.len;
        u32 to = min(~(u32)first / groups_of_row.len, groups_of_row.count - 1) + 1;
        groups_of_row.each(floor, from, to, show);
    }
};

// The total weight of the candidates.
DEVICE double total(const CandidateOrder &order, const TokenWeights &weights) {
    double sum = 0.0;
    order.each(0, ~0ull, [&](u64 rank) { sum += weights(rank); });
    return block_total(sum);
}

// The largest key such that candidates from it on weigh at least `least` together; if all weigh
// less, a key at or below all of theirs.
DEVICE u64 threshold(const CandidateOrder &order, const TokenWeights &weights, double least) {
    __shared__ u64 listed[LISTED];
    __shared__ u32 count;
    // The key lies in [found, end), which holds at most `left` candidates; those from `end` on
    // weigh `above`.
    u64 high = order.high();
    int bit = 63 - __clzll(order.low() ^ high | 1);
    u64 found = high & ~((2ull << bit) - 1), end = high + 1;
    u32 left = order.groups_of_row.width;
    double above = 0.0;
    bool is_listed = false;
    for (; bit >= 0; bit--) {
        u64 tried = found | 1ull << bit;
        if (tried >= end) continue;
        if (!is_listed && left <= LISTED) {
            __syncthreads();
            if (threadIdx.x == 0) count = 0;
            __syncthreads();
            order.each(found, end, [&](u64 rank) { listed[atomicAdd(&count, 1)] = rank; });
            __syncthreads();
            is_listed = true;
        }
        double sum = 0.0;
        u32 visible = 0;
        auto see = [&](u64 rank) {
            sum += weights(rank);
            visible++;
        };
        if (is_listed) {
            for (u32 i = threadIdx.x; i < count; i += THREADS) {
                u64 key = order.key(listed[i]);
                if (key >= tried && key < end) see(listed[i]);
            }
        } else {
            order.each(tried, end, see);
        }
        sum = block_total(sum);
        visible = block_total(visible);
        if (above + sum >= least) {
            found = tried;
            left = visible;
        } else {
            end = tried;
            left -= visible;
            above += sum;
        }
    }
    return found;
}

// The next larger double of a non-negative one.
DEVICE double next_above(double x) { return __longlong_as_double(__double_as_longlong(x) + 1); }

// Samples a token of a row whose best rank is `peak`. Candidates are ordered by token id until a
// filter orders them by rank, as in the host's sampler.
DEVICE u32 sample_unsorted(const Sample &p, u32 row, const SamplingParams &params, u64 peak, u32 number) {
    if (peak < least_possible()) return 0;
    float max_logit = logit_of(peak);
    __shared__ u64 peaks[LOGIT_GROUPS];
    peaks[threadIdx.x] = __ldcg(p.group_max + row * LOGIT_GROUPS + threadIdx.x);
    __syncthreads();
    u32 len = (p.width + LOGIT_GROUPS - 1) / LOGIT_GROUPS;
    LogitGroups groups_of_row = {p.logits + (u64)row * p.stride, 0, peaks, LOGIT_GROUPS, len, p.width};
    CandidateOrder order = {groups_of_row, least_possible(), peak, false};
    auto keep_best = [&](const TokenWeights &weights, double least) {
        order.by_rank = true;
        order.floor = max(order.floor, threshold(order, weights, least));
    };
    if (params.top_k() > 0 && params.top_k() < p.width) keep_best({max_logit, 0.0f}, (double)params.top_k());
    if (params.top_p() < 1.0f) {
        TokenWeights weights = {max_logit, 1.0f};
        keep_best(weights, (double)params.top_p() * total(order, weights));
    }
    if (params.min_p() > 0.0f) order.floor = max(order.floor, least_rank(max_logit + logf(params.min_p())));
    order.floor = min(order.floor, peak);
    TokenWeights weights = {max_logit, params.temperature()};
    double target = (double)number / 4294967296.0 * total(order, weights);
    return token_of(threshold(order, weights, next_above(target)));
}
