// Operations on single rows: tables, norms, rotations, elementwise functions, the choice of
// experts; and the pooling of rows.
#include "device.cuh"
#include "planes.cuh"
#include "route.cuh"

// RopeAngles are reduced in double precision: positions are large.
KERNEL angles(const __grid_constant__ RopeAngles p) {
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x;
    double position = Feed{p.metadata}.position(row);
    for (u32 i = threadIdx.x; i < p.rotary_pairs; i += blockDim.x) {
        double turns = p.frequencies[i] * position;
        float sine, cosine;
        sincospif((float)(turns - 2.0 * rint(0.5 * turns)), &sine, &cosine);
        p.out[(u64)row * p.rotary_pairs + i] = make_float2(cosine * p.magnitude, sine * p.magnitude);
    }
}

template <int KIND> DEVICE void embed(const Embed &p) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {p.metadata};
    u32 at = blockIdx.x;
    u32 row = p.by == 0 ? feed.token(at) : p.by == 1 ? feed.position(at) : 0;
    const u8 *tile = p.packed + (u64)(row / TILE_ROWS) * p.chunks * Planes<KIND>::BYTES;
    float scale = p.scales[row] * INPUT_SCALE;
    u32 r = row % TILE_ROWS;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.cols; i += blockDim.x * gridDim.y) {
        u32 lane = r % 8 * 4 + i % CHUNK_COLS / 16;
        const u8 *chunk = tile + i / CHUNK_COLS * Planes<KIND>::BYTES;
        p.out[(u64)at * p.stride + i] = Planes<KIND>::value(chunk, lane, r / 8, i % 16) * scale;
    }
}

KERNEL embed_f16(const __grid_constant__ Embed p) { embed<F16>(p); }
KERNEL embed_s8(const __grid_constant__ Embed p) { embed<S8>(p); }
KERNEL embed_s8x16(const __grid_constant__ Embed p) { embed<S8X16>(p); }
KERNEL embed_u8(const __grid_constant__ Embed p) { embed<U8>(p); }
KERNEL embed_u4(const __grid_constant__ Embed p) { embed<U4>(p); }
KERNEL embed_s24_f16(const __grid_constant__ Embed p) { embed<S24_F16>(p); }
KERNEL embed_s24_s8(const __grid_constant__ Embed p) { embed<S24_S8>(p); }
KERNEL embed_s24_s4(const __grid_constant__ Embed p) { embed<S24_S4>(p); }
KERNEL embed_f32(const __grid_constant__ Embed p) { embed<F32>(p); }

// A block normalises a group of a row.
KERNEL normalize(const __grid_constant__ Norm p) {
    __shared__ float room[32];
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, group = blockIdx.y;
    const float *x = p.x + (u64)row * p.stride + group * p.n;
    float mean = 0.0f, scale;
    if (p.is_layer) {
        for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) mean += x[i];
        mean = block_sum(mean, room) / (float)p.n;
        float square = 0.0f;
        for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) {
            square = fmaf(x[i] - mean, x[i] - mean, square);
        }
        scale = rsqrtf(block_sum(square, room) / (float)p.n + p.eps);
    } else {
        scale = rms_scale(x, p.n, p.eps, room);
    }
    // Several elements at a time: one after the other, each would take a way to memory.
    const u32 COUNT = 8;
    u32 start = p.weight_len == p.n ? 0 : group * p.n;
    for (u32 first = threadIdx.x; first < p.n; first += COUNT * blockDim.x) {
        float y[COUNT], w[COUNT], b[COUNT];
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) {
            u32 i = first + j * blockDim.x;
            bool is_in = i < p.n;
            y[j] = is_in ? x[i] : 0.0f;
            w[j] = is_in ? p.weight[start + i] : 0.0f;
            b[j] = is_in && p.bias ? p.bias[start + i] : 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) {
            u32 i = first + j * blockDim.x, at = group * p.n + i;
            if (i >= p.n) break;
            float z = (y[j] - mean) * scale * w[j];
            if (p.bias) z += b[j];
            if (p.out) p.out[(u64)row * p.out_stride + at] = z;
            if (p.half_out) p.half_out[(u64)row * p.half_stride + at] = to_input(z);
        }
    }
    if (p.half_out && group + 1 == p.groups) {
        for (u32 i = p.groups * p.n + threadIdx.x; i < p.half_stride; i += blockDim.x) {
            p.half_out[(u64)row * p.half_stride + i] = 0;
        }
    }
}

