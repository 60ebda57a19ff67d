// Experts in the persistent kernel: the chosen experts, and the small ops: norms, f32 matmuls and
// routing.
#pragma once
#include "persistent.cuh"
#include "persistent_recurrent.cuh"

#if __CUDA_ARCH__ >= 900

// The chosen experts and their weights, in shared memory behind a matmul's input.
struct ChosenExperts {
    u32 experts[MAX_CHOSEN];
    float weights[MAX_CHOSEN];
    float results[MAX_RESULTS][TILE_ROWS]; // of a block's expert tiles, until they are summed
    u8 exponents[MAX_RESULTS][TILE_ROWS];  // of the scales of their rows
};
static_assert(sizeof(ChosenExperts) == CHOSEN_BYTES);

DEVICE ChosenExperts &chosen_experts(const Matmul &p, bool is_gated) {
    u16 *input = (u16 *)shared_memory().workspace;
    return *(ChosenExperts *)(input + p.input_stride * (is_gated || p.shares_input ? 1 : p.experts_used));
}

// Whether an ungated matmul of experts sums their results: then it has a place for partial sums.
DEVICE bool is_summed(const Matmul &p) { return p.matrices[1].out; }

DEVICE void load_chosen(const Matmul &p, bool is_gated, u32 t) {
    ChosenExperts &chosen = chosen_experts(p, is_gated);
    if (t < p.experts_used) chosen.experts[t] = (u32)poll(p.route + p.experts_used + t);
    t -= 32;
    if (t < p.experts_used && !is_gated && is_summed(p)) chosen.weights[t] = poll(p.route + t);
}

// Prefetches the exponents of the scales of a block's expert tiles.
DEVICE void load_exponents(const Matmul &p, u32 first, u32 end, u32 t) {
    ChosenExperts &chosen = chosen_experts(p, false);
    const Matrix &m = p.matrices[0];
    for (u32 unit = first + t; unit < end; unit += THREADS) {
        u32 tile = unit / p.experts_used;
        u32 expert = (u32)poll(p.route + p.experts_used + unit - tile * p.experts_used);
        copy_async(shared_address(chosen.exponents[unit - first]), m.exponents + (expert * m.tiles + tile) * TILE_ROWS);
    }
}

// The chosen expert that a gated tile belongs to.
struct TileExpert {
    u32 place, expert;

    __device__ __forceinline__ TileExpert(const Matmul &p, u32 tile) : place(0), expert(0) {
        if (!EXPERTS || !p.experts_used) return;
        place = tile / p.tiles;
        expert = chosen_experts(p, true).experts[place];
    }
};

DEVICE void put(const Norm &p, u32 at, float x) {
    if (p.out) store_relaxed(p.out + at, x);
    if (p.half_out) store_relaxed(p.half_out + at, to_input(x));
}

DEVICE float4 apply_norm(const float4 &x, const float4 &weight, float scale) {
    return make_float4(x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w);
}

DEVICE float4 gated_by(u32 act, const float4 &gate, const float4 &x) {
    float4 y = {gated(act, gate.x, x.x), gated(act, gate.y, x.y), gated(act, gate.z, x.z), gated(act, gate.w, x.w)};
    return y;
}

DEVICE float4 added_to(const float4 &residual, const float4 &y, float scale) {
    return make_float4((residual.x + y.x) * scale, (residual.y + y.y) * scale, (residual.z + y.z) * scale,
                       (residual.w + y.w) * scale);
}

