// Kernels on single rows: embedding, norms, RoPE, elementwise functions, columns, routing; and
// pooling. All are bound by memory or by launch latency. Grids are (rows, blocks of elements)
// unless noted.
#include "device.cuh"
#include "elementwise.cuh"
#include "packed.cuh"
#include "route.cuh"

// Cosines and sines of rotary angles. Angles are reduced in double precision, as positions are
// large.
KERNEL rope_angles(const __grid_constant__ RopeAngles p) {
    launch_dependents();
    grid_dependency_wait();
    u32 row = blockIdx.x, whole = StepMetadata{p.metadata}.position(row);
    double position = whole / p.block * p.block;
    for (u32 i = threadIdx.x; i < p.rotary_pairs; i += blockDim.x) {
        double half_turns = p.frequencies[i] * position;
        float sine, cosine;
        sincospif((float)(half_turns - 2.0 * rint(0.5 * half_turns)), &sine, &cosine);
        p.out[(u64)row * p.rotary_pairs + i] = make_float2(cosine * p.magnitude, sine * p.magnitude);
    }
}

template <int LAYOUT> DEVICE void embed(const Embed &p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 at = blockIdx.x;
    u32 row = p.by == 0 ? metadata.token(at) : p.by == 2 ? 0 : metadata.position(at);
    if (p.by == 3) row %= p.rows;
    const u8 *tile = p.packed + (u64)(row / TILE_ROWS) * p.chunks * Packed<LAYOUT>::BYTES;
    float scale = power_of_two(p.exponents[row]) * INPUT_SCALE;
    u32 r = row % TILE_ROWS;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.cols; i += blockDim.x * gridDim.y) {
        u32 lane = r % 8 * 4 + i % CHUNK_COLS / 16;
        const u8 *chunk = tile + i / CHUNK_COLS * Packed<LAYOUT>::BYTES;
        p.out[(u64)at * p.stride + i] = Packed<LAYOUT>::value(chunk, lane, r / 8, i % 16) * scale;
    }
}

KERNEL embed_f16(const __grid_constant__ Embed p) { embed<F16>(p); }
KERNEL embed_s8(const __grid_constant__ Embed p) { embed<S8>(p); }
KERNEL embed_s6x16(const __grid_constant__ Embed p) { embed<S6X16>(p); }
KERNEL embed_u5(const __grid_constant__ Embed p) { embed<U5>(p); }
KERNEL embed_u4(const __grid_constant__ Embed p) { embed<U4>(p); }
KERNEL embed_s4x16(const __grid_constant__ Embed p) { embed<S4X16>(p); }
KERNEL embed_u2x16(const __grid_constant__ Embed p) { embed<U2X16>(p); }
KERNEL embed_iq4(const __grid_constant__ Embed p) { embed<IQ4>(p); }
KERNEL embed_codebook(const __grid_constant__ Embed p) { embed<CODEBOOK>(p); }
KERNEL embed_fp4(const __grid_constant__ Embed p) { embed<FP4>(p); }
KERNEL embed_s24_f16(const __grid_constant__ Embed p) { embed<S24_F16>(p); }
KERNEL embed_s24_s8(const __grid_constant__ Embed p) { embed<S24_S8>(p); }
KERNEL embed_s24_s4(const __grid_constant__ Embed p) { embed<S24_S4>(p); }
KERNEL embed_f32(const __grid_constant__ Embed p) { embed<F32>(p); }

// Weights, biases, gates, adds to a residual and stores some elements of a block's row and group: `first`,
// and others at a distance.
template <u32 COUNT>
DEVICE void store_normed(const Norm &p, u32 first, u32 distance, const float (&y)[COUNT], float mean, float scale) {
    u32 row = blockIdx.x, group = blockIdx.y, start = p.weight_len == p.n ? 0 : group * p.n;
    const float *others = p.gate ? p.gate + (u64)row * p.gate_stride : p.residual + (u64)row * p.residual_stride;
    bool has_others = p.gate || p.residual;
    float w[COUNT], b[COUNT], x[COUNT], sum_scale = p.sum_scale ? *p.sum_scale : 1.0f;
    // All loads before the first store.
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        u32 i = first + j * distance;
        bool is_in = i < p.n;
        w[j] = is_in && p.weight ? p.weight[start + i] : 1.0f;
        b[j] = is_in && p.bias ? p.bias[start + i] : 0.0f;
        x[j] = is_in && has_others ? others[group * p.n + i] : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        u32 i = first + j * distance, at = group * p.n + i;
        if (i >= p.n) break;
        float z = (y[j] - mean) * scale * w[j];
        if (p.bias) z += b[j];
        if (p.gate) z = gated(p.act, x[j], z);
        if (p.residual) z = (x[j] + z) * sum_scale;
        if (p.out) p.out[(u64)row * p.out_stride + at] = z;
        if (p.half_out) p.half_out[half_at(p.half_stride, row, at)] = to_input(z);
    }
}

