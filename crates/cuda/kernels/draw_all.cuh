// Draws from tokens that are too many to be put in order. What a rule leaves of them is said by the least rank
// that stays. That one, and the token that is drawn, is where weights reach a sum: it is found by bits, in passes
// over the groups of logits that have any of it, until what is left can be listed.
#pragma once
#include "choose.cuh"

// What tokens weigh: their probability at a temperature over the best one's; at 0 one each.
struct TokenWeights {
    float most, temperature;

    __device__ __forceinline__ double operator()(u64 rank) const {
        return temperature == 0.0f ? 1.0 : (double)expf(heated(logit_of(rank), most, temperature));
    }
};

// Tokens from some rank on, in a line: by their ranks, or by their numbers, the first one with the largest key.
struct Line {
    Open open;
    u64 floor, peak; // ranks
    bool by_rank;

    __device__ __forceinline__ u64 key(u64 rank) const { return by_rank ? rank : (u32)rank; }
    __device__ __forceinline__ u64 low() const { return by_rank ? floor : ~(open.width - 1); }
    __device__ __forceinline__ u64 high() const { return by_rank ? peak : ~0u; }

    // Shows a thread's share of the tokens whose keys are from `first` on and below `end`.
    template <class See> __device__ __forceinline__ void each(u64 first, u64 end, See see) const {
        auto show = [&](u64 rank) {
            if (rank >= floor && key(rank) >= first && key(rank) < end) see(rank);
        };
        if (by_rank) return open.each(max(floor, first), show);
        // Numbers are bits of keys turned over, so that those in question lie in groups side by side.
        u32 from = end > ~0u ? 0 : ~(u32)(end - 1) / open.len;
        u32 to = min(~(u32)first / open.len, open.count - 1) + 1;
        open.each(floor, from, to, show);
    }
};

// What all tokens of a line weigh.
DEVICE double total(const Line &line, const TokenWeights &weights) {
    double sum = 0.0;
    line.each(0, ~0ull, [&](u64 rank) { sum += weights(rank); });
    return block_total(sum);
}

// The largest key from which on tokens weigh `least` together. If all weigh less, no token's, but none above theirs.
DEVICE u64 reach(const Line &line, const TokenWeights &weights, double least) {
    __shared__ u64 listed[LISTED];
    __shared__ u32 count;
    // It lies from `found` on and below `end`, where `left` tokens are at most; those from there on weigh `above`.
    u64 high = line.high();
    int bit = 63 - __clzll(line.low() ^ high | 1);
    u64 found = high & ~((2ull << bit) - 1), end = high + 1;
    u32 left = line.open.width;
    double above = 0.0;
    bool is_listed = false;
    for (; bit >= 0; bit--) {
        u64 tried = found | 1ull << bit;
        if (tried >= end) continue;
        if (!is_listed && left <= LISTED) {
            __syncthreads();
            if (threadIdx.x == 0) count = 0;
            __syncthreads();
            line.each(found, end, [&](u64 rank) { listed[atomicAdd(&count, 1)] = rank; });
            __syncthreads();
            is_listed = true;
        }
        double sum = 0.0;
        u32 seen = 0;
        auto see = [&](u64 rank) {
            sum += weights(rank);
            seen++;
        };
        if (is_listed) {
            for (u32 i = threadIdx.x; i < count; i += THREADS) {
                u64 key = line.key(listed[i]);
                if (key >= tried && key < end) see(listed[i]);
            }
        } else {
            line.each(tried, end, see);
        }
        sum = block_total(sum);
        seen = block_total(seen);
        if (above + sum >= least) {
            found = tried;
            left = seen;
        } else {
            end = tried;
            left -= seen;
            above += sum;
        }
    }
    return found;
}

// The least number above one that is not negative.
DEVICE double next_above(double x) { return __longlong_as_double(__double_as_longlong(x) + 1); }

// The token that a rule draws, of a row whose best rank is `peak`. Until they are put in order tokens stand in line
// by their numbers, as in `Candidates`.
DEVICE u32 draw_all(const Choose &p, u32 row, const Rule &rule, u64 peak, u32 number) {
    if (peak < least_possible()) return 0;
    float most = logit_of(peak);
    __shared__ u64 peaks[GROUPS];
    peaks[threadIdx.x] = __ldcg(p.group_max + row * GROUPS + threadIdx.x);
    __syncthreads();
    u32 len = (p.width + GROUPS - 1) / GROUPS;
    Open open = {p.logits + (u64)row * p.stride, 0, peaks, GROUPS, len, p.width};
    Line line = {open, least_possible(), peak, false};
    auto keep_best = [&](const TokenWeights &weights, double least) {
        line.by_rank = true;
        line.floor = max(line.floor, reach(line, weights, least));
    };
    if (rule.top_k() > 0 && rule.top_k() < p.width) keep_best({most, 0.0f}, (double)rule.top_k());
    if (rule.top_p() < 1.0f) {
        TokenWeights weights = {most, 1.0f};
        keep_best(weights, (double)rule.top_p() * total(line, weights));
    }
    if (rule.min_p() > 0.0f) line.floor = max(line.floor, least_rank(most + logf(rule.min_p())));
    line.floor = min(line.floor, peak);
    TokenWeights weights = {most, rule.temperature()};
    double target = (double)number / 4294967296.0 * total(line, weights);
    return token_of(reach(line, weights, next_above(target)));
}
