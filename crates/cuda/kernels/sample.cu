// Sampling of the next step's tokens. The steps are those of the host's sampler; with up to 128
// candidates, in the same order of arithmetic.
#include "sample_unsorted.cuh"

#define MAX_TOKENS 128u // candidates that are sorted, at most

// Applies biases and penalties to a row's logits. Grid: outputs.
KERNEL apply_penalties(const __grid_constant__ Sample p) {
    launch_dependents();
    grid_dependency_wait();
    u32 row = blockIdx.x, t = threadIdx.x;
    SamplingParams params = sampling_params(p, row);
    float *logits = p.logits + (u64)row * p.stride;
    const u32 *biases = p.metadata + params.biases();
    for (u32 i = t; i < params.bias_count(); i += THREADS) {
        u32 token = biases[2 * i];
        if (token < p.width) logits[token] += __uint_as_float(biases[2 * i + 1]);
    }
    __syncthreads();
    u32 known = params.latest_count() + p.counts[2 * row + 1], count = min(known, params.window());
    const u32 *latest = p.metadata + params.latest() + known - count;
    for (u32 i = t; i < count; i += THREADS) {
        u32 token = latest[i], times = 0;
        bool is_first = token < p.width;
        for (u32 j = 0; j < count; j++) {
            bool is_same = latest[j] == token;
            times += is_same;
            if (is_same && j < i) is_first = false;
        }
        if (!is_first) continue;
        float logit = logits[token];
        logit = logit <= 0.0f ? logit * params.repeat() : logit / params.repeat();
        logits[token] = logit - ((float)times * params.frequency() + params.presence());
    }
}

// The largest rank that `k` ranks reach, by bisection over bits; a smaller bound that exactly `k`
// reach is as good. `reached` counts a thread's ranks that reach a bound. 0 if there are fewer than
// `k`.
template <class Reached> DEVICE u64 kth_rank_bound(u32 k, Reached reached) {
    u64 found = 0;
    for (int bit = 63; bit >= 0; bit--) {
        u64 tried = found | 1ull << bit;
        u32 count = block_total(reached(tried));
        if (count >= k) found = tried;
        if (count == k) break;
    }
    return found;
}

// The sorted ranks of a row's top k logits, or of all if there are fewer; returns their count. Only
// groups whose maximum is among the top k group maxima can hold one.
DEVICE u32 top_k_ranks(const Sample &p, u32 row, u32 k, u64 *sorted) {
    __shared__ u64 listed[LISTED];
    __shared__ u32 groups[LOGIT_GROUPS], group_count, count;
    u32 t = threadIdx.x, len = (p.width + LOGIT_GROUPS - 1) / LOGIT_GROUPS;
    u64 peak = __ldcg(p.group_max + row * LOGIT_GROUPS + t);
    u64 floor = max(least_possible(), kth_rank_bound(k, [&](u64 rank) { return (u32)(peak >= rank); }));
    if (t == 0) group_count = count = 0;
    __syncthreads();
    if (peak >= floor) groups[atomicAdd(&group_count, 1)] = t;
    __syncthreads();
    LogitGroups groups_of_row = {p.logits + (u64)row * p.stride, groups, 0, group_count, len, p.width};
    auto append = [&](u64 rank) {
        if (rank < floor) return;
        u32 at = atomicAdd(&count, 1);
        if (at < LISTED) listed[at] = rank;
    };
    groups_of_row.each(floor, append);
    __syncthreads();
    if (count > LISTED) {
        // Rare: the top k are concentrated in few groups.
        floor = max(floor, kth_rank_bound(k, [&](u64 rank) {
            u32 reached = 0;
            groups_of_row.each(rank, [&](u64 other) { reached += other >= rank; });
            return reached;
        }));
        __syncthreads();
        if (t == 0) count = 0;
        __syncthreads();
        groups_of_row.each(floor, append);
        __syncthreads();
    }
    u32 found = count;
    for (u32 i = t; i < found; i += THREADS) {
        u32 before = 0;
        for (u32 j = 0; j < found; j++) before += listed[j] > listed[i];
        if (before < k) sorted[before] = listed[i];
    }
    __syncthreads();
    return min(found, k);
}

// Sorted candidates, the best first.
struct Candidates {
    float logits[MAX_TOKENS];
    float probabilities[MAX_TOKENS];
    u32 count;
};

// Softmax over the candidates, summed in f64.
DEVICE void softmax(Candidates &c) {
    __shared__ double sum;
    u32 t = threadIdx.x;
    if (t < c.count) c.probabilities[t] = expf(tempered(c.logits[t], c.logits[0], 1.0f));
    __syncthreads();
    if (t == 0) {
        sum = 0.0;
        for (u32 i = 0; i < c.count; i++) sum += (double)c.probabilities[i];
    }
    __syncthreads();
    if (t < c.count) c.probabilities[t] = (float)((double)c.probabilities[t] / sum);
    __syncthreads();
}