// Clears what is behind a row of a norm's halves.
DEVICE void clear_padding(const Norm &p) {
    if (!p.half_out || blockIdx.y + 1 < p.groups) return;
    for (u32 i = p.groups * p.n + threadIdx.x; i < (p.half_stride & ~SWIZZLED); i += blockDim.x) {
        p.half_out[half_at(p.half_stride, blockIdx.x, i)] = 0;
    }
}

// Loads a thread's elements of a group of a row, as vectors of four neighbours that are 4 blockDim.x apart.
// Elements beyond the end, or of a null pointer, are `other`.
template <u32 VECTORS> DEVICE void load_vectors(const Norm &p, const float *from, float other, float4 (&x)[VECTORS]) {
#pragma unroll
    for (u32 j = 0; j < VECTORS; j++) {
        u32 i = 4 * (threadIdx.x + j * blockDim.x);
        x[j] = from && i < p.n ? *(const float4 *)(from + i) : make_float4(other, other, other, other);
    }
}

// RMS norm of aligned rows of up to 4 VECTORS elements a thread, without bias or gate. The row stays in
// registers, and its weights are read before the previous kernel has ended. The sum has the order of `rms_scale`.
// Grid: (rows, groups).
template <u32 VECTORS> DEVICE void rms_norm(const Norm &p) {
    __shared__ float scratch[NORM_THREADS / 32];
    launch_dependents();
    u32 row = blockIdx.x, first = blockIdx.y * p.n, t = threadIdx.x;
    float4 x[VECTORS], weights[VECTORS], residuals[VECTORS];
    load_vectors(p, p.weight ? p.weight + (p.weight_len == p.n ? 0 : first) : 0, 1.0f, weights);
    float sum = 0.0f, sum_scale = p.sum_scale ? *p.sum_scale : 1.0f;
    grid_dependency_wait();
    load_vectors(p, p.x + (u64)row * p.stride + first, 0.0f, x);
    load_vectors(p, p.residual ? p.residual + (u64)row * p.residual_stride + first : 0, 0.0f, residuals);
#pragma unroll
    for (u32 j = 0; j < VECTORS; j++) sum = add_squares(x[j], sum);
    sum = warp_sum(sum);
    if (blockDim.x > 32) {
        if (t % 32 == 0) scratch[t / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < NORM_THREADS / 32; i++) sum += scratch[i];
    }
    float scale = rms_factor(sum, 1.0f / (float)p.n, p.eps);
#pragma unroll
    for (u32 j = 0; j < VECTORS; j++) {
        u32 i = 4 * (t + j * blockDim.x);
        if (i >= p.n) break;
        float z[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            z[k] = (&x[j].x)[k] * scale * (&weights[j].x)[k];
            if (p.residual) z[k] = ((&residuals[j].x)[k] + z[k]) * sum_scale;
        }
        if (p.out) *(float4 *)(p.out + (u64)row * p.out_stride + first + i) = make_float4(z[0], z[1], z[2], z[3]);
        if (!p.half_out) continue;
        // Swizzled halves are neighbours in pairs only.
#pragma unroll
        for (u32 k = 0; k < 4; k += 2) {
            u32 pair = to_input(z[k]) | (u32)to_input(z[k + 1]) << 16;
            *(u32 *)(p.half_out + half_at(p.half_stride, row, first + i + k)) = pair;
        }
    }
    clear_padding(p);
}

KERNEL __launch_bounds__(NORM_THREADS) rms_norm_2(const __grid_constant__ Norm p) { rms_norm<2>(p); }
KERNEL __launch_bounds__(NORM_THREADS) rms_norm_4(const __grid_constant__ Norm p) { rms_norm<4>(p); }

// Any other RMS or layer norm: a block takes a group of a row. Grid: (rows, groups).
KERNEL norm_rows(const __grid_constant__ Norm p) {
    __shared__ float scratch[32];
    launch_dependents();
    grid_dependency_wait();
    u32 row = blockIdx.x, group = blockIdx.y;
    const float *x = p.x + (u64)row * p.stride + group * p.n;
    float mean = 0.0f, scale;
    if (p.is_layer) {
        for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) mean += x[i];
        mean = block_sum(mean, scratch) / (float)p.n;
        float square = 0.0f;
        for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) {
            square = fmaf(x[i] - mean, x[i] - mean, square);
        }
        scale = rsqrtf(block_sum(square, scratch) / (float)p.n + p.eps);
    } else {
        scale = rms_scale<1>(x, p.n, p.eps, scratch);
    }
    // COUNT elements at a time, to pay the memory latency once.
    const u32 COUNT = 8;
    for (u32 first = threadIdx.x; first < p.n; first += COUNT * blockDim.x) {
        float y[COUNT];
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) {
            u32 i = first + j * blockDim.x;
            y[j] = i < p.n ? x[i] : 0.0f;
        }
        store_normed(p, first, blockDim.x, y, mean, scale);
    }
    clear_padding(p);
}

