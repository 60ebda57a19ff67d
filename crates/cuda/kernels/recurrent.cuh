// What the kernel of many rows and the persistent kernel need of a token in a delta rule.
#pragma once
#include "device.cuh"

#define RULE_LANES 8u // lanes that share a column of a head's state

// What all columns of a head of up to DIM rows need of a token; zeros behind the last row.
template <u32 DIM> struct __align__(16) RuleToken {
    float q[DIM], k[DIM], decay[DIM], beta;
};

// The sum over the lanes of a column.
DEVICE float column_sum(float x) {
#pragma unroll
    for (u32 i = RULE_LANES / 2; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// A token's inputs for a head, by a warp.
template <u32 DIM> struct LoadedToken {
    float q[DIM / 32], k[DIM / 32], decay[DIM / 32], beta;

    // Loads them from the token's rows; `read` reads a number.
    template <class Read>
    __device__ __forceinline__ void load(const DeltaRule &p, const float *qkv, const float *decays,
                                         const float *betas, u32 head, const Read &read) {
        u32 dim = p.head_dim, key_head = p.is_cyclic ? head % p.key_heads : head / (p.heads / p.key_heads);
        const float *query = qkv + key_head * dim, *key = query + p.key_heads * dim;
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            u32 i = 32 * j + threadIdx.x % 32;
            bool is_in = i < dim;
            q[j] = is_in ? read(query + i) : 0.0f;
            k[j] = is_in ? read(key + i) : 0.0f;
            decay[j] = is_in && p.is_channelwise ? read(decays + head * dim + i) : 0.0f;
        }
        if (!p.is_channelwise) decay[0] = read(decays + head);
        beta = read(betas + head);
    }

    __device__ __forceinline__ void load(const DeltaRule &p, const float *qkv, const float *decays,
                                         const float *betas, u32 head) {
        load(p, qkv, decays, betas, head, [](const float *at) { return *at; });
    }

    // Whether any of them is `like` that.
    template <class Like> __device__ __forceinline__ bool has(const Like &like) const {
        bool found = like(beta);
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) found |= like(q[j]) | like(k[j]) | like(decay[j]);
        return found;
    }

    // Normalises query and key, and computes the decays.
    __device__ __forceinline__ void prepare(const DeltaRule &p, u32 head, RuleToken<DIM> &to) const {
        u32 lane = threadIdx.x % 32, dim = p.head_dim;
        float q_square = 0.0f, k_square = 0.0f;
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            q_square = fmaf(q[j], q[j], q_square);
            k_square = fmaf(k[j], k[j], k_square);
        }
        float q_scale = 1.0f / sqrtf(warp_sum(q_square) + p.eps) / sqrtf((float)dim);
        float k_scale = 1.0f / sqrtf(warp_sum(k_square) + p.eps);
        float a = p.a[head];
        float of_head = p.is_channelwise ? 0.0f : expf(a * softplus(decay[0] + p.dt_bias[head]));
#pragma unroll
        for (u32 j = 0; j < DIM / 32; j++) {
            u32 i = 32 * j + lane;
            if (i >= round_up32(dim)) break;
            bool is_in = i < dim;
            to.q[i] = q[j] * q_scale;
            to.k[i] = k[j] * k_scale;
            float own = of_head;
            if (p.is_channelwise && is_in) own = expf(a * softplus(decay[j] + p.dt_bias[head * dim + i]));
            to.decay[i] = is_in ? own : 0.0f;
        }
        if (lane == 0) to.beta = sigmoid(beta);
    }

    static __device__ __forceinline__ u32 round_up32(u32 x) { return (x + 31) / 32 * 32; }
};
