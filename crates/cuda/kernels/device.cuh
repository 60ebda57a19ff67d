// What all kernels share: step metadata, asynchronous copies, f16 conversion, sentinels,
// reductions.
//
// A row must have the same bits whichever kernel computes it. So the files are compiled without
// contraction of products and sums: a fused multiply-add is written where it is wanted.
#pragma once
#include "parameters.cuh"

// Matmul inputs are f16, scaled by 1/16: their range is then a million, and numbers down to a
// thousandth keep all their bits.
#define HALF_MAX 65504.0f
#define HALF_NAN ((u16)0x7fff)
#define INFINITY_F __int_as_float(0x7f800000)

// Optimisation barrier: returns the same number, but the compiler cannot move or merge what depends
// on it.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Undefined register contents, for operands that no result depends on.
DEVICE uint4 undefined_registers() {
    uint4 v;
    asm("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
    return v;
}

// Waits until the previous kernel in the stream has finished (programmatic dependent launch). A
// kernel may start earlier and fetch what no kernel writes, such as weights.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream start once all blocks have called this.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether kernels store matmul inputs in the order of `gemm_wgmma`, where their stride says so.
#ifndef STORES_SWIZZLED
#define STORES_SWIZZLED true
#endif

// Where a half is in the layout of wgmma's shared-memory operand: panels of rows, in each all chunks,
// in each the rows, of eight 16-byte pieces. A thread of an `mma` has four columns of each 16; step s
// reads those in pieces 2 s and 2 s + 1. Pieces are swizzled by row (128-byte swizzle), so that they
// share no bank.
DEVICE u64 swizzled_at(u32 chunks, u32 panel_rows, u32 row, u32 column) {
    u64 place = ((u64)(row / panel_rows) * chunks + column / CHUNK_COLS) * panel_rows + row % panel_rows;
    u32 of_thread = column % CHUNK_COLS / 16, piece = column % 16 / 2 ^ row % 8;
    return place * CHUNK_COLS + 8 * piece + 2 * of_thread + column % 2;
}

// Where a half of a matmul input is.
DEVICE u64 half_at(u32 stride, u32 row, u32 column) {
    bool is_swizzled = STORES_SWIZZLED && stride & SWIZZLED;
    if (is_swizzled) return swizzled_at((stride & ~SWIZZLED) / CHUNK_COLS, PANEL_ROWS, row, column);
    return (u64)row * stride + column;
}

// Step metadata: one array of u32 that begins with the offset of each of its parts.
struct StepMetadata {
    const u32 *at;

    __device__ __forceinline__ u32 rows() const { return at[0]; }
    __device__ __forceinline__ u32 spans() const { return at[1]; }
    // Token id of a row.
    __device__ __forceinline__ u32 token(u32 row) const { return at[at[2] + row]; }
    // Position of a row in its sequence.
    __device__ __forceinline__ u32 position(u32 row) const { return at[at[3] + row]; }
    // The span of a row.
    __device__ __forceinline__ u32 span(u32 row) const { return at[at[4] + row]; }
    // The row whose logits are output `i`.
    __device__ __forceinline__ u32 output(u32 i) const { return at[at[5] + i]; }
    // Of a span: first row, rows, first position, state slot, and whether it is prefill.
    __device__ __forceinline__ u32 first(u32 span) const { return at[at[6] + 5 * span]; }
    __device__ __forceinline__ u32 len(u32 span) const { return at[at[6] + 5 * span + 1]; }
    __device__ __forceinline__ u32 start(u32 span) const { return at[at[6] + 5 * span + 2]; }
    __device__ __forceinline__ u32 state_slot(u32 span) const { return at[at[6] + 5 * span + 3]; }
    __device__ __forceinline__ bool is_prompt(u32 span) const { return at[at[6] + 5 * span + 4] != 0; }
    // The index of a row's first partial result of a KV split, or NO_PARTIALS.
    __device__ __forceinline__ u32 first_partial(u32 row) const { return at[at[9] + row]; }
    // A span's page table for a window, indexed by page of positions. Pages that left the window
    // are missing at its start.
    __device__ __forceinline__ const u32 *pages(u32 window, u32 span) const {
        const u32 *table = at + at[7] + 2 * (window * spans() + span);
        return at + (int)(table[1] - table[0]);
    }
};

// Copies sixteen bytes to shared memory asynchronously.
DEVICE void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies four bytes, or eight, likewise.
DEVICE void copy_async4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_async8(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Loads four floats from shared memory. Inline assembly makes the PTX deterministic: the compiler
// merges plain loads in an order that depends on its own addresses.
DEVICE float4 load_shared(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
    return x;
}

// Loads four 8x8 matrices of halves; each lane gives the address of one matrix row.
DEVICE uint4 ldmatrix_x4(u32 at) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

// f16 values, as bits.

DEVICE float from_half(u32 bits) {
    float x;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(bits));
    return x;
}

// Rounds two numbers to f16; the first goes to the lower bits.
DEVICE u32 half_pair(float a, float b) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
    return bits;
}

