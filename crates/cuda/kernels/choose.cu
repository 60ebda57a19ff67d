// The choice of the next step's tokens from logits, by rules that are part of the step's numbers.
// The steps of a rule are those of `Chooser` in crates/backend, of up to 128 candidates in the same order of
// arithmetic.
#include "draw_all.cuh"

#define MOST_TOKENS 128u // that are put in order

// Adds biases and penalties to a row's logits; a block for each row.
KERNEL adjust(const __grid_constant__ Choose p) {
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, t = threadIdx.x;
    Rule rule = rule_of(p, row);
    float *logits = p.logits + (u64)row * p.stride;
    const u32 *biases = p.metadata + rule.biases();
    for (u32 i = t; i < rule.bias_count(); i += THREADS) {
        u32 token = biases[2 * i];
        if (token < p.width) logits[token] += __uint_as_float(biases[2 * i + 1]);
    }
    __syncthreads();
    u32 known = rule.latest_count() + p.counts[2 * row + 1], count = min(known, rule.window());
    const u32 *latest = p.metadata + rule.latest() + known - count;
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
        logit = logit <= 0.0f ? logit * rule.repeat() : logit / rule.repeat();
        logits[token] = logit - ((float)times * rule.frequency() + rule.presence());
    }
}

// The largest rank that `k` ranks reach, by bits from the top; a smaller one that exactly `k` reach
// will do. `reached` says how many of a thread's ranks reach one; 0 if there are not `k`.
template <class Reached> DEVICE u64 bound(u32 k, Reached reached) {
    u64 found = 0;
    for (int bit = 63; bit >= 0; bit--) {
        u64 tried = found | 1ull << bit;
        u32 count = block_total(reached(tried));
        if (count >= k) found = tried;
        if (count == k) break;
    }
    return found;
}

