// Causal convolutions and the selective scan of state-space layers, over the sequences' state
// slots; and the bandwidth test.
#include "device.cuh"

// A thread takes a column of a sequence. Grid: (spans, blocks of columns).
KERNEL conv(const __grid_constant__ Conv p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.width) return;
    u32 first = metadata.first(span), len = metadata.len(span), before = p.taps - 1;
    bool is_new = metadata.start(span) == 0;
    float *state = p.states + (u64)metadata.state_slot(span) * before * p.width + column;
    const float *x = p.x + (u64)first * p.stride + column;
    const float *weight = p.weight + (u64)column * p.taps;
    for (u32 t = 0; t < len; t++) {
        float sum = 0.0f;
        for (u32 k = 0; k < p.taps; k++) {
            float input = t + k >= before ? x[(u64)(t + k - before) * p.stride]
                : is_new ? 0.0f : state[(u64)(t + k) * p.width];
            sum = fmaf(input, weight[k], sum);
        }
        if (p.bias) sum += p.bias[column];
        p.out[(u64)(first + t) * p.out_stride + column] = sum;
    }
    for (u32 i = 0; i < before; i++) {
        state[(u64)i * p.width] = len + i >= before ? x[(u64)(len + i - before) * p.stride]
            : is_new ? 0.0f : state[(u64)(len + i) * p.width];
    }
}

#define STATES 8 // state elements of a lane

// A warp takes one row of a head's state through a sequence. Grid: (spans x heads, blocks of rows).
// Bound by latency in decode, by arithmetic in prefill.
KERNEL scan(const __grid_constant__ Scan p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 lane = threadIdx.x % 32, span = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    u32 i = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= p.head_dim) return;
    u32 first = metadata.first(span), len = metadata.len(span);
    u32 group = head / (p.heads / p.groups) * p.state_dim;
    float *state = p.states
        + (((u64)metadata.state_slot(span) * p.heads + head) * p.head_dim + i) * p.state_dim;
    float h[STATES];
#pragma unroll
    for (int j = 0; j < STATES; j++) {
        u32 at = 32 * j + lane;
        h[j] = metadata.start(span) > 0 && at < p.state_dim ? state[at] : 0.0f;
    }
    float a = p.a[head], d = p.d[head], dt_bias = p.dt_bias[head];
    for (u32 row = first; row < first + len; row++) {
        float dt = p.dt[(u64)row * p.dt_stride + head] + dt_bias;
        dt = dt > 20.0f ? dt : log1pf(expf(dt));
        float decay = expf(dt * a), x = p.x[(u64)row * p.x_stride + head * p.head_dim + i];
        float y = 0.0f;
#pragma unroll
        for (int j = 0; j < STATES; j++) {
            u32 at = 32 * j + lane;
            if (at < p.state_dim) {
                h[j] = fmaf(dt * x, p.b[(u64)row * p.b_stride + group + at], decay * h[j]);
                y = fmaf(h[j], p.c[(u64)row * p.c_stride + group + at], y);
            }
        }
        y = warp_sum(y);
        if (lane == 0) p.out[(u64)row * p.out_stride + head * p.head_dim + i] = fmaf(d, x, y);
    }
#pragma unroll
    for (int j = 0; j < STATES; j++) {
        u32 at = 32 * j + lane;
        if (at < p.state_dim) state[at] = h[j];
    }
}

// Reads memory at full bandwidth, to measure it.
KERNEL read_all(const __grid_constant__ ReadAll p) {
    u32 sum = 0;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += 4 * step) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (i + j * step < p.count) {
                uint4 v = __ldg(p.from + i + j * step);
                sum += v.x ^ v.y ^ v.z ^ v.w;
            }
        }
    }
    if (sum == 0x12345678u) p.sums[0] = 1.0f;
}
