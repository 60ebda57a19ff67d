// What products with weights share: their parameters and what is done with each sum.
//
// A sum over columns is taken in up to sixteen parts of `part` chunks each, as the plan
// alone says. Within a part it runs from chunk to chunk through `mma`, whose order is fixed; the
// parts are added in order. So a row has the same bits whether it comes alone or with others.
#pragma once
#include "planes.cuh"

#define ROW_BYTES (2 * CHUNK_COLS) // of a chunk of a row of input
#define NOBODY ~0u // a row in order that fills an expert's up to a multiple of eight

// The rows that a column of blocks takes.
struct Column {
    u32 expert, first, count;

    __device__ __forceinline__ Column(const Gemm &m, u32 number, u32 width) {
        if (m.groups) {
            uint4 group = m.groups[number];
            expert = group.x, first = group.y, count = group.z;
        } else {
            expert = 0, first = number * width, count = min(width, m.matmul.rows - first);
        }
    }
};

// The row of the result that a row in order makes.
DEVICE u32 result_row(const Gemm &m, u32 row) { return m.groups ? m.permutation[row] : row; }

DEVICE u32 input_row(const Matmul &p, u32 row) {
    return p.gathers_outputs ? Feed{p.metadata}.output(row) : row;
}

// The matrix that a tile belongs to.
DEVICE u32 matrix_of(const Matmul &p, u32 tile) {
    u32 i = 0;
    while (i + 1 < p.matrix_count && tile >= p.matrices[i + 1].first_tile) i++;
    return i;
}

// The scale of a row of a matrix, or of an expert's.
DEVICE float row_scale(const Matrix &m, u32 expert, u32 row) {
    return m.scales[expert * m.tiles * TILE_ROWS + row];
}

// A sum with its row's scale and bias.
DEVICE float finished(const Matrix &m, u32 expert, u32 row, float sum, float scale) {
    float y = sum * scale;
    return m.bias ? y + m.bias[expert * m.rows + row] : y;
}

// What is added to row `row` of matrix 0 for row `at` of the result.
DEVICE float added(const Matmul &p, u32 row, u32 at) {
    bool is_in = p.residual && row < p.matrices[0].rows;
    return is_in ? p.residual[(u64)at * p.residual_stride + row] : 0.0f;
}

// Row `row` of matrix `i`, for row `at` of the result.
DEVICE void emit(const Matmul &p, u32 i, u32 expert, u32 row, u32 at, float sum, float scale,
                 float residual) {
    const Matrix &m = p.matrices[i];
    if (row >= m.rows) return;
    float y = finished(m, expert, row, sum, scale);
    if (p.residual && i == 0) y = residual + y;
    publish(m.out + (u64)at * m.out_stride + row, y);
}

// Likewise of a gated product: matrix 0 makes the gate.
DEVICE void emit_gated(const Matmul &p, u32 expert, u32 row, u32 at, float gate, float up,
                       float gate_scale, float up_scale) {
    const Matrix &m = p.matrices[0];
    if (row >= m.rows) return;
    float y = gated(p.act, finished(m, expert, row, gate, gate_scale),
                    finished(p.matrices[1], expert, row, up, up_scale));
    if (p.half_out) {
        publish(p.half_out + (u64)at * p.half_stride + row, to_input(y));
    } else {
        publish(m.out + (u64)at * m.out_stride + row, y);
    }
}

// Products with weights in f32: a block for a row of weights, four neighbours a thread, in plain arithmetic.
#define EXACT_THREADS 512u

// Where four columns of a row of f32 weights are.
DEVICE const float4 *exact_weights(const Matmul &p, u32 expert, u32 row, u32 quad) {
    const Matrix &m = p.matrices[0];
    const u32 QUADS = CHUNK_COLS / 4;
    u64 tile = (u64)expert * m.tiles + row / TILE_ROWS;
    const u8 *chunk = m.packed + (tile * p.chunks + quad / QUADS) * Planes<F32>::BYTES;
    return (const float4 *)chunk + row % TILE_ROWS * QUADS + quad % QUADS;
}

DEVICE float add_products(const float4 &w, const float4 &x, float sum) {
    return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sum))));
}