// Layer norm of more than SHORT_NORM and up to SHORT_LAYER_NORM elements, by a warp, which holds the row in
// registers. Grid: (rows, groups).
KERNEL layer_norm_rows(const __grid_constant__ Norm p) {
    const u32 COUNT = 8, LANE_COUNT = SHORT_LAYER_NORM / 32;
    static_assert(LANE_COUNT % COUNT == 0, "whole batches");
    launch_dependents();
    grid_dependency_wait();
    u32 lane = threadIdx.x, group = blockIdx.y;
    const float *row = p.x + (u64)blockIdx.x * p.stride + group * p.n;
    float x[LANE_COUNT], sum = 0.0f, square = 0.0f;
#pragma unroll
    for (u32 j = 0; j < LANE_COUNT; j++) x[j] = 32 * j + lane < p.n ? row[32 * j + lane] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < LANE_COUNT; j++) sum += x[j];
    float mean = warp_sum(sum) / (float)p.n;
#pragma unroll
    for (u32 j = 0; j < LANE_COUNT; j++) {
        if (32 * j + lane < p.n) square = fmaf(x[j] - mean, x[j] - mean, square);
    }
    square = warp_sum(square);
    float scale = rsqrtf(square / (float)p.n + p.eps);
#pragma unroll
    for (u32 j = 0; j < LANE_COUNT; j += COUNT) {
        if (32 * j >= p.n) break;
        float y[COUNT];
#pragma unroll
        for (u32 k = 0; k < COUNT; k++) y[k] = x[j + k];
        store_normed(p, 32 * j + lane, 32, y, mean, scale);
    }
    clear_padding(p);
}

// Converts the parts of a row to matmul inputs. Grid: (rows, parts).
KERNEL convert_input(const __grid_constant__ ConvertInput p) {
    launch_dependents();
    grid_dependency_wait();
    u32 row = blockIdx.x, part = blockIdx.y;
    const float *x = p.x + (u64)row * p.stride + part * p.cols;
    u16 *out = p.out + ((u64)row * p.parts + part) * p.out_stride;
    for (u32 i = threadIdx.x; i < p.out_stride; i += blockDim.x) out[i] = i < p.cols ? to_input(x[i]) : 0;
}

KERNEL elementwise(const __grid_constant__ Elementwise p) {
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        float a = p.a[row * p.a_stride + column_of_a(p, i)];
        float y = elementwise(p, a, p.b ? p.b[row * p.b_stride + i] : 0.0f);
        if (p.out) p.out[row * p.out_stride + i] = y;
        if (p.half_out) p.half_out[half_at(p.half_stride, row, i)] = to_input(y);
    }
    if (!p.half_out || blockIdx.y > 0) return;
    for (u32 i = p.width + threadIdx.x; i < (p.half_stride & ~SWIZZLED); i += blockDim.x) {
        p.half_out[half_at(p.half_stride, row, i)] = 0;
    }
}

KERNEL rope(const __grid_constant__ Rotate p) {
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    const float *x = p.x + row * p.stride;
    float *out = p.out + row * p.out_stride;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        const float *head = x + i / p.head_dim * p.head_dim;
        out[i] = rope_element(head, i % p.head_dim, p.cos_sin + row * p.rotary_pairs, p.rotary_pairs, p.is_neox);
    }
}

// Slices or concatenates the columns of groups.
KERNEL slice_concat(const __grid_constant__ SliceConcat p) {
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.groups * (p.a_len + p.b_len);
         i += blockDim.x * gridDim.y) {
        p.out[row * p.out_stride + i] = *source(p, p.a + row * p.a_stride, p.b + row * p.b_stride, i);
    }
}

KERNEL pool(const __grid_constant__ Pool p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 output = metadata.output(blockIdx.x), span = metadata.span(output);
    u32 first = metadata.first(span), len = metadata.len(span);
    bool is_sum = p.kind == 3 && metadata.position(first) == 0;
    u32 added = is_sum ? output - first + 1 : len;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) {
        const float *x = p.x + (u64)first * p.stride + i;
        float y = 0.0f;
        if (p.kind == 0 || is_sum) {
            for (u32 row = 0; row < added; row++) y += x[(u64)row * p.stride];
            if (!is_sum) y /= (float)len;
        } else {
            u32 row = p.kind == 1 ? 0 : p.kind == 2 ? len - 1 : output - first;
            y = x[(u64)row * p.stride];
        }
        p.out[(u64)blockIdx.x * p.out_stride + i] = y;
    }
}

