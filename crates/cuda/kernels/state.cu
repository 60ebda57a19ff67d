// Convolutions and state-space layers: what a sequence carries along in a cell of fixed size.
#include "device.cuh"

// A thread follows a column of a sequence: blocks are a span and some columns.
KERNEL conv(const __grid_constant__ Conv p) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {p.metadata};
    u32 span = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.width) return;
    u32 first = feed.first(span), len = feed.len(span), before = p.taps - 1;
    bool is_new = feed.start(span) == 0;
    float *cell = p.states + (u64)feed.cell(span) * before * p.width + column;
    const float *x = p.x + (u64)first * p.stride + column;
    const float *weight = p.weight + (u64)column * p.taps;
    for (u32 t = 0; t < len; t++) {
        float sum = 0.0f;
        for (u32 k = 0; k < p.taps; k++) {
            float input = t + k >= before ? x[(u64)(t + k - before) * p.stride]
                : is_new ? 0.0f : cell[(u64)(t + k) * p.width];
            sum = fmaf(input, weight[k], sum);
        }
        if (p.bias) sum += p.bias[column];
        p.out[(u64)(first + t) * p.out_stride + column] = sum;
    }
    for (u32 i = 0; i < before; i++) {
        cell[(u64)i * p.width] = len + i >= before ? x[(u64)(len + i - before) * p.stride]
            : is_new ? 0.0f : cell[(u64)(len + i) * p.width];
    }
}

#define STATES 8 // elements of a row of state that a lane holds

// A warp follows one row of a head's state; blocks are a span and a head, and some rows.
KERNEL scan(const __grid_constant__ Scan p) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {p.metadata};
    u32 lane = threadIdx.x % 32, span = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    u32 i = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= p.head_dim) return;
    u32 first = feed.first(span), len = feed.len(span);
    u32 group = head / (p.heads / p.groups) * p.state_dim;
    float *cell = p.states
        + (((u64)feed.cell(span) * p.heads + head) * p.head_dim + i) * p.state_dim;
    float h[STATES];
#pragma unroll
    for (int j = 0; j < STATES; j++) {
        u32 at = 32 * j + lane;
        h[j] = feed.start(span) > 0 && at < p.state_dim ? cell[at] : 0.0f;
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
        if (at < p.state_dim) cell[at] = h[j];
    }
}

// Reads memory as fast as it can be read: for the bandwidth.
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