// The best `k` logits of a row or, where there are not as many, all: their ranks, in order. Only
// groups that have one of the best `k` peaks can have one of them. Returns how many there are.
DEVICE u32 best(const Choose &p, u32 row, u32 k, u64 *sorted) {
    __shared__ u64 listed[LISTED];
    __shared__ u32 groups[GROUPS], group_count, count;
    u32 t = threadIdx.x, len = (p.width + GROUPS - 1) / GROUPS;
    u64 peak = __ldcg(p.group_max + row * GROUPS + t);
    u64 floor = max(least_possible(), bound(k, [&](u64 rank) { return (u32)(peak >= rank); }));
    if (t == 0) group_count = count = 0;
    __syncthreads();
    if (peak >= floor) groups[atomicAdd(&group_count, 1)] = t;
    __syncthreads();
    Open open = {p.logits + (u64)row * p.stride, groups, 0, group_count, len, p.width};
    auto list = [&](u64 rank) {
        if (rank < floor) return;
        u32 at = atomicAdd(&count, 1);
        if (at < LISTED) listed[at] = rank;
    };
    open.each(floor, list);
    __syncthreads();
    if (count > LISTED) {
        // Rare: the best are crowded in few groups.
        floor = max(floor, bound(k, [&](u64 rank) {
            u32 reached = 0;
            open.each(rank, [&](u64 other) { reached += other >= rank; });
            return reached;
        }));
        __syncthreads();
        if (t == 0) count = 0;
        __syncthreads();
        open.each(floor, list);
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

// The candidates of a draw, the best first.
struct Candidates {
    float logits[MOST_TOKENS];
    float shares[MOST_TOKENS];
    u32 count;
};

// Makes shares of logits.
DEVICE void softmax(Candidates &c) {
    __shared__ double sum;
    u32 t = threadIdx.x;
    if (t < c.count) c.shares[t] = expf(heated(c.logits[t], c.logits[0], 1.0f));
    __syncthreads();
    if (t == 0) {
        sum = 0.0;
        for (u32 i = 0; i < c.count; i++) sum += (double)c.shares[i];
    }
    __syncthreads();
    if (t < c.count) c.shares[t] = (float)((double)c.shares[t] / sum);
    __syncthreads();
}

// Which of the sorted candidates is drawn.
DEVICE u32 draw(Candidates &c, const Rule &rule, u32 number) {
    __shared__ u32 drawn;
    u32 t = threadIdx.x;
    if (rule.top_p() < 1.0f) {
        softmax(c);
        if (t == 0) {
            double sum = 0.0;
            u32 kept = 0;
            while (kept < c.count && sum < (double)rule.top_p()) sum += (double)c.shares[kept++];
            c.count = max(kept, 1);
        }
        __syncthreads();
    }
    if (rule.min_p() > 0.0f) {
        float floor = c.logits[0] + logf(rule.min_p());
        u32 kept = block_total((u32)(t < c.count && c.logits[t] >= floor));
        if (t == 0) c.count = max(kept, 1);
        __syncthreads();
    }
    float most = c.logits[0];
    __syncthreads();
    if (t < c.count) c.logits[t] = heated(c.logits[t], most, rule.temperature());
    __syncthreads();
    softmax(c);
    if (t == 0) {
        double sum = 0.0, target = (double)number / 4294967296.0;
        // Rounding may leave the sum just below 1; the last possible one is then meant.
        u32 found = 0;
        for (u32 i = 0; i < c.count; i++) {
            sum += (double)c.shares[i];
            if (c.shares[i] > 0.0f) found = i;
            if (sum > target) break;
        }
        drawn = found;
    }
    __syncthreads();
    return drawn;
}

// Every row's choice becomes the next step's token, at the next position. A warp finds the peak of
// a group of a row's logits; the last block of a row does the rest.
KERNEL __launch_bounds__(THREADS, 1) choose(const __grid_constant__ Choose p) {
    __shared__ u64 sorted[MOST_TOKENS];
    __shared__ Candidates candidates;
    __shared__ bool is_last;
    let_next_start();
    u32 t = threadIdx.x, row = blockIdx.y;
    // What no kernel changes is read before the logits are there.
    Rule rule = rule_of(p, row);
    bool draws = rule.temperature() > 0.0f, is_listed = rule.window() > 0;
    u32 latest = rule.latest() + rule.latest_count();
    u32 token_at = p.metadata[2] + row, position_at = p.metadata[3] + row, start_at = p.metadata[6] + 5 * row + 2;
    wait_for_inputs();
    u32 group = blockIdx.x * (THREADS / 32) + t / 32;
    u32 len = (p.width + GROUPS - 1) / GROUPS, first = group * len;
    u32 end = min(first + len, p.width);
    const float *logits = p.logits + (u64)row * p.stride;
    u64 most = 0;
    for (u32 i = first + t % 32; i < end; i += 32 * 8) {
        float eight[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) eight[j] = i + 32 * j < end ? logits[i + 32 * j] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            if (i + 32 * j < end) most = max(most, ranked(eight[j], i + 32 * j));
        }
    }
    most = warp_most(most);
    if (t % 32 == 0) p.group_max[row * GROUPS + group] = most;
    __threadfence();
    __syncthreads();
    u32 *counts = p.counts + 2 * row;
    if (t == 0) is_last = atomicAdd(counts, 1) + 1 == gridDim.x;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    u32 step = counts[1];
    u32 token = 0;
    if (draws && rule.top_k() > 0 && rule.top_k() <= min(MOST_TOKENS, p.width - 1)) {
        u32 count = best(p, row, rule.top_k(), sorted);
        if (t < count) candidates.logits[t] = logit_of(sorted[t]);
        if (t == 0) candidates.count = count;
        __syncthreads();
        if (count > 0) token = token_of(sorted[draw(candidates, rule, p.metadata[rule.draws() + step])]);
    } else {
        u64 peak = warp_most(__ldcg(p.group_max + row * GROUPS + t));
        if (t % 32 == 0) sorted[t / 32] = peak;
        __syncthreads();
        peak = sorted[0];
        for (u32 i = 1; i < THREADS / 32; i++) peak = max(peak, sorted[i]);
        token = draws ? draw_all(p, row, rule, peak, p.metadata[rule.draws() + step]) : token_of(peak);
    }
    if (t > 0) return;
    p.sampled[step % 2 * p.outputs + row] = token;
    u32 position = p.metadata[position_at], start = p.metadata[start_at];
    p.metadata[token_at] = token;
    p.metadata[position_at] = position + 1;
    p.metadata[start_at] = start + 1;
    if (is_listed) p.metadata[latest + step] = token;
    counts[0] = 0;
    counts[1] = step + 1;
    __threadfence_system();
}
