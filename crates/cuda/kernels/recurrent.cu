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

#define SCAN_WARPS (RECURRENT_THREADS / 32) // of a block

// B and C of some tokens, with zeros behind the last state element.
template <u32 TOKENS, u32 WIDTH> struct ScanTokens {
    float b[TOKENS][WIDTH], c[TOKENS][WIDTH];
};

// Copies B and C of up to TOKENS tokens to shared memory: a warp takes a token's.
template <u32 TOKENS, u32 WIDTH>
DEVICE void copy_tokens(const Scan &p, u32 group, u32 start, u32 count, ScanTokens<TOKENS, WIDTH> &to) {
    u32 lane = threadIdx.x % 32;
    bool has_quads = (p.state_dim | p.b_stride | p.c_stride | (u32)((u64)p.b / 4) | (u32)((u64)p.c / 4)) % 4 == 0;
    for (u32 t = threadIdx.x / 32; t < count; t += SCAN_WARPS) {
        const float *b = p.b + (u64)(start + t) * p.b_stride + group, *c = p.c + (u64)(start + t) * p.c_stride + group;
        if (has_quads) {
            for (u32 at = 4 * lane; at < p.state_dim; at += 128) {
                copy_async(shared_address(to.b[t] + at), b + at);
                copy_async(shared_address(to.c[t] + at), c + at);
            }
        } else {
            for (u32 at = lane; at < p.state_dim; at += 32) {
                copy_async4(shared_address(to.b[t] + at), b + at);
                copy_async4(shared_address(to.c[t] + at), c + at);
            }
        }
    }
}

