// A token's inputs of the gated delta rule, for the kernel of many tokens (recurrent.cu) and the
// persistent kernel (persistent_recurrent.cuh).
#pragma once
#include "device.cuh"

#define RULE_LANES 8u // lanes that share a column, a value channel, of a head's state

// What all columns of a head need of a token; a row of the state is a key channel. Elements from
// `head_dim` to the next multiple of 32 are zero; those behind them are set by nobody.
template <u32 DIM> struct __align__(16) RuleToken {
    float q[DIM], k[DIM], decay[DIM], beta;
};

// The sum over the lanes of a column.
DEVICE float column_sum(float x) {
#pragma unroll
    for (u32 i = RULE_LANES / 2; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// A token's inputs for a head in the registers of a warp: lane i has the elements i, i + 32 and so
// on. The decay and beta are projections, before their activation; without decays by channel
// `decay_logit[0]` is the head's, in every lane.
template <u32 DIM> struct LoadedToken {
    float q[DIM / 32], k[DIM / 32], decay_logit[DIM / 32], beta_logit;

    // Loads them from the token's rows; `read` reads a number.
    template <class Read>
    __device__ __forceinline__ void load(const DeltaRule &p, const float *qkv, const float *decay_logits,
                                         const float *beta_logits, u32 value_head, const Read &read) {
        u32 dim = p.head_dim, key_head = p.is_cyclic ? value_head % p.key_heads : value_head / (p.heads / p.key_heads);
        const float *query = qkv + key_head * dim, *key = query + p.key_heads * dim;
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            u32 i = 32 * j + threadIdx.x % 32;
            bool is_in = i < dim;
            q[j] = is_in ? read(query + i) : 0.0f;
            k[j] = is_in ? read(key + i) : 0.0f;
            decay_logit[j] = is_in && p.is_channelwise ? read(decay_logits + value_head * dim + i) : 0.0f;
        }
        if (!p.is_channelwise) decay_logit[0] = read(decay_logits + value_head);
        beta_logit = read(beta_logits + value_head);
    }

    __device__ __forceinline__ void load(const DeltaRule &p, const float *qkv, const float *decay_logits,
                                         const float *beta_logits, u32 value_head) {
        load(p, qkv, decay_logits, beta_logits, value_head, [](const float *at) { return *at; });
    }

    // Whether the predicate holds for any of them.
    template <class Predicate> __device__ __forceinline__ bool any(const Predicate &predicate) const {
        bool found = predicate(beta_logit);
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) found |= predicate(q[j]) | predicate(k[j]) | predicate(decay_logit[j]);
        return found;
    }

    // L2-normalises query and key, the query times 1 / sqrt(head_dim); the decay is exp(a *
    // softplus(decay_logit + dt_bias)), beta is sigmoid(beta_logit).
    __device__ __forceinline__ void prepare(const DeltaRule &p, u32 value_head, RuleToken<DIM> &to) const {
        u32 lane = threadIdx.x % 32, dim = p.head_dim;
        float q_square = 0.0f, k_square = 0.0f;
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            q_square = fmaf(q[j], q[j], q_square);
            k_square = fmaf(k[j], k[j], k_square);
        }
        float q_scale = 1.0f / sqrtf(warp_sum(q_square) + p.eps) / sqrtf((float)dim);
        float k_scale = 1.0f / sqrtf(warp_sum(k_square) + p.eps);
        float a = p.a[value_head];
        float head_decay = p.is_channelwise ? 0.0f : expf(a * softplus(decay_logit[0] + p.dt_bias[value_head]));
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            u32 i = 32 * j + lane;
            if (i >= round_up32(dim)) break;
            bool is_in = i < dim;
            to.q[i] = q[j] * q_scale;
            to.k[i] = k[j] * k_scale;
            float element_decay = head_decay;
            if (p.is_channelwise && is_in) {
                element_decay = expf(a * softplus(decay_logit[j] + p.dt_bias[value_head * dim + i]));
            }
            to.decay[i] = is_in ? element_decay : 0.0f;
        }
        if (lane == 0) to.beta = sigmoid(beta_logit);
    }

    static __device__ __forceinline__ u32 round_up32(u32 x) { return (x + 31) / 32 * 32; }
};
