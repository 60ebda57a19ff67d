// What all matmul kernels share: row groups, scales of rows and the epilogue.
//
// A sum over columns is taken in up to sixteen split-K slices of `slice_chunks` chunks each, which
// the plan alone decides. Within a slice it runs from chunk to chunk through `mma`, whose order is
// fixed; slices are added in order. So a row has the same bits alone and among others.
#pragma once
#include "packed.cuh"

#define ROW_BYTES (2 * CHUNK_COLS) // of a chunk of an input row
#define NO_ROW ~0u // pads the permuted rows of an expert to a multiple of eight

// The rows that a column of blocks takes: of one expert in a grouped GEMM.
struct RowGroup {
    u32 expert, first, count;

    __device__ __forceinline__ RowGroup(const Gemm &m, u32 number, u32 width) {
        if (m.groups) {
            uint4 group = m.groups[number];
            expert = group.x, first = group.y, count = group.z;
        } else {
            expert = 0, first = number * width, count = min(width, m.matmul.rows - first);
        }
    }
};

// The result row of a permuted row.
DEVICE u32 result_row(const Gemm &m, u32 row) { return m.groups ? m.permutation[row] : row; }

DEVICE u32 input_row(const Matmul &p, u32 row) { return p.metadata ? StepMetadata{p.metadata}.output(row) : row; }

// An entry in a table of experts: the address of the expert's tiles, and ON_HOST if they are only in
// memory of the host.
DEVICE u64 expert_entry(const Matrix &m, u32 expert) { return __ldg((const u64 *)m.packed + expert); }

// The packed tiles of a matrix, or of one of its experts.
DEVICE const u8 *packed_tiles(const Matmul &p, const Matrix &m, u32 expert) {
    return (const u8 *)(p.experts ? (const void *)(expert_entry(m, expert) & ~ON_HOST) : m.packed);
}

// Loads the addresses of experts to L1, one in each line, before it is known which are needed.
DEVICE void prefetch_experts(const Matmul &p, u32 thread, u32 matrices) {
    const u32 LINE = 16;
    for (u32 i = 0; i < matrices; i++) {
        const u64 *table = (const u64 *)p.matrices[i].packed;
        u64 unused;
        for (u32 at = LINE * thread; at < p.experts; at += LINE * 32) {
            asm volatile("ld.global.u64 %0, [%1];" : "=l"(unused) : "l"(table + at));
        }
    }
}

// The matrix of a tile.
DEVICE u32 matrix_of(const Matmul &p, u32 tile) {
    u32 i = 0;
    while (i + 1 < p.matrix_count && tile >= p.matrices[i + 1].first_tile) i++;
    return i;
}

// The scale of a row of a matrix, or of an expert's: a power of two, by its exponent.
DEVICE u32 row_exponent(const Matrix &m, u32 expert, u32 row) {
    return m.exponents[expert * m.tiles * TILE_ROWS + row];
}

// A sum times its row's scale, plus the bias.
DEVICE float scale_and_bias(const Matrix &m, u32 expert, u32 row, float sum, u32 exponent) {
    float y = sum * power_of_two(exponent);
    return m.bias ? y + m.bias[expert * m.rows + row] : y;
}

// The residual of row `row` of matrix 0 for result row `at`.
DEVICE float residual_at(const Matmul &p, u32 row, u32 at) {
    bool is_in = p.residual && row < p.matrices[0].rows;
    return is_in ? p.residual[(u64)at * p.residual_stride + row] : 0.0f;
}

// Stores a number also at the same place of the other devices that share the matmul.
template <class T> DEVICE void store_on_peers(const Matmul &p, T *to, T x) {
#pragma unroll 1
    for (u32 i = 0; i < p.peers; i++) store_relaxed_system((T *)((u8 *)to + __ldg(p.peer_offsets + i)), x);
}

// Stores a result. Without `ALL_DEVICES`, `store_again_on_peers` has to follow.
template <bool ALL_DEVICES = true, class T> DEVICE void store_result(const Matmul &p, T *to, T x) {
    store_relaxed(to, x);
    if (ALL_DEVICES) store_on_peers(p, to, x);
}

