// Recurrent layers in the persistent kernel: convolutions, scans and delta rules of one row, and
// elementwise functions, rotations, slices and conversions beside them. The recurrent state is of earlier
// steps, so it is loaded before inputs are polled. Every block reads only what its results need:
// once the last stage's input exists, nothing is read any more.
#pragma once
#include "elementwise.cuh"
#include "persistent.cuh"
#include "recurrent.cuh"

#if __CUDA_ARCH__ >= 900

// Of `count` elements, those of a block: neighbours.
struct Share {
    u32 first, end;

    __device__ __forceinline__ Share(u32 count) {
        u32 len = (count + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * len + opaque(threadIdx.x);
        end = min(count, (blockIdx.x + 1) * len);
    }
};

// The causal convolution: a thread takes a column.
DEVICE void conv_row(u32 stage) {
    const Conv &p = shared_memory().stages[opaque(stage % 2)].conv;
    u32 before = p.taps - 1;
    bool is_first = shared_memory().is_new;
    Share share(p.width);
#pragma unroll 1
    for (u32 column = share.first; column < share.end; column += THREADS) {
        float *state = p.states + (u64)shared_memory().state_slot * before * p.width + column;
        const float *weight = p.weight + (u64)column * p.taps;
        float sum = 0.0f;
        for (u32 k = 0; k < before; k++) sum = fmaf(is_first ? 0.0f : state[(u64)k * p.width], weight[k], sum);
        float last = weight[before], bias = p.bias ? p.bias[column] : 0.0f, x = poll(p.x + column);
        sum = fmaf(x, last, sum);
        if (p.bias) sum += bias;
        store_relaxed(p.out + column, activate(p.act, sum));
        for (u32 i = 0; i + 1 < before; i++) state[(u64)i * p.width] = is_first ? 0.0f : state[(u64)(i + 1) * p.width];
        state[(u64)(before - 1) * p.width] = x;
    }
}

#define LANE_STATES (MAX_SCAN_STATE / 32) // state elements of a lane

// A row of a head's state, by a warp: lane i has elements i, i + 32 and so on. The arithmetic is that of
// `scan_rows` in recurrent.cu: `cargo xtask emulate` and `conformance` compare their bits.
struct ScanRow {
    u32 head, row, group, channel, column;
    bool exists;
    float h[LANE_STATES], a, d, dt_bias;
    bool is_channelwise;

    __device__ __forceinline__ ScanRow(const Scan &p, u32 head, u32 row)
        : head(head), row(row), exists(row < p.head_dim), is_channelwise(p.is_channelwise) {
        group = head / (p.heads / p.groups) * p.state_dim;
        column = exists ? head * p.head_dim + row : 0;
        channel = is_channelwise ? column : head;
        d = p.d[channel], dt_bias = p.dt_bias[channel];
        a = is_channelwise ? 0.0f : p.a[head];
        if (!is_channelwise) return;
        // Read when they are needed, as registers are scarce.
        for (u32 at = threadIdx.x % 32; at < p.state_dim; at += 32) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.a + (u64)channel * p.state_dim + at));
        }
    }

    __device__ __forceinline__ float *state(const Scan &p, u32 slot) const {
        return p.states + (((u64)slot * p.heads + head) * p.head_dim + row) * p.state_dim;
    }

    __device__ __forceinline__ void load_state(const Scan &p, u32 slot, bool is_new) {
#pragma unroll
        for (u32 j = 0; j < LANE_STATES; j++) {
            u32 at = 32 * j + threadIdx.x % 32;
            h[j] = exists && !is_new && at < p.state_dim ? state(p, slot)[at] : 0.0f;
        }
    }

    __device__ __forceinline__ void store_state(const Scan &p, u32 slot) const {
#pragma unroll
        for (u32 j = 0; j < LANE_STATES; j++) {
            u32 at = 32 * j + threadIdx.x % 32;
            if (exists && at < p.state_dim) state(p, slot)[at] = h[j];
        }
    }

    __device__ __forceinline__ float time_step(float dt) const { return softplus(dt + dt_bias); }

    __device__ __forceinline__ float decay(float dt) const { return expf(dt * a); }

    // Takes the row through a token, with the lane's elements of B and C. Returns the lane's part of the
    // sum of the row's elements times C.
    __device__ __forceinline__ float step(const Scan &p, float dt, float x, float decay,
                                          const float (&b)[LANE_STATES], const float (&c)[LANE_STATES]) {
        float y = 0.0f;
#pragma unroll
        for (u32 j = 0; j < LANE_STATES; j++) {
            u32 at = 32 * j + threadIdx.x % 32;
            if (at >= p.state_dim) break;
            if (is_channelwise) decay = expf(dt * __ldg(p.a + (u64)channel * p.state_dim + at));
            h[j] = fmaf(dt * x, b[j], decay * h[j]);
            y = fmaf(h[j], c[j], y);
        }
        return y;
    }
};