// Samples an index among the sorted candidates.
DEVICE u32 sample_sorted(Candidates &c, const SamplingParams &params, u32 number) {
    __shared__ u32 drawn;
    u32 t = threadIdx.x;
    if (params.top_p() < 1.0f) {
        softmax(c);
        if (t == 0) {
            double sum = 0.0;
            u32 kept = 0;
            while (kept < c.count && sum < (double)params.top_p()) sum += (double)c.probabilities[kept++];
            c.count = max(kept, 1);
        }
        __syncthreads();
    }
    if (params.min_p() > 0.0f) {
        float floor = c.logits[0] + logf(params.min_p());
        u32 kept = block_total((u32)(t < c.count && c.logits[t] >= floor));
        if (t == 0) c.count = max(kept, 1);
        __syncthreads();
    }
    float max_logit = c.logits[0];
    __syncthreads();
    if (t < c.count) c.logits[t] = tempered(c.logits[t], max_logit, params.temperature());
    __syncthreads();
    softmax(c);
    if (t == 0) {
        double sum = 0.0, target = (double)number / 4294967296.0;
        // Rounding may leave the sum just below 1: then the last possible candidate is meant.
        u32 found = 0;
        for (u32 i = 0; i < c.count; i++) {
            sum += (double)c.probabilities[i];
            if (c.probabilities[i] > 0.0f) found = i;
            if (sum > target) break;
        }
        drawn = found;
    }
    __syncthreads();
    return drawn;
}

// Samples every row's token, and writes it to the step metadata as the next step's token at the
// next position. A warp finds the maximum of a group of logits; the last block of a row samples.
// Grid: (blocks of groups, outputs). Bound by reading the logits.
KERNEL __launch_bounds__(THREADS, 1) sample(const __grid_constant__ Sample p) {
    __shared__ u64 sorted[MAX_TOKENS];
    __shared__ Candidates candidates;
    __shared__ bool is_last;
    launch_dependents();
    u32 t = threadIdx.x, row = blockIdx.y;
    // Sampling parameters are constant during the step, and read before the logits arrive.
    SamplingParams params = sampling_params(p, row);
    bool draws = params.temperature() > 0.0f, is_listed = params.window() > 0;
    u32 latest = params.latest() + params.latest_count();
    u32 token_at = p.metadata[2] + row, position_at = p.metadata[3] + row, start_at = p.metadata[6] + 5 * row + 2;
    grid_dependency_wait();
    u32 group = blockIdx.x * (THREADS / 32) + t / 32;
    u32 len = (p.width + LOGIT_GROUPS - 1) / LOGIT_GROUPS, first = group * len;
    u32 end = min(first + len, p.width);
    const float *logits = p.logits + (u64)row * p.stride;
    u64 max_rank = 0;
    for (u32 i = first + t % 32; i < end; i += 32 * 8) {
        float eight[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) eight[j] = i + 32 * j < end ? logits[i + 32 * j] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            if (i + 32 * j < end) max_rank = max(max_rank, rank_or_nan(eight[j], i + 32 * j));
        }
    }
    max_rank = warp_max_rank(max_rank);
    if (t % 32 == 0) p.group_max[row * LOGIT_GROUPS + group] = max_rank;
    __threadfence();
    __syncthreads();
    u32 *counts = p.counts + 2 * row;
    if (t == 0) is_last = atomicAdd(counts, 1) + 1 == gridDim.x;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    u64 peak = warp_max_rank(__ldcg(p.group_max + row * LOGIT_GROUPS + t));
    if (t % 32 == 0) sorted[t / 32] = peak;
    __syncthreads();
    peak = sorted[0];
    for (u32 i = 1; i < THREADS / 32; i++) peak = max(peak, sorted[i]);
    __syncthreads();
    // Biases may make every token impossible.
    bool is_finite = peak < least_rank(INFINITY_F) && (peak >= least_possible() || params.bias_count() > 0);
    u32 step = counts[1];
    u32 token = 0;
    if (!is_finite) {
        // No token.
    } else if (draws && params.top_k() > 0 && params.top_k() <= min(MAX_TOKENS, p.width - 1)) {
        u32 count = top_k_ranks(p, row, params.top_k(), sorted);
        if (t < count) candidates.logits[t] = logit_of(sorted[t]);
        if (t == 0) candidates.count = count;
        __syncthreads();
        if (count > 0) token = token_of(sorted[sample_sorted(candidates, params, p.metadata[params.draws() + step])]);
    } else {
        token = draws ? sample_unsorted(p, row, params, peak, p.metadata[params.draws() + step]) : token_of(peak);
    }
    if (t > 0) return;
    p.sampled[step % 2 * p.outputs + row] = is_finite ? token : NO_TOKEN;
    u32 position = p.metadata[position_at], start = p.metadata[start_at];
    p.metadata[token_at] = token;
    p.metadata[position_at] = position + 1;
    p.metadata[start_at] = start + 1;
    if (is_listed) p.metadata[latest + step] = token;
    counts[0] = 0;
    counts[1] = step + 1;
    __threadfence_system();
}
