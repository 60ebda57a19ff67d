// Sampling: parameters, logits as sortable ranks, and groups of logits.
#pragma once
#include "device.cuh"

#define LISTED 1024u     // ranks that fit the list in shared memory
#define THREADS LOGIT_GROUPS   // of a block: one for each group
#define FLOAT_MAX 3.402823466e38f

// Sampling parameters of a row, as the host writes them to the step metadata.
struct SamplingParams {
    const u32 *at;

    __device__ __forceinline__ float number(u32 i) const { return __uint_as_float(at[i]); }
    // 0 selects the argmax.
    __device__ __forceinline__ float temperature() const { return number(0); }
    __device__ __forceinline__ u32 top_k() const { return at[1]; }
    __device__ __forceinline__ float top_p() const { return number(2); }
    __device__ __forceinline__ float min_p() const { return number(3); }
    __device__ __forceinline__ float repeat() const { return number(4); }
    __device__ __forceinline__ float frequency() const { return number(5); }
    __device__ __forceinline__ float presence() const { return number(6); }
    // The penalty window, and the tokens in the list before the first step.
    __device__ __forceinline__ u32 window() const { return at[7]; }
    __device__ __forceinline__ u32 latest_count() const { return at[8]; }
    __device__ __forceinline__ u32 bias_count() const { return at[10]; }
    // Offsets in the step metadata: latest tokens, with space for sampled ones; biases (token,
    // bias); random numbers from 0 to 2^32, one a step.
    __device__ __forceinline__ u32 latest() const { return at[9]; }
    __device__ __forceinline__ u32 biases() const { return at[11]; }
    __device__ __forceinline__ u32 draws() const { return at[12]; }
};

DEVICE SamplingParams sampling_params(const Sample &p, u32 row) {
    return {p.metadata + p.metadata[8] + SAMPLING_WORDS * row};
}

// Maps a float to an unsigned integer of the same order.
DEVICE u32 order_of(float logit) {
    u32 bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A logit and its token id as one rank: larger logits have larger ranks, ties go to the lower id,
// and NaN is 0.
DEVICE u64 rank_of(float logit, u32 at) { return logit != logit ? 0 : (u64)order_of(logit) << 32 | ~at; }

// Likewise, but NaN has the largest rank, so that a maximum shows it.
DEVICE u64 rank_or_nan(float logit, u32 at) { return logit != logit ? ~0ull : rank_of(logit, at); }

// A logit minus the largest, divided by the temperature. Infinities are clamped.
DEVICE float tempered(float logit, float max_logit, float temperature) {
    return (fminf(logit, FLOAT_MAX) - fminf(max_logit, FLOAT_MAX)) / temperature;
}

// The lower bound of the ranks of a logit.
DEVICE u64 least_rank(float logit) { return (u64)order_of(logit) << 32; }

// The lower bound of the ranks of possible tokens: minus infinity marks an impossible one.
DEVICE u64 least_possible() { return least_rank(-FLOAT_MAX); }

DEVICE u32 token_of(u64 rank) { return rank ? ~(u32)rank : 0; }

DEVICE float logit_of(u64 rank) {
    u32 order = (u32)(rank >> 32);
    return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}

DEVICE u64 warp_max_rank(u64 max_logit) {
    for (int i = 16; i > 0; i >>= 1) max_logit = max(max_logit, __shfl_xor_sync(~0u, max_logit, i));
    return max_logit;
}

DEVICE u32 warp_total(u32 x) { return __reduce_add_sync(~0u, x); }
DEVICE double warp_total(double x) {
    for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// Sum over all threads of a block; every thread gets it.
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

// Some groups of a row's logits.
struct LogitGroups {
    const float *logits;
    const u32 *groups; // their indices, or none: all groups
    const u64 *peaks;  // group maxima, or none: no group is skipped
    u32 count, len, width;

    // Passes a thread's share of the ranks >= `least`, and maybe smaller ones, to `see`; a warp
    // takes a group.
    template <class See> __device__ __forceinline__ void each(u64 least, See see) const { each(least, 0, count, see); }

    // Likewise for the groups with indices in [from, to).
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
                    if (at < end) see(rank_of(eight[j], at));
                }
            }
        }
    }
};