// What two rows of a head need of a token: a lane's elements of B and C, and one of the rows' numbers.
struct ScanInputs {
    float b[LANE_STATES], c[LANE_STATES], number;

    // Loads them once. Of each two lanes, which take one row each, the first have x, the next the time
    // step, and those after them the gate.
    __device__ __forceinline__ void load(const Scan &p, const ScanRow (&rows)[2]) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 j = 0; j < LANE_STATES; j++) {
            u32 at = 32 * j + lane;
            b[j] = at < p.state_dim ? load_once(p.b + rows[0].group + at) : 0.0f;
            c[j] = at < p.state_dim ? load_once(p.c + rows[0].group + at) : 0.0f;
        }
        u32 column = lane % 2 ? rows[1].column : rows[0].column, channel = lane % 2 ? rows[1].channel : rows[0].channel;
        const float *from = lane / 2 == 1 ? p.dt + channel : p.x + column;
        if (lane / 2 == 2 && p.gate) from = p.gate + column;
        number = load_once(from);
    }

    __device__ __forceinline__ bool are_missing() const {
        bool are = is_missing(number);
#pragma unroll
        for (u32 j = 0; j < LANE_STATES; j++) are |= is_missing(b[j]) | is_missing(c[j]);
        return are;
    }

    __device__ __forceinline__ float x(u32 row) const { return __shfl_sync(~0u, number, row); }
    __device__ __forceinline__ float dt(u32 row) const { return __shfl_sync(~0u, number, 2 + row); }
    __device__ __forceinline__ float gate(u32 row) const { return __shfl_sync(~0u, number, 4 + row); }
};

// The scan: a warp takes two rows of a head's state.
DEVICE void scan_rows(u32 stage) {
    const Scan &p = shared_memory().stages[opaque(stage % 2)].scan;
    u32 lane = threadIdx.x % 32, of_head = (p.head_dim + 1) / 2;
#pragma unroll 1
    for (u32 i = opaque(threadIdx.x) / 32 * gridDim.x + blockIdx.x; i < p.heads * of_head; i += WARPS * gridDim.x) {
        u32 head = i / of_head, first = i % of_head * 2;
        ScanRow rows[2] = {ScanRow(p, head, first), ScanRow(p, head, first + 1)};
#pragma unroll
        for (u32 j = 0; j < 2; j++) rows[j].load_state(p, shared_memory().state_slot, shared_memory().is_new);
        // One load at a time while the convolution is not done: others need the bandwidth.
        poll(p.x + rows[0].column);
        ScanInputs inputs;
        do inputs.load(p, rows);
        while (__any_sync(~0u, inputs.are_missing()));
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            ScanRow &row = rows[j];
            float dt = row.time_step(inputs.dt(j)), x = inputs.x(j), gate = inputs.gate(j);
            float of_lane = row.step(p, dt, x, row.decay(dt), inputs.b, inputs.c);
            float y = fmaf(row.d, x, warp_sum(of_lane));
            if (p.gate) y = gated(p.act, gate, y);
            if (lane == 0 && row.exists && p.out) store_relaxed(p.out + row.column, y);
            if (lane == 0 && row.exists && p.half_out) store_relaxed(p.half_out + row.column, to_input(y));
            row.store_state(p, shared_memory().state_slot);
        }
    }
}

// A column of a head's state, by eight lanes: a lane has rows 32 j + 4 lane to 32 j + 4 lane + 3. The
// arithmetic is that of `delta_rule` in recurrent.cu, and bits are compared likewise.
template <u32 DIM> struct RuleColumn {
    static const u32 QUADS = DIM / RULE_LANES / 4;
    u32 head, column, lane, place; // place: in the result
    u32 value_at, quads;
    bool exists;
    float s[QUADS][4];

    __device__ __forceinline__ RuleColumn(const DeltaRule &p, u32 head, u32 column)
        : head(head), column(column), lane(threadIdx.x % RULE_LANES), exists(column < p.head_dim) {
        place = head * p.head_dim + column;
        value_at = 2 * p.key_heads * p.head_dim + place;
        quads = (p.head_dim + 31) / 32;
    }

    __device__ __forceinline__ float *state(const DeltaRule &p, u32 slot) const {
        return p.states + (((u64)slot * p.heads + head) * p.head_dim + column) * p.head_dim;
    }

    __device__ __forceinline__ void load_state(const DeltaRule &p, u32 slot, bool is_new) {
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                u32 row = 32 * j + 4 * lane + c;
                s[j][c] = exists && !is_new && row < p.head_dim ? state(p, slot)[row] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void store_state(const DeltaRule &p, u32 slot) const {
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                u32 row = 32 * j + 4 * lane + c;
                if (exists && row < p.head_dim) state(p, slot)[row] = s[j][c];
            }
        }
    }

    // Takes the column through a token. Returns the lane's part of the result.
    __device__ __forceinline__ float step(const RuleToken<DIM> &token, float v) {
        float seen[4] = {}, y[4] = {};
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            if (j >= quads) break;
            float4 k = ((const float4 *)token.k)[8 * j + lane], decay = ((const float4 *)token.decay)[8 * j + lane];
            const float of_k[4] = {k.x, k.y, k.z, k.w}, of_decay[4] = {decay.x, decay.y, decay.z, decay.w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                s[j][c] *= of_decay[c];
                seen[c] = fmaf(s[j][c], of_k[c], seen[c]);
            }
        }
        float delta = token.beta * (v - column_sum((seen[0] + seen[1]) + (seen[2] + seen[3])));
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            if (j >= quads) break;
            float4 k = ((const float4 *)token.k)[8 * j + lane], q = ((const float4 *)token.q)[8 * j + lane];
            const float of_k[4] = {k.x, k.y, k.z, k.w}, of_q[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                s[j][c] = fmaf(of_k[c], delta, s[j][c]);
                y[c] = fmaf(s[j][c], of_q[c], y[c]);
            }
        }
        return (y[0] + y[1]) + (y[2] + y[3]);
    }

    __device__ __forceinline__ bool stores() const { return exists && lane == 0; }
};