// Polls a row, or a group of it, and keeps it in shared memory with its norm's weights, if any; each
// thread reads only what it wrote. Returns the RMS factor.
DEVICE float load_norm_row(const float *x, const float *weights, u32 n, float eps, bool is_short, float4 *row,
                         float4 *norm_weights) {
    u32 t = opaque(threadIdx.x), quads = n / 4, thread = is_short ? t % 32 : t, threads = is_short ? 32 : THREADS;
#pragma unroll 1
    for (u32 i = thread; i < quads; i += threads) {
        if (weights) copy_async(shared_address(norm_weights + i), weights + 4 * i);
        else norm_weights[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }
    const uint4 *from = (const uint4 *)x;
    float square = 0.0f;
#pragma unroll 1
    for (u32 first = thread; first < quads; first += NORM_QUADS * threads) {
        uint4 x[NORM_QUADS];
        poll_all<false>(from + first, threads, quads - first, x);
#pragma unroll
        for (u32 j = 0; j < NORM_QUADS; j++) {
            square = add_squares(as_floats(x[j]), square);
            if (first + j * threads < quads) row[first + j * threads] = as_floats(x[j]);
        }
    }
    square = warp_sum(square);
    if (!is_short) {
        square = sum_of_warps(square, t, [] {});
        sync<THREADS>();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return rms_factor(square, 1.0f / (float)n, eps);
}

// RMS norm of a row or of groups of it, as in rows.cu: a warp for a short group, a block for a
// longer one.
DEVICE void norm_rows(u32 stage) {
    SharedMemory &shared = shared_memory();
    const Norm &p = shared.stages[opaque(stage % 2)].norm;
    u32 t = opaque(threadIdx.x), quads = p.n / 4;
    bool is_short = p.n <= SHORT_NORM;
    // Consecutive norms go to other blocks, and not to those that begin with attention.
    u32 block = blockIdx.x + gridDim.x - (1 + stage % 2) * (gridDim.x / 3);
    block -= block < gridDim.x ? 0 : gridDim.x;
    u32 group = block + (is_short ? t / 32 * gridDim.x : 0), step = gridDim.x * (is_short ? WARPS : 1);
    u32 thread = is_short ? t % 32 : t, threads = is_short ? 32 : THREADS;
    float4 *row = (float4 *)shared.workspace + (is_short ? t / 32 * SHORT_NORM / 2 : 0);
    float4 *norm_weights = row + (is_short ? SHORT_NORM / 4 : quads);
#pragma unroll 1
    for (; group < p.groups; group += step) {
        const float *weights = p.weight_len > p.n ? p.weight + group * p.n : p.weight;
        // What the result is gated by, or added to, exists before the row.
        const uint4 *others = (const uint4 *)((p.gate ? p.gate : p.residual) + group * p.n);
        bool has_others = p.gate || p.residual;
        uint4 other[NORM_QUADS] = {};
        if (has_others && thread < quads) poll_all<false>(others + thread, threads, quads - thread, other);
        float sum_scale = p.sum_scale ? *p.sum_scale : 1.0f;
        float scale = load_norm_row(p.x + group * p.n, weights, p.n, p.eps, is_short, row, norm_weights);
#pragma unroll 1
        for (u32 first = thread; first < quads; first += NORM_QUADS * threads) {
            if (has_others && first > thread) poll_all<false>(others + first, threads, quads - first, other);
#pragma unroll
            for (u32 j = 0; j < NORM_QUADS; j++) {
                u32 i = first + j * threads, at = group * p.n + 4 * i;
                if (i >= quads) break;
                float4 y = apply_norm(row[i], norm_weights[i], scale);
                if (p.gate) y = gated_by(p.act, as_floats(other[j]), y);
                if (p.residual) y = added_to(as_floats(other[j]), y, sum_scale);
                put(p, at, y.x);
                put(p, at + 1, y.y);
                put(p, at + 2, y.z);
                put(p, at + 3, y.w);
            }
        }
        if (!p.half_out || group + 1 < p.groups) continue;
#pragma unroll 1
        for (u32 i = p.groups * p.n + thread; i < p.half_stride; i += threads) store_relaxed(p.half_out + i, (u16)0);
    }
}

// A matmul with f32 weights, as in gemv_mma.cu; its input may have to be normalised. A weight row
// and the input are in shared memory, where each thread reads only what it wrote.
DEVICE void gemv_f32(u32 stage) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = shared.stages[opaque(stage % 2)].matmul;
    static_assert(GEMV_F32_THREADS == THREADS, "the same order");
    u32 t = opaque(threadIdx.x), quads = p.cols / 4;
    float4 *weights = (float4 *)shared.workspace, *input = weights + quads, *norm_weights = input + quads;
#pragma unroll 1
    for (u32 row = blockIdx.x; row < p.matrices[0].rows; row += gridDim.x) {
#pragma unroll 1
        for (u32 i = t; i < quads; i += THREADS) {
            copy_async(shared_address(weights + i), f32_weights(p, (const u8 *)p.matrices[0].packed, row, i));
        }
        bool is_first = row == blockIdx.x, is_normed = is_first && p.norm_input;
        float scale = 1.0f;
        if (is_normed) {
            scale = load_norm_row(p.norm_input, p.norm_weight, p.cols, p.norm_eps, false, input, norm_weights);
        } else if (is_first) {
#pragma unroll 1
            for (u32 i = t; i < quads; i += THREADS) {
                uint4 x[1];
                poll_all<false>((const uint4 *)p.input + i, 0, 1, x);
                input[i] = as_floats(x[0]);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        float sum = 0.0f;
#pragma unroll 1
        for (u32 i = t; i < quads; i += THREADS) {
            if (is_normed) input[i] = apply_norm(input[i], norm_weights[i], scale);
            sum = fma4(weights[i], input[i], sum);
        }
        float total = sum_of_warps(warp_sum(sum), t, [] {});
        if (t == 0) epilogue(p, 0, 0, row, 0, total, ONE_EXPONENT, 0.0f);
        sync<THREADS>();
    }
}

// Routing, by one block.
DEVICE void route(u32 stage) {
    SharedMemory &shared = shared_memory();
    const Route &p = shared.stages[opaque(stage % 2)].route;
    u32 t = opaque(threadIdx.x);
    // The last block, which has no row of most routers' weights.
    if (blockIdx.x + 1 < gridDim.x) return;
    float *scores = (float *)shared.workspace;
    for (u32 i = t; i < p.experts; i += THREADS) scores[i] = poll(p.scores + i);
    sync<THREADS>();
    auto store = [&](u32 k, float weight, u32 expert) {
        store_relaxed(p.out + k, weight);
        store_relaxed(p.out + p.experts_used + k, (float)expert);
    };
    choose_experts(p, t, THREADS, scores, scores + padded_experts(p), [] { sync<THREADS>(); }, store);
}

// Runs an op that is neither a matmul of packed weights nor attention. Not inlined: it would take
// registers from those.
static __device__ __noinline__ void other(u32 work, u32 stage) {
    switch (work) {
    case OP_NORM: return norm_rows(stage);
    case OP_GEMV_F32: return gemv_f32(stage);
    case OP_CONV: return conv_row(stage);
    case OP_SCAN: return scan_rows(stage);
    case OP_DELTA_RULE: return delta_rule_row(stage);
    case OP_ELEMENTWISE: return elementwise_row(stage);
    case OP_SLICE_CONCAT: return slice_concat_row(stage);
    case OP_CONVERT_INPUT: return convert_input_row(stage);
    case OP_ROTATE: return rotate_row(stage);
    default: return route(stage);
    }
}

#endif
