// Causal convolutions, the selective scan of state-space layers and the gated delta rule, over the
// sequences' state slots; and the bandwidth test.
#include "recurrent.cuh"

// A thread takes a column of some rows of a sequence. Grid: (spans, blocks of columns, blocks of
// rows). The block with the first rows alone reads the state, and then writes it.
KERNEL conv(const __grid_constant__ Conv p) {
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    u32 first = metadata.first(span), len = metadata.len(span), before = p.taps - 1;
    u32 start = blockIdx.z * CONV_ROWS, end = min(len, start + CONV_ROWS);
    if (column >= p.width || start >= len) return;
    bool is_new = metadata.start(span) == 0;
    float *state = p.states + (u64)metadata.state_slot(span) * before * p.width + column;
    const float *x = p.x + (u64)first * p.stride + column;
    const float *weight = p.weight + (u64)column * p.taps;
    for (u32 t = start; t < end; t++) {
        float sum = 0.0f;
        for (u32 k = 0; k < p.taps; k++) {
            float input = t + k >= before ? x[(u64)(t + k - before) * p.stride]
                : is_new ? 0.0f : state[(u64)(t + k) * p.width];
            sum = fmaf(input, weight[k], sum);
        }
        if (p.bias) sum += p.bias[column];
        p.out[(u64)(first + t) * p.out_stride + column] = activate(p.act, sum);
    }
    if (start > 0) return;
    for (u32 i = 0; i < before; i++) {
        state[(u64)i * p.width] = len + i >= before ? x[(u64)(len + i - before) * p.stride]
            : is_new ? 0.0f : state[(u64)(len + i) * p.width];
    }
}

// Takes rows of a head's state through a sequence, a warp each. Time steps, B and C of some tokens
// are prepared together, and their sums over a row's elements are taken together.
DEVICE void scan_rows(const Scan &p, ScanRow row, u32 span, float (&b)[SCAN_TOKENS][MAX_SCAN_STATE],
                      float (&c)[SCAN_TOKENS][MAX_SCAN_STATE]) {
    StepMetadata metadata = {p.metadata};
    u32 lane = threadIdx.x % 32, first = metadata.first(span), len = metadata.len(span);
    row.load_state(p, metadata.state_slot(span), metadata.start(span) == 0);
    for (u32 start = first; start < first + len; start += SCAN_TOKENS) {
        u32 count = min(SCAN_TOKENS, first + len - start);
        __syncthreads();
        for (u32 i = threadIdx.x; i < count * p.state_dim; i += blockDim.x) {
            u32 t = i / p.state_dim, at = i % p.state_dim;
            u64 token = start + t;
            b[t][at] = p.b[token * p.b_stride + row.group + at];
            c[t][at] = p.c[token * p.c_stride + row.group + at];
        }
        // A lane has a token's time step and x.
        float dt = 0.0f, x = 0.0f;
        if (row.exists && lane < count) {
            u64 at = start + lane;
            dt = row.time_step(p.dt[at * p.dt_stride + row.channel]);
            x = p.x[at * p.x_stride + row.column];
        }
        float decay = row.decay(dt);
        __syncthreads();
        float y[SCAN_TOKENS];
#pragma unroll
        for (u32 t = 0; t < SCAN_TOKENS; t++) {
            y[t] = 0.0f;
            float dt_t = __shfl_sync(~0u, dt, t), x_t = __shfl_sync(~0u, x, t), decay_t = __shfl_sync(~0u, decay, t);
            if (t >= count) continue;
            y[t] = row.step(p, dt_t, x_t, decay_t, [&](u32, u32 at) { return b[t][at]; },
                            [&](u32, u32 at) { return c[t][at]; });
        }
        sum_of_each(y);
        if (row.exists && lane < count) row.put(p, start + lane, fmaf(row.d, x, y[0]));
    }
    row.store_state(p, metadata.state_slot(span));
}

// The scan of a state-space layer. Grid: (spans x heads, blocks that share the rows of a head).
// Bound by the memory of the state in decode, by shared memory in prefill.
KERNEL scan(const __grid_constant__ Scan p) {
    launch_dependents();
    grid_dependency_wait();
    __shared__ float b[SCAN_TOKENS][MAX_SCAN_STATE], c[SCAN_TOKENS][MAX_SCAN_STATE];
    u32 warps = blockDim.x / 32, span = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    for (u32 first = blockIdx.y * warps; first < p.head_dim; first += gridDim.y * warps) {
        scan_rows(p, ScanRow(p, head, first + threadIdx.x / 32), span, b, c);
    }
}

// Eight lanes take one column of a head's state through a sequence. Grid: (spans x heads, blocks of
// columns). Bound by the memory of the state in decode, by latency in prefill: so what some tokens
// need is prepared together, and loaded while the tokens before them are computed.
KERNEL delta_rule(const __grid_constant__ DeltaRule p) {
    launch_dependents();
    grid_dependency_wait();
    __shared__ RuleToken<MAX_RULE_DIM> tokens[RULE_TOKENS];
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x / p.heads, head = blockIdx.x % p.heads, warp = threadIdx.x / 32;
    RuleColumn<MAX_RULE_DIM> column(p, head, (blockIdx.y * blockDim.x + threadIdx.x) / RULE_LANES);
    u32 first = metadata.first(span), end = first + metadata.len(span);
    column.load_state(p, metadata.state_slot(span), metadata.start(span) == 0);
    LoadedToken<MAX_RULE_DIM> loaded = {};
    auto load = [&](u32 row) {
        if (row >= end) return;
        const float *decay = p.decay + (u64)row * p.decay_stride;
        loaded.load(p, p.qkv + (u64)row * p.qkv_stride, decay, p.beta + (u64)row * p.beta_stride, head);
    };
    load(first + warp);
    for (u32 start = first; start < end; start += RULE_TOKENS) {
        u32 count = min(RULE_TOKENS, end - start);
        float v[RULE_TOKENS], y[RULE_TOKENS];
#pragma unroll
        for (u32 t = 0; t < RULE_TOKENS; t++) {
            v[t] = t < count && column.exists ? column.value(p, p.qkv + (u64)(start + t) * p.qkv_stride) : 0.0f;
        }
        __syncthreads();
        if (warp < count) loaded.prepare(p, head, tokens[warp]);
        __syncthreads();
        load(start + RULE_TOKENS + warp);
#pragma unroll
        for (u32 t = 0; t < RULE_TOKENS; t++) {
            if (t < count) y[t] = column.step(tokens[t], v[t]);
        }
#pragma unroll
        for (u32 t = 0; t < RULE_TOKENS; t++) {
            if (t >= count) break;
            float sum = column_sum(y[t]);
            if (column.stores()) p.out[(u64)(start + t) * p.out_stride + column.place] = sum;
        }
    }
    column.store_state(p, metadata.state_slot(span));
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