#define BLOCK_COLUMNS (THREADS / RULE_LANES) // of a head's state that a block takes at once

// The delta rule: a block takes some columns of a head's state.
DEVICE void delta_rule_row(u32 stage) {
    const DeltaRule &p = shared_memory().stages[opaque(stage % 2)].delta_rule;
    RuleToken<PERSISTENT_RULE_DIM> &token = *(RuleToken<PERSISTENT_RULE_DIM> *)shared_memory().workspace;
    u32 t = opaque(threadIdx.x), of_head = (p.head_dim + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
#pragma unroll 1
    for (u32 item = blockIdx.x; item < p.heads * of_head; item += gridDim.x) {
        u32 head = item / of_head;
        RuleColumn<PERSISTENT_RULE_DIM> column(p, head, item % of_head * BLOCK_COLUMNS + t / RULE_LANES);
        column.load_state(p, shared_memory().state_slot, shared_memory().is_new);
        sync<THREADS>();
        if (t < 32) {
            LoadedToken<PERSISTENT_RULE_DIM> loaded;
            // One load at a time while the convolution is not done.
            if (column.exists) poll(p.qkv + column.value_at);
            do loaded.load(p, p.qkv, p.decay, p.beta, head, load_once);
            while (loaded.any([](float x) { return is_missing(x); }));
            loaded.prepare(p, head, token);
        }
        float v = column.exists ? poll(p.qkv + column.value_at) : 0.0f;
        sync<THREADS>();
        float y = column_sum(column.step(token, v));
        if (column.stores()) store_relaxed(p.out + column.place, y);
        column.store_state(p, shared_memory().state_slot);
    }
}

DEVICE void elementwise_row(u32 stage) {
    const Elementwise &p = shared_memory().stages[opaque(stage % 2)].elementwise;
    Share share(max(p.width, p.half_stride));
#pragma unroll 1
    for (u32 i = share.first; i < share.end; i += THREADS) {
        bool is_in = i < p.width;
        float a = 0.0f, b = 0.0f;
        if (is_in) {
            do {
                a = load_once(p.a + column_of_a(p, i));
                if (p.b) b = load_once(p.b + i);
            } while (is_missing(a) || is_missing(b));
        }
        float y = is_in ? elementwise(p, a, b) : 0.0f;
        if (p.out && is_in) store_relaxed(p.out + i, y);
        if (p.half_out) store_relaxed(p.half_out + i, to_input(y));
    }
}

DEVICE void slice_concat_row(u32 stage) {
    const SliceConcat &p = shared_memory().stages[opaque(stage % 2)].slice_concat;
    Share share(p.groups * (p.a_len + p.b_len));
#pragma unroll 1
    for (u32 i = share.first; i < share.end; i += THREADS) store_relaxed(p.out + i, poll(source(p, p.a, p.b, i)));
}

DEVICE void rotate_row(u32 stage) {
    const Rotate &p = shared_memory().stages[opaque(stage % 2)].rotate;
    Share share(p.width);
#pragma unroll 1
    for (u32 i = share.first; i < share.end; i += THREADS) {
        const float *head = p.x + i / p.head_dim * p.head_dim;
        store_relaxed(p.out + i, rope_element(head, i % p.head_dim, p.cos_sin, p.rotary_pairs, p.is_neox, poll));
    }
}

DEVICE void convert_input_row(u32 stage) {
    const ConvertInput &p = shared_memory().stages[opaque(stage % 2)].convert_input;
    Share share(p.parts * p.out_stride);
#pragma unroll 1
    for (u32 i = share.first; i < share.end; i += THREADS) {
        u32 part = i / p.out_stride, at = i % p.out_stride;
        store_relaxed(p.out + i, at < p.cols ? to_input(poll(p.x + part * p.cols + at)) : (u16)0);
    }
}

#endif
