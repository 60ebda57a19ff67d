// What all kernels share: numbers, the step's feed, reductions, half precision.
//
// Results of a row must not depend on which kernel computed it, so the files are compiled without
// contraction of products and sums: where a fused multiply-add is wanted, it is written.
#pragma once
#include "parameters.cuh"

// Inputs of products are kept in half precision, sixteen times smaller than they are: the range
// is then up to a million, and numbers down to a thousandth keep all their bits.
#define INPUT_SCALE 0.0625f
#define HALF_MAX 65504.0f
#define PAGE_TOKENS 32u
#define INFINITY_F __int_as_float(0x7f800000)

// The same number, which the compiler takes for another: what is read by it stays where it is read.
DEVICE u32 own(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What there happens to be in registers.
DEVICE uint4 anything() {
    uint4 v;
    asm("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
    return v;
}

// The kernel before this one in the stream has finished, and what it wrote can be read. Kernels
// may start earlier than that, to fetch what no kernel writes.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel in the stream may start as soon as all blocks have come here.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The step's numbers, in one array of u32 that begins with where each part of it lies.
struct Feed {
    const u32 *at;

    __device__ __forceinline__ u32 rows() const { return at[0]; }
    __device__ __forceinline__ u32 spans() const { return at[1]; }
    // Token ids of rows.
    __device__ __forceinline__ u32 token(u32 row) const { return at[at[2] + row]; }
    // Positions of rows in their sequences.
    __device__ __forceinline__ u32 position(u32 row) const { return at[at[3] + row]; }
    // Which span a row belongs to.
    __device__ __forceinline__ u32 span(u32 row) const { return at[at[4] + row]; }
    // The row that an output stands for.
    __device__ __forceinline__ u32 output(u32 i) const { return at[at[5] + i]; }
    // Of a span: its first row, rows, first position, cell of state, and whether it is of a prompt.
    __device__ __forceinline__ u32 first(u32 span) const { return at[at[6] + 5 * span]; }
    __device__ __forceinline__ u32 len(u32 span) const { return at[at[6] + 5 * span + 1]; }
    __device__ __forceinline__ u32 start(u32 span) const { return at[at[6] + 5 * span + 2]; }
    __device__ __forceinline__ u32 cell(u32 span) const { return at[at[6] + 5 * span + 3]; }
    __device__ __forceinline__ bool is_prompt(u32 span) const { return at[at[6] + 5 * span + 4] != 0; }
    // A span's pages for a window: their numbers from that of position 0 on, of which the first
    // ones may be missing.
    __device__ __forceinline__ const u32 *pages(u32 window, u32 span) const {
        const u32 *table = at + at[7] + 2 * (window * spans() + span);
        return at + (int)(table[1] - table[0]);
    }
};

// Asks for sixteen bytes of memory to come to shared memory.
DEVICE void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Likewise of four bytes.
DEVICE void copy_async4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Four matrices of eight by eight halves; a lane gives the address of a row of one.
DEVICE uint4 load_matrices(u32 at) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

// Half precision, as bits.

DEVICE float from_half(u32 bits) {
    float x;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(bits));
    return x;
}

// The first number in the lower bits.
DEVICE u32 half_pair(float a, float b) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
    return bits;
}

DEVICE float within_half(float x) { return fminf(fmaxf(x, -HALF_MAX), HALF_MAX); }

DEVICE u16 to_half(float x) { return (u16)half_pair(within_half(x), 0.0f); }

// As an input of products: still in f32, and in half precision.
DEVICE float as_input(float x) { return within_half(x * INPUT_SCALE); }
DEVICE u16 to_input(float x) { return to_half(x * INPUT_SCALE); }

DEVICE float2 from_half_pair(u32 bits) {
    return make_float2(from_half(bits & 0xffff), from_half(bits >> 16));
}

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

// Results that other blocks of a running kernel wait for. What is not written yet is all ones, which
// nothing that is written ever is: halves are never infinite or no number, and floats that are no
// number have other bits. A number is read and written whole, so nothing else has to be ordered but
// memory that is used again while the kernel runs (`Awaited`).

#define UNWRITTEN 0xffffffffu

DEVICE void publish(float *to, float x) {
    u32 bits = __float_as_uint(x);
    if (bits == UNWRITTEN) bits = 0x7fffffffu;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

DEVICE void publish(u16 *to, u16 half) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(half) : "memory");
}

DEVICE u32 look(const float *at) {
    u32 bits;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
    return bits;
}