// Stores the gated or activated result of row `row` of a matrix for result row `at`, as a float or as a
// matmul input.
DEVICE void store_activated(const Matmul &p, const Matrix &m, u32 row, u32 at, float y) {
    if (p.half_out) {
        store_result(p, p.half_out + half_at(p.half_stride, at, row), to_input(y));
    } else {
        store_result(p, m.out + (u64)at * m.out_stride + row, y);
    }
}

// Epilogue: scale, bias and activation or residual of row `row` of matrix `i`, for result row `at`.
DEVICE void epilogue(const Matmul &p, u32 i, u32 expert, u32 row, u32 at, float sum, u32 exponent,
                     float residual) {
    const Matrix &m = p.matrices[i];
    if (row >= m.rows) return;
    float y = scale_and_bias(m, expert, row, sum, exponent);
    if (p.has_act_epilogue) return store_activated(p, m, row, at, activate(p.act, y));
    if (p.residual && i == 0) y = residual + y * p.factor;
    store_result(p, m.out + (u64)at * m.out_stride + row, y);
}

// Epilogue of a gated matmul: matrix 0 is the gate, matrix 1 the up projection.
DEVICE void epilogue_gated(const Matmul &p, u32 expert, u32 row, u32 at, float gate, float up,
                           u32 gate_exponent, u32 up_exponent) {
    const Matrix &m = p.matrices[0];
    if (row >= m.rows) return;
    float y = gated(p.act, scale_and_bias(m, expert, row, gate, gate_exponent),
                    scale_and_bias(p.matrices[1], expert, row, up, up_exponent));
    store_activated(p, m, row, at, y);
}

#define ANY_ACTIVATION ~0u

// What a row's sums are multiplied by, and its bias, for many of them.
struct RowScale {
    float factor, bias;
    bool has_bias;

    RowScale() = default;
    __device__ __forceinline__ RowScale(const Matrix &m, u32 expert, u32 row, u32 exponent) {
        factor = power_of_two(exponent);
        has_bias = m.bias;
        bias = has_bias ? m.bias[expert * m.rows + row] : 0.0f;
    }

    // As `scale_and_bias`.
    __device__ __forceinline__ float of(float sum) const {
        float y = sum * factor;
        return has_bias ? y + bias : y;
    }
};