// Clears what no copy writes: elements behind the last one.
template <u32 TOKENS, u32 WIDTH> DEVICE void clear_tokens(const Scan &p, ScanTokens<TOKENS, WIDTH> (&tokens)[2]) {
    if (p.state_dim == WIDTH) return;
    uint4 *pieces = (uint4 *)tokens;
    for (u32 i = threadIdx.x; i < sizeof(tokens) / 16; i += blockDim.x) pieces[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

// Takes a head's state through a sequence: each warp ROWS rows of it, TOKENS tokens at a time. Lane i has
// elements i, i + 32 and so on of each row, STATES at most. Of TOKENS tokens it prepares those inputs and
// stores that result which belong to its token and row. B, C and the inputs of the next tokens are loaded
// meanwhile.
template <u32 ROWS, u32 TOKENS, u32 STATES, bool BY_CHANNEL> DEVICE void scan_rows(const Scan &p) {
    const u32 WIDTH = 32 * STATES, PAIRS = TOKENS * ROWS;
    __shared__ __align__(16) ScanTokens<TOKENS, WIDTH> tokens[2];
    // Of each warp, token and row: dt * x, and the decay, or by channel dt.
    __shared__ __align__(16) float factors[SCAN_WARPS][2][PAIRS], decays[SCAN_WARPS][2][PAIRS];
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x / p.heads, head = blockIdx.x % p.heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 first = metadata.first(span), end = first + metadata.len(span);
    u32 first_row = (blockIdx.y * SCAN_WARPS + warp) * ROWS;
    u32 group = head / (p.heads / p.groups) * p.state_dim;
    clear_tokens(p, tokens);
    u32 own_token = lane / ROWS, own_row = first_row + lane % ROWS;
    bool exists = lane < PAIRS && own_row < p.head_dim;
    u32 column = exists ? head * p.head_dim + own_row : 0, channel = BY_CHANNEL ? column : head;
    float d = p.d[channel], dt_bias = p.dt_bias[channel], a_head = BY_CHANNEL ? 0.0f : p.a[head];
    float dt = 0.0f, x = 0.0f, gate = 0.0f;
    auto fetch = [&](u32 start, u32 buffer) {
        u32 count = start < end ? min(TOKENS, end - start) : 0;
        copy_tokens(p, group, start, count, tokens[buffer]);
        if (!exists || own_token >= count) return;
        u64 token = start + own_token;
        dt = p.dt[token * p.dt_stride + channel];
        x = p.x[token * p.x_stride + column];
        if (p.gate) gate = p.gate[token * p.gate_stride + column];
    };
    fetch(first, 0);
    u64 first_of_all = ((u64)metadata.state_slot(span) * p.heads + head) * p.head_dim + first_row;
    float *states = p.states + first_of_all * p.state_dim;
    const float *row_a = p.a + (u64)(head * p.head_dim + first_row) * p.state_dim;
    bool is_new = metadata.start(span) == 0;
    float h[ROWS][STATES], a[ROWS][STATES];
#pragma unroll
    for (u32 i = 0; i < ROWS * STATES; i++) {
        u32 r = i / STATES, j = i % STATES, at = 32 * j + lane;
        bool is_in = first_row + r < p.head_dim && at < p.state_dim;
        h[r][j] = is_in && !is_new ? states[r * p.state_dim + at] : 0.0f;
        a[r][j] = BY_CHANNEL && is_in ? row_a[r * p.state_dim + at] : 0.0f;
    }
    for (u32 start = first, buffer = 0; start < end; start += TOKENS, buffer ^= 1) {
        u32 count = min(TOKENS, end - start);
        float own_x = x, own_gate = gate, own_dt = softplus(dt + dt_bias);
        if (lane < PAIRS) {
            factors[warp][buffer][lane] = own_dt * x;
            decays[warp][buffer][lane] = BY_CHANNEL ? own_dt : expf(own_dt * a_head);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        fetch(start + TOKENS, buffer ^ 1);
        if (first_row >= p.head_dim) continue;
        float y[PAIRS] = {};
        auto step = [&](u32 t) {
            float b[STATES], c[STATES];
#pragma unroll
            for (u32 j = 0; j < STATES; j++) {
                b[j] = tokens[buffer].b[t][32 * j + lane];
                c[j] = tokens[buffer].c[t][32 * j + lane];
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                u32 pair = t * ROWS + r;
                float factor = factors[warp][buffer][pair], decay = decays[warp][buffer][BY_CHANNEL ? pair : t * ROWS];
                float dt = decay, sum = 0.0f;
#pragma unroll
                for (u32 j = 0; j < STATES; j++) {
                    if (BY_CHANNEL && 32 * j >= p.state_dim) break;
                    if (BY_CHANNEL) decay = expf(dt * a[r][j]);
                    h[r][j] = fmaf(factor, b[j], decay * h[r][j]);
                    sum = fmaf(h[r][j], c[j], sum);
                }
                y[pair] = sum;
            }
        };
        // Without branches, loads for the next tokens overlap the arithmetic of one.
        if (count == TOKENS) {
#pragma unroll
            for (u32 t = 0; t < TOKENS; t++) step(t);
        } else {
#pragma unroll
            for (u32 t = 0; t < TOKENS; t++) {
                if (t < count) step(t);
            }
        }
        sum_of_each(y);
        if (!exists || own_token >= count) continue;
        u32 token = start + own_token;
        float result = fmaf(d, own_x, y[0]);
        if (p.gate) result = gated(p.act, own_gate, result);
        if (p.out) p.out[(u64)token * p.out_stride + column] = result;
        if (p.half_out) p.half_out[half_at(p.half_stride, token, column)] = to_input(result);
    }
    // Blocks of the next kernel that wait on some multiprocessors would have left fewer places there for this
    // one's, which are all of the same length.
    launch_dependents();
#pragma unroll
    for (u32 i = 0; i < ROWS * STATES; i++) {
        u32 r = i / STATES, at = 32 * (i % STATES) + lane;
        if (first_row + r < p.head_dim && at < p.state_dim) states[r * p.state_dim + at] = h[r][i % STATES];
    }
}

// The scan of a state-space layer, with up to 128 or 256 state elements a row, or with decays by channel.
// Grid: (spans x heads, blocks that share the rows of a head). Bound by latency and shared memory.
#define SCAN(NAME, ROWS, TOKENS, STATES, BY_CHANNEL)                                                  \
    KERNEL __launch_bounds__(RECURRENT_THREADS) NAME(const __grid_constant__ Scan p) {                  \
        grid_dependency_wait();                                                                      \
        scan_rows<ROWS, TOKENS, STATES, BY_CHANNEL>(p);                                               \
    }
SCAN(scan_128, SCAN_ROWS, 16, 4, false)
SCAN(scan_256, SCAN_ROWS, 8, 8, false)
SCAN(scan_by_channel, SCAN_ROWS, 8, 8, true)
// The same for one token of each sequence. Bound by the memory of the state.
SCAN(scan_128_decode, SCAN_DECODE_ROWS, 1, 4, false)
SCAN(scan_256_decode, SCAN_DECODE_ROWS, 1, 8, false)

#define RULE_WARPS (RECURRENT_THREADS / 64) // of a block that prepare tokens; the same number take columns through them
#define RULE_COLUMNS 2u                      // that eight lanes take
static_assert(RULE_BLOCK == RULE_WARPS * 32 / RULE_LANES * RULE_COLUMNS, "all columns of a block");

// What a block needs of the tokens that are prepared together.
template <u32 DIM> struct RuleTokens {
    static const u32 COUNT = 1024 / DIM;
    RuleToken<DIM> tokens[COUNT];
    float values[COUNT][RULE_BLOCK];
};

// The tokens that a warp prepares: every `RULE_WARPS`th. They are loaded while those before them are computed.
template <u32 DIM> struct RuleProducer {
    static const u32 COUNT = RuleTokens<DIM>::COUNT / RULE_WARPS;
    LoadedToken<DIM> loaded[COUNT];
    float value[COUNT];

    __device__ __forceinline__ void load(const DeltaRule &p, u32 head, u32 column, u32 first, u32 end) {
        static_assert(RULE_BLOCK == 32, "a lane has a value");
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 row = first + i * RULE_WARPS;
            if (row >= end) continue;
            const float *qkv = p.qkv + (u64)row * p.qkv_stride;
            loaded[i].load(p, qkv, p.decay + (u64)row * p.decay_stride, p.beta + (u64)row * p.beta_stride, head);
            value[i] = column < p.head_dim ? qkv[(2 * p.key_heads + head) * p.head_dim + column] : 0.0f;
        }
    }

    __device__ __forceinline__ void prepare(const DeltaRule &p, u32 head, u32 warp, u32 count,
                                            RuleTokens<DIM> &to) const {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 t = warp + i * RULE_WARPS;
            if (t >= count) continue;
            RuleToken<DIM> &token = to.tokens[t];
            loaded[i].prepare(p, head, token);
            for (u32 j = LoadedToken<DIM>::round_up32(p.head_dim) + lane; j < DIM; j += 32) {
                token.q[j] = token.k[j] = token.decay[j] = 0.0f;
            }
            to.values[t][lane] = value[i];
        }
    }
};

// Some columns of a head's state, neighbours, by eight lanes: a lane has rows 32 j + 4 lane to
// 32 j + 4 lane + 3.
template <u32 DIM, bool BY_CHANNEL> struct RuleColumns {
    static const u32 QUADS = DIM / 32;
    float s[RULE_COLUMNS][QUADS][4];

    // Calls `four` for four neighbours of the lane's numbers at a time, or `one` for each, where they exist.
    template <class One, class Four>
    __device__ __forceinline__ void each(const DeltaRule &p, float *first, u32 column, const One &one,
                                         const Four &four) {
        u32 lane = threadIdx.x % RULE_LANES;
#pragma unroll
        for (u32 i = 0; i < RULE_COLUMNS * QUADS; i++) {
            u32 x = i / QUADS, row = 32 * (i % QUADS) + 4 * lane;
            if (column + x >= p.head_dim || row >= p.head_dim) continue;
            float *at = first + x * p.head_dim + row;
            if (p.head_dim % 4 == 0) {
                four(s[x][i % QUADS], (float4 *)at);
                continue;
            }
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                if (row + c < p.head_dim) one(s[x][i % QUADS][c], at + c);
            }
        }
    }

    __device__ __forceinline__ void load(const DeltaRule &p, float *first, u32 column, bool is_new) {
#pragma unroll
        for (u32 i = 0; i < RULE_COLUMNS * QUADS * 4; i++) s[i / 4 / QUADS][i / 4 % QUADS][i % 4] = 0.0f;
        if (is_new) return;
        each(p, first, column, [](float &x, float *at) { x = *at; }, [](float (&x)[4], float4 *at) {
            float4 four = *at;
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        });
    }

    __device__ __forceinline__ void store(const DeltaRule &p, float *first, u32 column) {
        each(p, first, column, [](float &x, float *at) { *at = x; },
             [](float (&x)[4], float4 *at) { *at = make_float4(x[0], x[1], x[2], x[3]); });
    }

    // Takes the columns through a token. Lanes get their parts of the results.
    __device__ __forceinline__ void step(const RuleToken<DIM> &token, const float *values,
                                         float (&y)[RULE_COLUMNS]) {
        u32 lane = threadIdx.x % RULE_LANES;
        float k[QUADS][4], seen[RULE_COLUMNS][4] = {}, part[RULE_COLUMNS][4] = {}, delta[RULE_COLUMNS];
        float of_head = token.decay[0];
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            float4 four = ((const float4 *)token.k)[8 * j + lane];
            k[j][0] = four.x, k[j][1] = four.y, k[j][2] = four.z, k[j][3] = four.w;
            float decay[4] = {of_head, of_head, of_head, of_head};
            if (BY_CHANNEL) {
                four = ((const float4 *)token.decay)[8 * j + lane];
                decay[0] = four.x, decay[1] = four.y, decay[2] = four.z, decay[3] = four.w;
            }
#pragma unroll
            for (u32 i = 0; i < RULE_COLUMNS * 4; i++) {
                u32 x = i / 4, c = i % 4;
                s[x][j][c] *= decay[c];
                seen[x][c] = fmaf(s[x][j][c], k[j][c], seen[x][c]);
            }
        }
#pragma unroll
        for (u32 x = 0; x < RULE_COLUMNS; x++) {
            float sum = column_sum((seen[x][0] + seen[x][1]) + (seen[x][2] + seen[x][3]));
            delta[x] = token.beta * (values[x] - sum);
        }
#pragma unroll
        for (u32 j = 0; j < QUADS; j++) {
            float4 four = ((const float4 *)token.q)[8 * j + lane];
            const float q[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 i = 0; i < RULE_COLUMNS * 4; i++) {
                u32 x = i / 4, c = i % 4;
                s[x][j][c] = fmaf(k[j][c], delta[x], s[x][j][c]);
                part[x][c] = fmaf(s[x][j][c], q[c], part[x][c]);
            }
        }
#pragma unroll
        for (u32 x = 0; x < RULE_COLUMNS; x++) y[x] = (part[x][0] + part[x][1]) + (part[x][2] + part[x][3]);
    }
};

