// A column of a delta rule's state, as the kernel of many rows and the persistent kernel take it
// through tokens.
#pragma once
#include "device.cuh"

#define RULE_LANES 8u                          // lanes that share a column of a head's state
#define RULE_TOKENS 8u                         // tokens that are prepared together: a warp for each

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

// A column of a head's state, by eight lanes: a lane has rows 32 j + 4 lane to 32 j + 4 lane + 3.
template <u32 DIM> struct RuleColumn {
    static const u32 QUADS = DIM / RULE_LANES / 4;
    u32 head, column, lane, place; // place: in the result
    u32 value_at, quads;
    bool exists;
    float s[QUADS][4];

    __device__ __forceinline__ RuleColumn(const DeltaRule &p, u32 head, u32 column)
        : head(head), column(column), lane(threadIdx.x % RULE_LANES), exists(column < p.head_dim) {
        place = head * p.head_dim + column;
        value_at = 2 * p.key_heads * p.head_dim + place;
        quads = (p.head_dim + 31) / 32;
    }

    __device__ __forceinline__ float *state(const DeltaRule &p, u32 slot) const {
        return p.states + (((u64)slot * p.heads + head) * p.head_dim + column) * p.head_dim;
    }

    __device__ __forceinline__ void load_state(const DeltaRule &p, u32 slot, bool is_new) {
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                u32 row = 32 * j + 4 * lane + c;
                s[j][c] = exists && !is_new && row < p.head_dim ? state(p, slot)[row] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void store_state(const DeltaRule &p, u32 slot) const {
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                u32 row = 32 * j + 4 * lane + c;
                if (exists && row < p.head_dim) state(p, slot)[row] = s[j][c];
            }
        }
    }

    // The column's element of v.
    __device__ __forceinline__ float value(const DeltaRule &p, const float *qkv) const { return qkv[value_at]; }

    // Takes the column through a token. Returns the lane's part of the result.
    __device__ __forceinline__ float step(const RuleToken<DIM> &token, float v) {
        float seen[4] = {}, y[4] = {};
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            if (j >= quads) break;
            float4 k = ((const float4 *)token.k)[8 * j + lane], decay = ((const float4 *)token.decay)[8 * j + lane];
            const float of_k[4] = {k.x, k.y, k.z, k.w}, of_decay[4] = {decay.x, decay.y, decay.z, decay.w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                s[j][c] *= of_decay[c];
                seen[c] = fmaf(s[j][c], of_k[c], seen[c]);
            }
        }
        float delta = token.beta * (v - column_sum((seen[0] + seen[1]) + (seen[2] + seen[3])));
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            if (j >= quads) break;
            float4 k = ((const float4 *)token.k)[8 * j + lane], q = ((const float4 *)token.q)[8 * j + lane];
            const float of_k[4] = {k.x, k.y, k.z, k.w}, of_q[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                s[j][c] = fmaf(of_k[c], delta, s[j][c]);
                y[c] = fmaf(s[j][c], of_q[c], y[c]);
            }
        }
        return (y[0] + y[1]) + (y[2] + y[3]);
    }

    __device__ __forceinline__ bool stores() const { return exists && lane == 0; }
};