// The epilogue of many results of `ROWS` weight rows, each `DISTANCE` behind the last; of a gated matmul, of
// rows of the gate and of the up projection. What they have in common is read once: for each result that
// would take most of the time. The arithmetic is that of `epilogue` and `epilogue_gated`.
template <bool GATED, u32 ROWS, u32 DISTANCE, bool ALL_DEVICES> struct RowEpilogue {
    const Matmul &p;
    u32 row, rows; // the first one, and those of the matrix
    RowScale scales[ROWS], up_scales[ROWS];
    float *out;
    u32 stride;
    bool has_residuals;
    bool is_whole; // all rows exist, and their results and residuals are aligned: one access takes them

    __device__ __forceinline__ RowEpilogue(const Matmul &p, u32 i, u32 expert, u32 row) : p(p), row(row) {
        const Matrix &m = p.matrices[i];
        rows = m.rows;
#pragma unroll
        for (u32 j = 0; j < ROWS; j++) {
            u32 existing = min(row + j * DISTANCE, rows - 1);
            scales[j] = RowScale(m, expert, existing, row_exponent(m, expert, existing));
            if (!GATED) continue;
            const Matrix &up = p.matrices[1];
            up_scales[j] = RowScale(up, expert, existing, row_exponent(up, expert, existing));
        }
        has_residuals = !GATED && p.residual && i == 0;
        out = m.out;
        stride = m.out_stride;
        u64 address_bits = (u64)out | 4 * (u64)stride;
        if (has_residuals) address_bits |= (u64)p.residual | 4 * (u64)p.residual_stride;
        is_whole = DISTANCE == 1 && row + ROWS <= rows && address_bits % 16 == 0;
    }

    __device__ __forceinline__ bool exists(u32 j) const { return row + j * DISTANCE < rows; }

    // Reads the residuals of result row `at`.
    __device__ __forceinline__ void residual(u32 at, float (&to)[ROWS]) const {
        const float *from = p.residual + (u64)at * p.residual_stride + row;
        if (ROWS == 4 && is_whole && has_residuals) {
            float4 x = *(const float4 *)from;
            to[0] = x.x, to[1 % ROWS] = x.y, to[2 % ROWS] = x.z, to[3 % ROWS] = x.w;
            return;
        }
#pragma unroll
        for (u32 j = 0; j < ROWS; j++) to[j] = has_residuals && exists(j) ? from[j * DISTANCE] : 0.0f;
    }

    // The results of some input rows. `others` are the up projection's sums, or the residuals.
    template <u32 N>
    __device__ __forceinline__ void finish(float (&sums)[N][ROWS], const float (&others)[N][ROWS]) const {
        // One branch for all of them, so that their computations overlap.
        if (GATED && p.act == SILU) {
            finish<N, SILU>(sums, others);
        } else {
            finish<N, ANY_ACTIVATION>(sums, others);
        }
    }

    // The same where the activation function is known.
    template <u32 N, u32 ACT>
    __device__ __forceinline__ void finish(float (&sums)[N][ROWS], const float (&others)[N][ROWS]) const {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
#pragma unroll
            for (u32 j = 0; j < ROWS; j++) {
                float y = scales[j].of(sums[i][j]);
                if (GATED) {
                    y = gated(ACT == ANY_ACTIVATION ? p.act : ACT, y, up_scales[j].of(others[i][j]));
                } else if (has_residuals) {
                    y = others[i][j] + y * p.factor;
                }
                sums[i][j] = y;
            }
        }
    }

    // The activated results of an input row. Not of many at once: the functions are long.
    __device__ __forceinline__ void activate_row(float (&sums)[ROWS]) const {
#pragma unroll
        for (u32 j = 0; j < ROWS; j++) sums[j] = activate(p.act, scales[j].of(sums[j]));
    }

    // Stores the results of input row `at`.
    __device__ __forceinline__ void store(u32 at, const float (&y)[ROWS]) const {
        if (p.half_out) {
            if (!ALL_DEVICES && DISTANCE == 1 && exists(ROWS - 1)) {
                // Rows are even, and so are strides. Swizzled halves are neighbours in pairs only.
#pragma unroll
                for (u32 j = 0; j < ROWS; j += 2) {
                    u32 pair = to_input(y[j]) | (u32)to_input(y[j + 1]) << 16;
                    *(u32 *)(p.half_out + half_at(p.half_stride, at, row + j)) = pair;
                }
                return;
            }
#pragma unroll
            for (u32 j = 0; j < ROWS; j++) {
                u16 *to = p.half_out + half_at(p.half_stride, at, row + j * DISTANCE);
                if (exists(j)) store_result<ALL_DEVICES>(p, to, to_input(y[j]));
            }
            return;
        }
        float *to = out + (u64)at * stride + row;
        if (!ALL_DEVICES && ROWS == 4 && is_whole) {
            *(float4 *)to = make_float4(y[0], y[1], y[2 % ROWS], y[3 % ROWS]);
            return;
        }
#pragma unroll
        for (u32 j = 0; j < ROWS; j++) {
            if (exists(j)) store_result<ALL_DEVICES>(p, to + j * DISTANCE, y[j]);
        }
    }
};

// Stores a result that this thread has stored on this device on the others.
template <bool GATED> DEVICE void store_again_on_peers(const Matmul &p, u32 i, u32 row, u32 at) {
    const Matrix &m = p.matrices[GATED ? 0 : i];
    if (row >= m.rows) return;
    if (p.half_out) {
        u16 *half = p.half_out + half_at(p.half_stride, at, row);
        store_on_peers(p, half, *half);
    } else {
        float *result = m.out + (u64)at * m.out_stride + row;
        store_on_peers(p, result, *result);
    }
}

// Matmuls with f32 weights (gemv_f32): a block takes weight rows, a thread four neighbouring
// columns at a time.

// Address of four columns of a row of f32 weights, in their packed tiles.
DEVICE const float4 *f32_weights(const Matmul &p, const u8 *packed, u32 row, u32 quad) {
    const u32 QUADS = CHUNK_COLS / 4;
    const u8 *chunk = packed + ((u64)(row / TILE_ROWS) * p.chunks + quad / QUADS) * Packed<F32>::BYTES;
    return (const float4 *)chunk + row % TILE_ROWS * QUADS + quad % QUADS;
}

DEVICE float fma4(const float4 &w, const float4 &x, float sum) {
    return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sum))));
}