// Takes columns of a head's state through a sequence. Half of the warps prepare tokens, while the others
// compute those before them.
template <u32 DIM, bool BY_CHANNEL> DEVICE void delta_rule(const DeltaRule &p) {
    const u32 TOKENS = RuleTokens<DIM>::COUNT;
    __shared__ RuleTokens<DIM> prepared[2];
    StepMetadata metadata = {p.metadata};
    u32 span = blockIdx.x / p.heads, head = blockIdx.x % p.heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first = metadata.first(span), end = first + metadata.len(span), block_column = blockIdx.y * RULE_BLOCK;
    if (warp >= RULE_WARPS) {
        u32 own = warp - RULE_WARPS;
        RuleProducer<DIM> producer = {};
        auto load = [&](u32 start) { producer.load(p, head, block_column + lane, start + own, end); };
        load(first);
        producer.prepare(p, head, own, end - first, prepared[0]);
        load(first + TOKENS);
        sync<RECURRENT_THREADS>();
        for (u32 start = first + TOKENS, buffer = 1; start < end + TOKENS; start += TOKENS, buffer ^= 1) {
            producer.prepare(p, head, own, start < end ? end - start : 0, prepared[buffer]);
            load(start + TOKENS);
            sync<RECURRENT_THREADS>();
        }
        return;
    }
    u32 own_column = threadIdx.x / RULE_LANES * RULE_COLUMNS, column = block_column + own_column;
    u64 first_of_all = ((u64)metadata.state_slot(span) * p.heads + head) * p.head_dim + column;
    float *states = p.states + first_of_all * p.head_dim;
    RuleColumns<DIM, BY_CHANNEL> columns;
    columns.load(p, states, column, metadata.start(span) == 0);
    sync<RECURRENT_THREADS>();
    for (u32 start = first, buffer = 0; start < end; start += TOKENS, buffer ^= 1) {
        u32 count = min(TOKENS, end - start);
#pragma unroll 1
        for (u32 t = 0; t < count; t++) {
            float y[RULE_COLUMNS], *out = p.out + (u64)(start + t) * p.out_stride + head * p.head_dim + column;
            columns.step(prepared[buffer].tokens[t], prepared[buffer].values[t] + own_column, y);
#pragma unroll
            for (u32 x = 0; x < RULE_COLUMNS; x++) {
                float sum = column_sum(y[x]);
                if (lane % RULE_LANES == x && column + x < p.head_dim) out[x] = sum;
            }
        }
        sync<RECURRENT_THREADS>();
    }
    // As of scans.
    launch_dependents();
    columns.store(p, states, column);
}

// The gated delta rule with heads of up to 128 or 256, and with decays by channel. Grid: (spans x heads, blocks
// of columns). Bound by the memory of the state in decode, by latency in prefill.
#define DELTA_RULE(NAME, DIM, BY_CHANNEL)                                                             \
    KERNEL __launch_bounds__(RECURRENT_THREADS, DIM > 128 ? 1 : 3) NAME(const __grid_constant__ DeltaRule p) { \
        grid_dependency_wait();                                                                      \
        delta_rule<DIM, BY_CHANNEL>(p);                                                               \
    }
DELTA_RULE(delta_rule_128, 128, false)
DELTA_RULE(delta_rule_256, 256, false)
DELTA_RULE(delta_rule_128_by_channel, 128, true)
DELTA_RULE(delta_rule_256_by_channel, 256, true)

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