DEVICE uint4 look(const uint4 *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// A free bit in the exponent of a half that is there; its sign bit stays 0 then.
DEVICE u32 beyond_exponents(u32 pair) { return (pair & 0x7c007c00u) + 0x04000400u; }

// Whether all is there. Without branches: mostly it is, and all has to be looked at then.
DEVICE bool is_written(const uint4 &v, bool are_halves) {
    if (are_halves) {
        u32 beyond = beyond_exponents(v.x) | beyond_exponents(v.y) | beyond_exponents(v.z) | beyond_exponents(v.w);
        return (beyond & 0x80008000u) == 0;
    }
    return (v.x != UNWRITTEN) & (v.y != UNWRITTEN) & (v.z != UNWRITTEN) & (v.w != UNWRITTEN);
}

// Sixteen bytes each, `step` apart, and zeros from place `end` on. All that are not there yet are
// looked at again at the same time: one after the other, each would take a way to memory.
template <bool HALVES, int N> DEVICE void wait_for_all(const uint4 *from, u32 step, u32 end, uint4 (&x)[N]) {
#pragma unroll
    for (u32 j = 0; j < N; j++) x[j] = j * step < end ? look(from + j * step) : make_uint4(0, 0, 0, 0);
    bool are_there = false;
#pragma unroll 1
    while (!are_there) {
        are_there = true;
#pragma unroll
        for (u32 j = 0; j < N; j++) {
            if (is_written(x[j], HALVES)) continue;
            are_there = false;
            x[j] = look(from + j * step);
        }
    }
}

// Where something is in shared memory.
DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Reductions, always in the same order.

DEVICE float warp_sum(float x) {
    for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

DEVICE float warp_max(float x) {
    for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// Over all threads of a block of up to 1024; everybody gets the sum. `room` holds 32.
DEVICE float block_sum(float x, float *room) {
    x = warp_sum(x);
    if (blockDim.x <= 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) sum += room[i];
    return sum;
}

DEVICE float4 as_floats(const uint4 &v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

DEVICE float add_squares(const float4 &x, float sum) {
    return fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
}

// A thread's part of the sum of a row's squares, four neighbours at a time. The number of threads decides the
// order of the sum.
DEVICE float square_of(const float *x, u32 n, u32 thread, u32 threads) {
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

// What an RMS norm multiplies a row with, from the sum of its squares and one divided by their number: who waits for
// the sum can have the latter before.
DEVICE float rms_of(float sum, float one_of, float eps) { return rsqrtf(sum * one_of + eps); }

// The same of a row. `room` has a place for each warp.
DEVICE float rms_scale(const float *x, u32 n, float eps, float *room) {
    float square = square_of(x, n, threadIdx.x, blockDim.x);
    return rms_of(block_sum(square, room), 1.0f / (float)n, eps);
}

// The same by half as many threads, each of which does what two would: `dot` has so many.
DEVICE float rms_scale_by_half(const float *x, u32 n, float eps, float *room) {
    u32 t = threadIdx.x, warps = blockDim.x / 32;
    for (u32 i = 0; i < 2; i++) {
        float square = warp_sum(square_of(x, n, t + i * blockDim.x, 2 * blockDim.x));
        if (t % 32 == 0) room[t / 32 + i * warps] = square;
    }
    __syncthreads();
    float sum = 0.0f;
    for (u32 i = 0; i < 2 * warps; i++) sum += room[i];
    return rms_of(sum, 1.0f / (float)n, eps);
}

// Element `at` of a head, rotated by its row's angles; those beyond the pairs stay as they are.
DEVICE float rotated(const float *head, u32 at, const float2 *angles, u32 pairs, u32 is_neox) {
    float y = head[at];
    if (at >= 2 * pairs) return y;
    bool is_second = is_neox ? at >= pairs : at % 2 == 1;
    u32 other = is_neox ? (is_second ? at - pairs : at + pairs) : at ^ 1;
    float2 angle = angles[is_neox ? at % pairs : at / 2];
    float z = head[other];
    return is_second ? fmaf(z, angle.y, y * angle.x) : fmaf(-z, angle.y, y * angle.x);
}

// Activation functions, numbered as in the host's `act_number`.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float activate(u32 act, float x) {
    switch (act) {
    case 1: return x * sigmoid(x);
    case 2: return sigmoid(x);
    case 3: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case 4: return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
    case 5: { float y = fmaxf(x, 0.0f); return y * y; }
    default: return x;
    }
}

DEVICE float gated(u32 act, float gate, float up) {
    if (act != 6) return activate(act, gate) * up;
    gate = fminf(gate, 7.0f);
    return gate * sigmoid(1.702f * gate) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f);
}
