// What the persistent kernel needs for experts: who was chosen, and stages that are neither products of planes
// nor attention.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

// The experts that were chosen and their weights, in shared memory behind a product's input.
struct Chosen {
    u32 experts[MOST_CHOSEN];
    float weights[MOST_CHOSEN];
    float results[MOST_RESULTS][TILE_ROWS]; // where they are summed
};
static_assert(sizeof(Chosen) == 4224, "as in persistent.rs");

DEVICE Chosen &chosen_of(const Product &p, bool is_gated) {
    u16 *input = (u16 *)shared_memory().area;
    return *(Chosen *)(input + p.input_stride * (is_gated ? 1 : p.used));
}

DEVICE void share_chosen(const Product &p, bool is_gated, u32 t) {
    Chosen &chosen = chosen_of(p, is_gated);
    if (t < p.used) chosen.experts[t] = (u32)wait_for(p.route + p.used + t);
    t -= 32;
    if (t < p.used && !is_gated) chosen.weights[t] = wait_for(p.route + t);
}

// Which of the chosen experts a gated tile belongs to.
struct Member {
    u32 place, expert;

    __device__ __forceinline__ Member(const Product &p, u32 tile) : place(0), expert(0) {
        if (!EXPERTS || !p.used) return;
        place = tile / p.tiles;
        expert = chosen_of(p, true).experts[place];
    }
};

DEVICE void put(const Norm &p, u32 at, float x) {
    if (p.out) publish(p.out + at, x);
    if (p.half_out) publish(p.half_out + at, to_input(x));
}

// A row, or groups of it, as `normalize` does it: a warp for a short group, a block for a longer one.
DEVICE void normalize(u32 stage) {
    Shared &shared = shared_memory();
    const Norm &p = shared.stages[own(stage % 2)].norm;
    u32 t = own(threadIdx.x), quads = p.n / 4;
    bool is_short = p.n <= SHORT_NORM;
    // Norms that follow each other go to other blocks.
    u32 block = blockIdx.x + stage % 2 * (gridDim.x / 2);
    block -= block < gridDim.x ? 0 : gridDim.x;
    u32 group = block + (is_short ? t / 32 * gridDim.x : 0), step = gridDim.x * (is_short ? WARPS : 1);
    u32 thread = is_short ? t % 32 : t, threads = is_short ? 32 : THREADS;
    // Each thread's own elements and their weights.
    float4 *kept = (float4 *)shared.area + (is_short ? t / 32 * SHORT_NORM / 2 : 0);
    float4 *kept_weights = kept + (is_short ? SHORT_NORM / 4 : quads);
#pragma unroll 1
    for (; group < p.groups; group += step) {
        const uint4 *from = (const uint4 *)(p.x + group * p.n);
        const float *weights = p.weight + (p.weight_len == p.n ? 0 : group * p.n);
        for (u32 i = thread; i < quads; i += threads) copy_async(shared_address(kept_weights + i), weights + 4 * i);
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
            if (t % 32 == 0) shared.mosts[t / 32] = square;
            sync<THREADS>();
            square = 0.0f;
            for (u32 i = 0; i < WARPS; i++) square += shared.mosts[i];
            sync<THREADS>();
        }
        float scale = rsqrtf(square / (float)p.n + p.eps);
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
        for (u32 i = thread; i < quads; i += threads) {
            float4 y = kept[i], w = kept_weights[i];
            u32 at = group * p.n + 4 * i;
            put(p, at, y.x * scale * w.x);
            put(p, at + 1, y.y * scale * w.y);
            put(p, at + 2, y.z * scale * w.z);
            put(p, at + 3, y.w * scale * w.w);
        }
        if (!p.half_out || group + 1 < p.groups) continue;
#pragma unroll 1
        for (u32 i = p.groups * p.n + thread; i < p.half_stride; i += threads) publish(p.half_out + i, (u16)0);
    }
}

// A product with weights in f32, as `exact` does it.
DEVICE void exact(u32 stage) {
    Shared &shared = shared_memory();
    const Product &p = shared.stages[own(stage % 2)].product;
    static_assert(EXACT_THREADS == THREADS, "the same order");
    u32 t = own(threadIdx.x), quads = p.cols / 4;
    const uint4 *from = (const uint4 *)p.input;
#pragma unroll 1
    for (u32 row = blockIdx.x; row < p.matrices[0].rows; row += gridDim.x) {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 first = t; first < quads; first += EXACT_QUADS * THREADS) {
            float4 w[EXACT_QUADS];
            uint4 x[EXACT_QUADS];
#pragma unroll
            for (u32 j = 0; j < EXACT_QUADS; j++) w[j] = exact_weights(p, 0, row, first + j * THREADS);
            wait_for_all<false>(from + first, THREADS, quads - first, x);
#pragma unroll
            for (u32 j = 0; j < EXACT_QUADS; j++) sum = add_products(w[j], as_floats(x[j]), sum);
        }
        sum = warp_sum(sum);
        if (t % 32 == 0) shared.mosts[t / 32] = sum;
        sync<THREADS>();
        if (t == 0) {
            float total = 0.0f;
            for (u32 i = 0; i < WARPS; i++) total += shared.mosts[i];
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
    if (blockIdx.x > 0) return;
    float *scores = (float *)shared.area;
    for (u32 i = t; i < p.experts; i += THREADS) scores[i] = wait_for(p.scores + i);
    sync<THREADS>();
    auto tell = [&](u32 k, float weight, u32 expert) {
        publish(p.out + k, weight);
        publish(p.out + p.used + k, (float)expert);
    };
    choose_experts(p, t, THREADS, scores, scores + p.experts, [] { sync<THREADS>(); }, tell);
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