// Makes the parts of a row inputs of products.
KERNEL prepare(const __grid_constant__ ConvertInput p) {
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, part = blockIdx.y;
    const float *x = p.x + (u64)row * p.stride + part * p.cols;
    u16 *out = p.out + ((u64)row * p.parts + part) * p.out_stride;
    for (u32 i = threadIdx.x; i < p.out_stride; i += blockDim.x) out[i] = i < p.cols ? to_input(x[i]) : 0;
}

KERNEL elementwise(const __grid_constant__ Elementwise p) {
    let_next_start();
    wait_for_inputs();
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        float a = p.a[row * p.a_stride + (p.op == 2 ? 0 : i)];
        float b = p.b ? p.b[row * p.b_stride + i] : 0.0f;
        float y;
        switch (p.op) {
        case 0: y = activate(p.act, a); break;
        case 1:
        case 2: y = gated(p.act, a, b); break;
        case 3: y = a + b; break;
        case 4: y = a * p.factor; break;
        default: y = tanhf(a / p.factor) * p.factor; break;
        }
        p.out[row * p.out_stride + i] = y;
    }
}

KERNEL rotate(const __grid_constant__ Rotate p) {
    let_next_start();
    wait_for_inputs();
    u64 row = blockIdx.x;
    const float *x = p.x + row * p.stride;
    float *out = p.out + row * p.out_stride;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        const float *head = x + i / p.head_dim * p.head_dim;
        out[i] = rotated(head, i % p.head_dim, p.cos_sin + row * p.rotary_pairs, p.rotary_pairs, p.is_neox);
    }
}

// Columns of the parts of one value, or of two by turns.
KERNEL arrange(const __grid_constant__ SliceConcat p) {
    let_next_start();
    wait_for_inputs();
    u64 row = blockIdx.x;
    u32 part = p.a_len + p.b_len;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.groups * part; i += blockDim.x * gridDim.y) {
        u32 group = i / part, at = i % part;
        p.out[row * p.out_stride + i] = at < p.a_len
            ? p.a[row * p.a_stride + group * p.a_width + p.a_start + at]
            : p.b[row * p.b_stride + (p.is_b_shared ? 0 : group * p.b_len) + at - p.a_len];
    }
}

KERNEL pool(const __grid_constant__ Pool p) {
    let_next_start();
    wait_for_inputs();
    Feed feed = {p.metadata};
    u32 span = feed.span(feed.output(blockIdx.x));
    u32 first = feed.first(span), len = feed.len(span);
    for (u32 i = threadIdx.x; i < p.width; i += blockDim.x) {
        const float *x = p.x + (u64)first * p.stride + i;
        float y = 0.0f;
        if (p.kind == 0) {
            for (u32 row = 0; row < len; row++) y += x[(u64)row * p.stride];
            y /= (float)len;
        } else {
            y = x[(u64)(p.kind == 1 ? 0 : len - 1) * p.stride];
        }
        p.out[(u64)blockIdx.x * p.out_stride + i] = y;
    }
}

// A block for each row.
KERNEL route(const __grid_constant__ Route p) {
    extern __shared__ __align__(16) float room[];
    let_next_start();
    wait_for_inputs();
    float *out = p.out + (u64)blockIdx.x * p.out_stride;
    const float *scores = p.scores + (u64)blockIdx.x * p.stride;
    auto tell = [&](u32 k, float weight, u32 expert) {
        out[k] = weight;
        out[p.experts_used + k] = (float)expert;
    };
    choose_experts(p, threadIdx.x, blockDim.x, scores, room, [] { __syncthreads(); }, tell);
}

KERNEL expert_sum(const __grid_constant__ ExpertSum p) {
    let_next_start();
    wait_for_inputs();
    u64 row = blockIdx.x;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += blockDim.x * gridDim.y) {
        float sum = 0.0f;
        for (u32 k = 0; k < p.experts_used; k++) {
            sum = fmaf(p.x[row * p.stride + k * p.width + i], p.route[row * p.route_stride + k], sum);
        }
        p.out[row * p.out_stride + i] = sum;
    }
}
