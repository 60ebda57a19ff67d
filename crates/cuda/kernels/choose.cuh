// What choices of tokens share: their rules, logits as ranks, and groups of logits.
#pragma once
#include "device.cuh"

#define GROUPS 512u      // of a row's logits
#define LISTED 1024u     // logits that are kept in shared memory
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

DEVICE Rule rule_of(const Choose &p, u32 row) { return {p.metadata + p.metadata[8] + RULE_NUMBERS * row}; }

// The place of a logit among all floats, as a number.
DEVICE u32 order_of(float logit) {
    u32 bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A logit and its place as one number: the larger logit is the larger number, and the first of
// equals is; what is no number is 0.
DEVICE u64 ranked(float logit, u32 at) { return logit != logit ? 0 : (u64)order_of(logit) << 32 | ~at; }

// What is left of a logit below the best, at a temperature. An infinite one leaves nothing for the others.
DEVICE float heated(float logit, float most, float temperature) {
    return (fminf(logit, FLOAT_MAX) - fminf(most, FLOAT_MAX)) / temperature;
}

// No rank of such a logit is less.
DEVICE u64 least_rank(float logit) { return (u64)order_of(logit) << 32; }

// Nor that of a token that is possible: minus infinity says that one is not.
DEVICE u64 least_possible() { return least_rank(-FLOAT_MAX); }

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

DEVICE u32 warp_total(u32 x) { return __reduce_add_sync(~0u, x); }
DEVICE double warp_total(double x) {
    for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// The sum over all threads of a block; everybody gets it.
template <class T> DEVICE T block_total(T x) {
    __shared__ T warps[THREADS / 32];
    x = warp_total(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (u32 i = 0; i < THREADS / 32; i++) sum += warps[i];
    return sum;
}

// Groups of a row's logits.
struct Open {
    const float *logits;
    const u32 *groups; // their numbers, or none: all
    const u64 *peaks;  // of all, or none: then each group has something to show
    u32 count, len, width;

    // Shows a thread's share of the ranks from `least` on, and maybe others; a warp takes a group.
    template <class See> __device__ __forceinline__ void each(u64 least, See see) const { each(least, 0, count, see); }

    // The same of some of the groups: from place `from` up to `to`.
    template <class See> __device__ __forceinline__ void each(u64 least, u32 from, u32 to, See see) const {
        for (u32 i = from + threadIdx.x / 32; i < to; i += THREADS / 32) {
            u32 group = groups ? groups[i] : i, end = min((group + 1) * len, width);
            if (peaks && peaks[group] < least) continue;
            for (u32 first = group * len + threadIdx.x % 32; first < end; first += 32 * 8) {
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
