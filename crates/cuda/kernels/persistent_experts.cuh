// What the persistent kernel needs for experts: who was chosen, and stages that are neither products of planes
// nor attention.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

// The experts that were chosen and their weights, in shared memory behind a product's input.
struct Chosen {
    u32 experts[MOST_CHOSEN];
    float weights[MOST_CHOSEN];
    float results[MOST_RESULTS][TILE_ROWS]; // where they are summed; first the scales of their rows
};
static_assert(sizeof(Chosen) == 4224, "as in persistent.rs");

DEVICE Chosen &chosen_of(const Matmul &p, bool is_gated) {
    u16 *input = (u16 *)shared_memory().area;
    return *(Chosen *)(input + p.input_stride * (is_gated ? 1 : p.experts_used));
}

DEVICE void share_chosen(const Matmul &p, bool is_gated, u32 t) {
    Chosen &chosen = chosen_of(p, is_gated);
    if (t < p.experts_used) chosen.experts[t] = (u32)wait_for(p.route + p.experts_used + t);
    t -= 32;
    if (t < p.experts_used && !is_gated) chosen.weights[t] = wait_for(p.route + t);
}

// Asks for the scales of a block's tiles of experts, to where their results are going to be.
DEVICE void share_scales(const Matmul &p, u32 first, u32 end, u32 t) {
    Chosen &chosen = chosen_of(p, false);
    const Matrix &m = p.matrices[0];
#pragma unroll 1
    for (u32 at = first * TILE_ROWS + t; at < end * TILE_ROWS; at += THREADS) {
        u32 unit = at / TILE_ROWS, tile = unit / p.experts_used, r = at % TILE_ROWS;
        u32 expert = (u32)wait_for(p.route + p.experts_used + unit - tile * p.experts_used);
        copy_async4(shared_address(&chosen.results[unit - first][r]),
                    m.scales + (expert * m.tiles + tile) * TILE_ROWS + r);
    }
}

// Which of the chosen experts a gated tile belongs to.
struct Member {
    u32 place, expert;

    __device__ __forceinline__ Member(const Matmul &p, u32 tile) : place(0), expert(0) {
        if (!EXPERTS || !p.experts_used) return;
        place = tile / p.tiles;
        expert = chosen_of(p, true).experts[place];
    }
};

DEVICE void put(const Norm &p, u32 at, float x) {
    if (p.out) publish(p.out + at, x);
    if (p.half_out) publish(p.half_out + at, to_input(x));
}

DEVICE float4 normed(const float4 &x, const float4 &weight, float scale) {
    return make_float4(x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w);
}

