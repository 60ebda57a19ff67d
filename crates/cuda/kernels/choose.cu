// The choice of the next step's tokens from logits, by rules that are part of the step's numbers.
// The steps of a rule are those of `Chooser` in crates/backend, in the same order of arithmetic.
#include "device.cuh"

#define GROUPS 512u      // of a row's logits, of which only the best are looked at twice
#define MOST_TOKENS 128u // that a rule may draw from
#define LISTED 1024u     // logits that are put in order
#define THREADS GROUPS   // of a block, each of which looks at one peak
#define RULE_NUMBERS 16u
#define FLOAT_MAX 3.402823466e38f

// How a row's tokens are chosen, as `feed.rs` writes it.
struct Rule {
    const u32 *at;

    __device__ __forceinline__ float number(u32 i) const { return __uint_as_float(at[i]); }
    // 0 for the likeliest token.
    __device__ __forceinline__ float temperature() const { return number(0); }
    __device__ __forceinline__ u32 top_k() const { return at[1]; }
    __device__ __forceinline__ float top_p() const { return number(2); }
    __device__ __forceinline__ float min_p() const { return number(3); }
    __device__ __forceinline__ float repeat() const { return number(4); }
    __device__ __forceinline__ float frequency() const { return number(5); }
    __device__ __forceinline__ float presence() const { return number(6); }
    // How many of the latest tokens are penalised, and how many there were before the first step.
    __device__ __forceinline__ u32 window() const { return at[7]; }
    __device__ __forceinline__ u32 latest_count() const { return at[8]; }
    __device__ __forceinline__ u32 bias_count() const { return at[10]; }
    // Where in the feed they are: tokens with room for those that are chosen; tokens and what is
    // added to their logits; numbers from 0 to 2^32 for each step.
    __device__ __forceinline__ u32 latest() const { return at[9]; }
    __device__ __forceinline__ u32 biases() const { return at[11]; }
    __device__ __forceinline__ u32 draws() const { return at[12]; }
};

struct Choose {
    float *logits; // [outputs, stride]
    u32 *feed;     // in which every row is a sequence's only one, and an output
    u64 *peaks;    // [outputs, GROUPS]: the largest logit of each group
    u32 *counts;   // [outputs, 2]: blocks that are done, zero before; steps that have chosen
    u32 *chosen;   // [2, outputs]: memory of the host, for even and odd steps
    u32 stride, width, outputs;
};
static_assert(sizeof(Choose) == 56, "as in parameters.rs");

DEVICE Rule rule_of(const Choose &p, u32 row) { return {p.feed + p.feed[8] + RULE_NUMBERS * row}; }

// Adds biases and penalties to a row's logits; a block for each row.
KERNEL adjust(const __grid_constant__ Choose p) {
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, t = threadIdx.x;
    Rule rule = rule_of(p, row);
    float *logits = p.logits + (u64)row * p.stride;
    const u32 *biases = p.feed + rule.biases();
    for (u32 i = t; i < rule.bias_count(); i += THREADS) {
        u32 token = biases[2 * i];
        if (token < p.width) logits[token] += __uint_as_float(biases[2 * i + 1]);
    }
    __syncthreads();
    u32 known = rule.latest_count() + p.counts[2 * row + 1], count = min(known, rule.window());
    const u32 *latest = p.feed + rule.latest() + known - count;
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

// A logit and its place as one number: the larger logit is the larger number, and the first of
// equals is; what is no number is 0.
DEVICE u64 ranked(float logit, u32 at) {
    u32 bits = __float_as_uint(logit + 0.0f);
    u32 order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return logit != logit ? 0 : (u64)order << 32 | ~at;
}

DEVICE u32 token_of(u64 rank) { return rank ? ~(u32)rank : 0; }

// The logit of a rank.
DEVICE float logit_of(u64 rank) {
    u32 order = (u32)(rank >> 32);
    return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

DEVICE u64 warp_most(u64 most) {
    for (int i = 16; i > 0; i >>= 1) most = max(most, __shfl_xor_sync(~0u, most, i));
    return most;
}

// The sum over all threads of a block; everybody gets it.
DEVICE u32 block_count(u32 count) {
    __shared__ u32 warps[THREADS / 32];
    count = __reduce_add_sync(~0u, count);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = count;
    __syncthreads();
    u32 sum = 0;
    for (u32 i = 0; i < THREADS / 32; i++) sum += warps[i];
    return sum;
}

// The largest rank that `k` ranks reach, by bits from the top; a smaller one that exactly `k` reach
// will do. `reached` says how many of a thread's ranks reach one; 0 if there are not `k`.
template <class Reached> DEVICE u64 bound(u32 k, Reached reached) {
    u64 found = 0;
    for (int bit = 63; bit >= 0; bit--) {
        u64 tried = found | 1ull << bit;
        u32 count = block_count(reached(tried));
        if (count >= k) found = tried;
        if (count == k) break;
    }
    return found;
}

// Groups of a row's logits.
struct Open {
    const float *logits;
    const u32 *groups;
    u32 count, len, width;

    // Shows a thread's share of the ranks of all logits; a warp takes a group.
    template <class See> __device__ __forceinline__ void each(See see) const {
        for (u32 i = threadIdx.x / 32; i < count; i += THREADS / 32) {
            u32 end = min((groups[i] + 1) * len, width);
            for (u32 first = groups[i] * len + threadIdx.x % 32; first < end; first += 32 * 8) {
                float eight[8];
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    u32 at = first + 32 * j;
                    eight[j] = at < end ? __ldcg(logits + at) : 0.0f;
                }
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    u32 at = first + 32 * j;
                    if (at < end) see(ranked(eight[j], at));
                }
            }
        }
    }
};