// Large numbers fit; NaN and infinities become NaN, so that errors can tell where they began.
DEVICE float clamp_half(float x) { return fmaf(x, 0.0f, fminf(fmaxf(x, -HALF_MAX), HALF_MAX)); }

DEVICE u16 to_half(float x) { return (u16)half_pair(clamp_half(x), 0.0f); }

// Scales a matmul input: clamped in f32, or rounded to f16.
DEVICE float as_input(float x) { return clamp_half(x * INPUT_SCALE); }
DEVICE u16 to_input(float x) { return to_half(x * INPUT_SCALE); }

DEVICE float2 from_half_pair(u32 bits) {
    return make_float2(from_half(bits & 0xffff), from_half(bits >> 16));
}

// The power of two of an E8M0 byte, which is the exponent of a float.
DEVICE float power_of_two(u32 exponent) { return __uint_as_float(exponent << 23); }
#define ONE_EXPONENT 127u // of one

DEVICE u32 half_mul(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE u32 half_fma(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// Dataflow by sentinels. Blocks of the persistent kernel poll each other's results. A value that is
// not yet written holds the sentinel: all ones, a NaN that no store writes. Halves are never
// infinite or NaN, and stored NaN floats have other bits. Each number is read and written whole, so
// relaxed accesses suffice; only reused memory needs a fence (`AwaitedPartials`).

#define SENTINEL 0xffffffffu

DEVICE void store_relaxed(float *to, float x) {
    u32 bits = __float_as_uint(x);
    if (bits == SENTINEL) bits = 0x7fffffffu;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

DEVICE void store_relaxed(u16 *to, u16 half) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(half) : "memory");
}

// The same in the memory of another device, whose blocks poll it there: stores and loads go to that
// device's L2 cache.
DEVICE void store_relaxed_system(float *to, float x) {
    u32 bits = __float_as_uint(x);
    if (bits == SENTINEL) bits = 0x7fffffffu;
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

DEVICE void store_relaxed_system(u16 *to, u16 half) {
    asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(to), "h"(half) : "memory");
}

// What another device or the host has stored, with all that it stored before.
DEVICE u32 load_acquire_system(const u32 *at) {
    u32 x;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

DEVICE u64 load_acquire_system(const u64 *at) {
    u64 x;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

DEVICE u32 load_relaxed(const float *at) {
    u32 bits;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
    return bits;
}

DEVICE uint4 load_relaxed(const uint4 *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// Overflows into bit 15 of each half that holds the sentinel's all-ones exponent; written halves
// leave that bit 0.
DEVICE u32 exponent_overflow(u32 pair) { return (pair & 0x7c007c00u) + 0x04000400u; }

// Whether no element is a sentinel. Branch-free: mostly all are written, and all have to be checked
// then.
DEVICE bool is_written(const uint4 &v, bool are_halves) {
    if (are_halves) {
        u32 beyond = exponent_overflow(v.x) | exponent_overflow(v.y) | exponent_overflow(v.z) | exponent_overflow(v.w);
        return (beyond & 0x80008000u) == 0;
    }
    return (v.x != SENTINEL) & (v.y != SENTINEL) & (v.z != SENTINEL) & (v.w != SENTINEL);
}

// Loads N vectors of sixteen bytes, `step` apart, with zeros from index `end` on, and polls until
// none holds a sentinel. All missing vectors are loaded again together, to pay the memory latency
// once.
template <bool HALVES, int N> DEVICE void poll_all(const uint4 *from, u32 step, u32 end, uint4 (&x)[N]) {
#pragma unroll
    for (u32 j = 0; j < N; j++) x[j] = j * step < end ? load_relaxed(from + j * step) : make_uint4(0, 0, 0, 0);
    bool are_there = false;
#pragma unroll 1
    while (!are_there) {
        are_there = true;
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            if (is_written(x[j], HALVES)) continue;
            are_there = false;
            x[j] = load_relaxed(from + j * step);
        }
    }
}

// Named barrier 1, of the first `BLOCK` threads of a block.
template <u32 BLOCK> DEVICE void sync() { asm volatile("bar.sync 1, %0;" ::"n"(BLOCK) : "memory"); }

// Named barrier of a team of warps.
DEVICE void team_sync(u32 barrier, u32 warps) {
    if (warps == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(32 * warps) : "memory");
    }
}

// Address in shared memory.
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Reductions in a fixed order.

DEVICE float warp_sum(float x) {
    for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

DEVICE float warp_max(float x) {
    for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// Sums N <= 32 numbers of each lane over the lanes of a warp, in the order of `warp_sum`: lane i gets
// the `i % N`th sum in x[0]. N is a power of two.
template <u32 N> DEVICE void sum_of_each(float (&x)[N]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 half = 16; half > 0; half /= 2) {
        bool is_upper = lane & half;
#pragma unroll
        for (u32 t = 0; t < N; t++) {
            if (half >= N) x[t] += __shfl_xor_sync(~0u, x[t], half);
            if (half >= N || t >= half) continue;
            float own = is_upper ? x[t + half] : x[t], other = is_upper ? x[t] : x[t + half];
            x[t] = own + __shfl_xor_sync(~0u, other, half);
        }
    }
}

// Sum over the threads of a block (up to 1024); every thread gets it. `scratch` holds 32 floats.
DEVICE float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    if (blockDim.x <= 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) sum += scratch[i];
    return sum;
}

DEVICE float4 as_floats(const uint4 &v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

DEVICE float add_squares(const float4 &x, float sum) {
    return fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
}

// A thread's part of a row's sum of squares, four neighbours at a time. The number of threads
// decides the order of the sum.
DEVICE float sum_squares(const float *x, u32 n, u32 thread, u32 threads) {
    float square = 0.0f;
    bool is_whole = n % 4 == 0 && (u64)x % 16 == 0;
    for (u32 first = 4 * thread; first < n; first += 8 * threads) {
        float4 two[2];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 i = first + 4 * j * threads;
            if (is_whole) {
                two[j] = i < n ? *(const float4 *)(x + i) : make_float4(0, 0, 0, 0);
            } else {
                two[j].x = i < n ? x[i] : 0.0f;
                two[j].y = i + 1 < n ? x[i + 1] : 0.0f;
                two[j].z = i + 2 < n ? x[i + 2] : 0.0f;
                two[j].w = i + 3 < n ? x[i + 3] : 0.0f;
            }
        }
#pragma unroll
        for (u32 j = 0; j < 2; j++) square = add_squares(two[j], square);
    }
    return square;
}

// The factor of an RMS norm, from the sum of squares and the inverse element count, which a caller
// can compute before the sum arrives.
DEVICE float rms_factor(float sum, float one_of, float eps) { return rsqrtf(sum * one_of + eps); }

// The RMS factor of a row. Each thread does the work of PARTS, so that blocks of different sizes sum
// in the same order. `scratch` holds a float for each warp and part.
template <u32 PARTS> DEVICE float rms_scale(const float *x, u32 n, float eps, float *scratch) {
    u32 t = threadIdx.x, warps = blockDim.x / 32;
    for (u32 i = 0; i < PARTS; i++) {
        float square = warp_sum(sum_squares(x, n, t + i * blockDim.x, PARTS * blockDim.x));
        if (t % 32 == 0) scratch[t / 32 + i * warps] = square;
    }
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < PARTS * warps; i++) sum += scratch[i];
    return rms_factor(sum, 1.0f / (float)n, eps);
}

// RoPE: element `at` of a head, rotated by its row's angles. Elements beyond the rotary pairs are
// unchanged. `read` reads an element.
template <class Read>
DEVICE float rope_element(const float *head, u32 at, const float2 *angles, u32 pairs, u32 is_neox,
                          const Read &read) {
    float y = read(head + at);
    if (at >= 2 * pairs) return y;
    bool is_second = is_neox ? at >= pairs : at % 2 == 1;
    u32 other = is_neox ? (is_second ? at - pairs : at + pairs) : at ^ 1;
    float2 angle = angles[is_neox ? at % pairs : at / 2];
    float z = read(head + other);
    return is_second ? fmaf(z, angle.y, y * angle.x) : fmaf(-z, angle.y, y * angle.x);
}

DEVICE float rope_element(const float *head, u32 at, const float2 *angles, u32 pairs, u32 is_neox) {
    return rope_element(head, at, angles, pairs, is_neox, [](const float *from) { return *from; });
}

// Activation functions, numbered as in the host's `act_number`.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ln(1 + exp(x)).
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

#define SILU 1u

DEVICE float activate(u32 act, float x) {
    switch (act) {
    case SILU: return x * sigmoid(x);
    case 2: return sigmoid(x);
    case 3: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case 4: return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
    case 5: { float y = x < 0.0f ? 0.0f : x; return y * y; }
    default: return x;
    }
}

DEVICE float gated(u32 act, float gate, float up) {
    if (act != 6) return activate(act, gate) * up;
    // NaN stays NaN.
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return gate * sigmoid(1.702f * gate) * (up + 1.0f);
}