// Waits for a row, or a group of it, and keeps it with the weights of its norm, each thread's own elements. Gives
// what they are to be multiplied with.
DEVICE float keep_normed(const float *x, const float *weights, u32 n, float eps, bool is_short, float4 *kept,
                         float4 *kept_weights) {
    Shared &shared = shared_memory();
    u32 t = own(threadIdx.x), quads = n / 4, thread = is_short ? t % 32 : t, threads = is_short ? 32 : THREADS;
#pragma unroll 1
    for (u32 i = thread; i < quads; i += threads) copy_async(shared_address(kept_weights + i), weights + 4 * i);
    const uint4 *from = (const uint4 *)x;
    float square = 0.0f;
#pragma unroll 1
    for (u32 first = thread; first < quads; first += NORM_QUADS * threads) {
        uint4 x[NORM_QUADS];
        wait_for_all<false>(from + first, threads, quads - first, x);
#pragma unroll
        for (u32 j = 0; j < NORM_QUADS; j++) {
            square = add_squares(as_floats(x[j]), square);
            if (first + j * threads < quads) kept[first + j * threads] = as_floats(x[j]);
        }
    }
    square = warp_sum(square);
    if (!is_short) {
        if (t % 32 == 0) shared.sums[t / 32] = square;
        sync<THREADS>();
        square = 0.0f;
        for (u32 i = 0; i < WARPS; i++) square += shared.sums[i];
        sync<THREADS>();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return rms_of(square, 1.0f / (float)n, eps);
}

// A row, or groups of it, as `normalize` does it: a warp for a short group, a block for a longer one.
DEVICE void normalize(u32 stage) {
    Shared &shared = shared_memory();
    const Norm &p = shared.stages[own(stage % 2)].norm;
    u32 t = own(threadIdx.x), quads = p.n / 4;
    bool is_short = p.n <= SHORT_NORM;
    // Norms that follow each other go to other blocks, and not to those that begin with attention.
    u32 block = blockIdx.x + gridDim.x - (1 + stage % 2) * (gridDim.x / 3);
    block -= block < gridDim.x ? 0 : gridDim.x;
    u32 group = block + (is_short ? t / 32 * gridDim.x : 0), step = gridDim.x * (is_short ? WARPS : 1);
    u32 thread = is_short ? t % 32 : t, threads = is_short ? 32 : THREADS;
    float4 *kept = (float4 *)shared.area + (is_short ? t / 32 * SHORT_NORM / 2 : 0);
    float4 *kept_weights = kept + (is_short ? SHORT_NORM / 4 : quads);
#pragma unroll 1
    for (; group < p.groups; group += step) {
        const float *weights = p.weight + (p.weight_len == p.n ? 0 : group * p.n);
        float scale = keep_normed(p.x + group * p.n, weights, p.n, p.eps, is_short, kept, kept_weights);
#pragma unroll 1
        for (u32 i = thread; i < quads; i += threads) {
            float4 y = normed(kept[i], kept_weights[i], scale);
            u32 at = group * p.n + 4 * i;
            put(p, at, y.x);
            put(p, at + 1, y.y);
            put(p, at + 2, y.z);
            put(p, at + 3, y.w);
        }
        if (!p.half_out || group + 1 < p.groups) continue;
#pragma unroll 1
        for (u32 i = p.groups * p.n + thread; i < p.half_stride; i += threads) publish(p.half_out + i, (u16)0);
    }
}

// A product with weights in f32, as `exact` does it; its input may have to be normalised. Weights of a row and
// the input come to shared memory, each thread's own.
DEVICE void exact(u32 stage) {
    Shared &shared = shared_memory();
    const Matmul &p = shared.stages[own(stage % 2)].matmul;
    static_assert(EXACT_THREADS == THREADS, "the same order");
    u32 t = own(threadIdx.x), quads = p.cols / 4;
    float4 *weights = (float4 *)shared.area, *input = weights + quads, *norm_weights = input + quads;
#pragma unroll 1
    for (u32 row = blockIdx.x; row < p.matrices[0].rows; row += gridDim.x) {
#pragma unroll 1
        for (u32 i = t; i < quads; i += THREADS) copy_async(shared_address(weights + i), exact_weights(p, 0, row, i));
        bool is_first = row == blockIdx.x, is_normed = is_first && p.norm_input;
        float scale = 1.0f;
        if (is_normed) {
            scale = keep_normed(p.norm_input, p.norm_weight, p.cols, p.norm_eps, false, input, norm_weights);
        } else if (is_first) {
#pragma unroll 1
            for (u32 i = t; i < quads; i += THREADS) {
                uint4 x[1];
                wait_for_all<false>((const uint4 *)p.input + i, 0, 1, x);
                input[i] = as_floats(x[0]);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        float sum = 0.0f;
#pragma unroll 1
        for (u32 i = t; i < quads; i += THREADS) {
            if (is_normed) input[i] = normed(input[i], norm_weights[i], scale);
            sum = add_products(weights[i], input[i], sum);
        }
        sum = warp_sum(sum);
        if (t % 32 == 0) shared.sums[t / 32] = sum;
        sync<THREADS>();
        if (t == 0) {
            float total = 0.0f;
            for (u32 i = 0; i < WARPS; i++) total += shared.sums[i];
            emit(p, 0, 0, row, 0, total, 1.0f, 0.0f);
        }
        sync<THREADS>();
    }
}

// A choice of experts, by one block.
DEVICE void route(u32 stage) {
    Shared &shared = shared_memory();
    const Route &p = shared.stages[own(stage % 2)].route;
    u32 t = own(threadIdx.x);
    // The last block, which has no row of most routers.
    if (blockIdx.x + 1 < gridDim.x) return;
    float *scores = (float *)shared.area;
    for (u32 i = t; i < p.experts; i += THREADS) scores[i] = wait_for(p.scores + i);
    sync<THREADS>();
    auto tell = [&](u32 k, float weight, u32 expert) {
        publish(p.out + k, weight);
        publish(p.out + p.experts_used + k, (float)expert);
    };
    choose_experts(p, t, THREADS, scores, scores + places(p), [] { sync<THREADS>(); }, tell);
}

// Runs what is neither a product of planes nor attention. Within the kernel it would take registers from
// them.
static __device__ __noinline__ void other(u32 work, u32 stage) {
    switch (work) {
    case NORM: return normalize(stage);
    case EXACT: return exact(stage);
    default: return route(stage);
    }
}

#endif