// The best `k` logits of a row or, where there are not as many, all: their ranks, in order. Only
// groups that have one of the best `k` peaks can have one of them. Returns how many there are.
DEVICE u32 best(const Choose &p, u32 row, u32 k, u64 *sorted) {
    __shared__ u64 listed[LISTED];
    __shared__ u32 groups[GROUPS], group_count, count;
    u32 t = threadIdx.x, len = (p.width + GROUPS - 1) / GROUPS;
    u64 peak = __ldcg(p.peaks + row * GROUPS + t);
    u64 floor = max(1ull, bound(k, [&](u64 rank) { return (u32)(peak >= rank); }));
    if (t == 0) group_count = count = 0;
    __syncthreads();
    if (peak >= floor) groups[atomicAdd(&group_count, 1)] = t;
    __syncthreads();
    Open open = {p.logits + (u64)row * p.stride, groups, group_count, len, p.width};
    auto list = [&](u64 rank) {
        if (rank < floor) return;
        u32 at = atomicAdd(&count, 1);
        if (at < LISTED) listed[at] = rank;
    };
    open.each(list);
    __syncthreads();
    if (count > LISTED) {
        // Rare: the best are crowded in few groups.
        floor = bound(k, [&](u64 rank) {
            u32 reached = 0;
            open.each([&](u64 other) { reached += other >= rank; });
            return reached;
        });
        __syncthreads();
        if (t == 0) count = 0;
        __syncthreads();
        open.each(list);
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
    __shared__ float sum;
    u32 t = threadIdx.x;
    float most = fminf(c.logits[0], FLOAT_MAX);
    __syncthreads();
    if (t < c.count) c.shares[t] = expf(fminf(c.logits[t], FLOAT_MAX) - most);
    __syncthreads();
    if (t == 0) {
        sum = 0.0f;
        for (u32 i = 0; i < c.count; i++) sum += c.shares[i];
    }
    __syncthreads();
    if (t < c.count) c.shares[t] /= sum;
    __syncthreads();
}

// Which of the sorted candidates is drawn.
DEVICE u32 draw(Candidates &c, const Rule &rule, u32 number) {
    __shared__ u32 drawn;
    u32 t = threadIdx.x;
    if (rule.top_p() < 1.0f) {
        softmax(c);
        if (t == 0) {
            float sum = 0.0f;
            u32 kept = 0;
            while (kept < c.count && sum < rule.top_p()) sum += c.shares[kept++];
            c.count = max(kept, 1);
        }
        __syncthreads();
    }
    if (rule.min_p() > 0.0f) {
        float floor = c.logits[0] + logf(rule.min_p());
        u32 kept = block_count(t < c.count && c.logits[t] >= floor);
        if (t == 0) c.count = max(kept, 1);
        __syncthreads();
    }
    if (t < c.count) c.logits[t] /= rule.temperature();
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
    u32 token_at = p.feed[2] + row, position_at = p.feed[3] + row, start_at = p.feed[6] + 5 * row + 2;
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
    if (t % 32 == 0) p.peaks[row * GROUPS + group] = most;
    __threadfence();
    __syncthreads();
    u32 *counts = p.counts + 2 * row;
    if (t == 0) is_last = atomicAdd(counts, 1) + 1 == gridDim.x;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    u32 step = counts[1];
    u64 taken;
    if (!draws) {
        u64 peak = warp_most(__ldcg(p.peaks + row * GROUPS + t));
        if (t % 32 == 0) sorted[t / 32] = peak;
        __syncthreads();
        taken = sorted[0];
        for (u32 i = 1; i < THREADS / 32; i++) taken = max(taken, sorted[i]);
    } else {
        u32 count = best(p, row, rule.top_k(), sorted);
        if (t < count) candidates.logits[t] = logit_of(sorted[t]);
        if (t == 0) candidates.count = count;
        __syncthreads();
        u32 drawn = count > 0 ? draw(candidates, rule, p.feed[rule.draws() + step]) : 0;
        taken = count > 0 ? sorted[drawn] : 0;
    }
    if (t > 0) return;
    u32 token = token_of(taken);
    p.chosen[step % 2 * p.outputs + row] = token;
    u32 position = p.feed[position_at], start = p.feed[start_at];
    p.feed[token_at] = token;
    p.feed[position_at] = position + 1;
    p.feed[start_at] = start + 1;
    if (is_listed) p.feed[latest + step] = token;
    counts[0] = 0;
    counts[1] = step + 1;
    __threadfence_system();
}
