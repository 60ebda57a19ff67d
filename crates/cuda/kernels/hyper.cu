// Hyper-connections: sums of the parts of rows, and the weights of these sums. Bound by memory and
// by launch latency.
#include "device.cuh"

// Sums of the parts of a row, one part after the other. Grid: (rows, blocks of elements).
KERNEL mix(const __grid_constant__ Mix p) {
    launch_dependents();
    grid_dependency_wait();
    u64 row = blockIdx.x;
    const float *x = p.x + row * p.stride, *weights = p.weights + row * p.weight_stride;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.results * p.width; i += blockDim.x * gridDim.y) {
        u32 result = i / p.width, column = i % p.width;
        float sum = 0.0f;
        for (u32 part = 0; part < p.parts; part++) {
            sum = fmaf(weights[part * p.results + result], x[part * p.width + column], sum);
        }
        p.out[row * p.out_stride + i] = sum;
    }
}

// Divides `count` numbers that are `step` apart by their sum plus `eps`.
DEVICE void divide_by_sum(float *x, u32 count, u32 step, float eps) {
    float sum = 0.0f;
    for (u32 i = 0; i < count; i++) sum += x[i * step];
    for (u32 i = 0; i < count; i++) x[i * step] /= sum + eps;
}

// The weights of hyper-connections: a warp takes a row, a lane a stream of it.
KERNEL hyper_weights(const __grid_constant__ HyperWeights p) {
    extern __shared__ __align__(16) float square[]; // [streams, streams]
    launch_dependents();
    grid_dependency_wait();
    u32 n = p.streams, lane = threadIdx.x;
    const float *x = p.x + (u64)blockIdx.x * p.stride;
    float *out = p.out + (u64)blockIdx.x * p.out_stride;
    auto affine = [&](u32 i) { return fmaf(x[i], p.scale[min(i / n, 2u)], p.base[i]); };
    for (u32 i = lane; i < n; i += 32) {
        out[i] = sigmoid(affine(i)) + p.eps;
        if (p.width > n) out[n + i] = 2.0f * sigmoid(affine(n + i));
    }
    if (p.width == n) return;
    for (u32 row = lane; row < n; row += 32) {
        float *to = square + row * n, row_max = -INFINITY_F, sum = 0.0f;
        for (u32 i = 0; i < n; i++) row_max = fmaxf(row_max, affine((2 + row) * n + i));
        for (u32 i = 0; i < n; i++) {
            to[i] = expf(affine((2 + row) * n + i) - row_max);
            sum += to[i];
        }
        for (u32 i = 0; i < n; i++) to[i] = to[i] / sum + p.eps;
    }
    for (u32 iteration = 0; iteration < p.iterations; iteration++) {
        if (iteration > 0) {
            for (u32 row = lane; row < n; row += 32) divide_by_sum(square + row * n, n, 1, p.eps);
        }
        __syncwarp();
        for (u32 column = lane; column < n; column += 32) divide_by_sum(square + column, n, n, p.eps);
        __syncwarp();
    }
    for (u32 i = lane; i < n * n; i += 32) out[2 * n + i] = square[i];
}