// Top-k routing: a block takes a row.
KERNEL route(const __grid_constant__ Route p) {
    extern __shared__ __align__(16) float scratch[];
    launch_dependents();
    grid_dependency_wait();
    float *out = p.out + (u64)blockIdx.x * p.out_stride;
    const float *scores = p.scores + (u64)blockIdx.x * p.stride;
    auto store = [&](u32 k, float weight, u32 expert) {
        out[k] = weight;
        out[p.experts_used + k] = (float)expert;
    };
    choose_experts(p, threadIdx.x, blockDim.x, scores, scratch, [] { __syncthreads(); }, store);
}

// The weights of experts that are chosen already; numbers that are too high mean the last one. A
// warp takes a row.
KERNEL route_chosen(const __grid_constant__ RouteChosen p) {
    extern __shared__ __align__(16) float probabilities[];
    launch_dependents();
    grid_dependency_wait();
    const Route &route = p.route;
    float *weights = probabilities + route.experts, *out = route.out + (u64)blockIdx.x * route.out_stride;
    u32 *chosen = (u32 *)(weights + route.experts_used);
    find_probabilities(route, threadIdx.x, route.scores + (u64)blockIdx.x * route.stride, probabilities);
    __syncwarp();
    for (u32 k = threadIdx.x; k < route.experts_used; k += 32) {
        float number = p.chosen[(u64)blockIdx.x * p.chosen_stride + k];
        chosen[k] = min((u32)fmaxf(number, 0.0f), route.experts - 1);
        weights[k] = probabilities[chosen[k]];
        atomicAdd(route.counts + chosen[k], 1);
    }
    __syncwarp();
    weigh_experts(route, threadIdx.x, 32, weights, chosen, [&](u32 k, float weight, u32 expert) {
        out[k] = weight;
        out[route.experts_used + k] = (float)expert;
    });
}

// The Euclidean length of a row.
DEVICE float length_of(const float *x, u32 n, float *scratch) {
    float square = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) square = fmaf(x[i], x[i], square);
    return sqrtf(block_sum(square, scratch));
}

// Gives parts of a row the length of another row. Grid: (rows, parts).
KERNEL rescale(const __grid_constant__ Rescale p) {
    __shared__ float scratch[32];
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    const float *x = p.x + row * p.stride + blockIdx.y * p.width;
    float *out = p.out + row * p.out_stride + blockIdx.y * p.width;
    float wanted = length_of(p.like + row * p.like_stride, p.width, scratch);
    const float SMALLEST = 1.17549435e-38f;
    float scale = wanted / fmaxf(length_of(x, p.width, scratch), SMALLEST);
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) out[i] = x[i] * scale;
}

// What exceeds the mean of a row by some standard deviations: a block takes a row.
KERNEL cutoff(const __grid_constant__ Cutoff p) {
    __shared__ float scratch[32];
    launch_dependents();
    grid_dependency_wait();
    const float *x = p.x + (u64)blockIdx.x * p.stride;
    float *out = p.out + (u64)blockIdx.x * p.out_stride;
    float sum = 0.0f, square = 0.0f;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) sum += x[i];
    float mean = block_sum(sum, scratch) / (float)p.width;
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) square = fmaf(x[i] - mean, x[i] - mean, square);
    float cutoff = mean + p.deviations * sqrtf(block_sum(square, scratch) / (float)(p.width - 1));
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) out[i] = fmaxf(x[i] - cutoff, 0.0f);
}

KERNEL scale_experts(const __grid_constant__ ScaleExperts p) {
    launch_dependents();
    grid_dependency_wait();
    const float *route = p.route + (u64)blockIdx.x * p.stride;
    float *out = p.out + (u64)blockIdx.x * p.out_stride;
    for (u32 k = threadIdx.x; k < p.experts_used; k += blockDim.x) {
        float expert = route[p.experts_used + k];
        out[k] = route[k] * p.scales[(u32)expert];
        out[p.experts_used + k] = expert;
    }
}

KERNEL expert_sum(const __grid_constant__ ExpertSum p) {
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        float sum = 0.0f;
        for (u32 k = 0; k < p.experts_used; k++) {
            sum = fmaf(p.x[row * p.stride + k * p.width + i], p.route[row * p.route_stride + k], sum);
        }
        p.out[row * p.out_stride + i] = sum;
    }
}
