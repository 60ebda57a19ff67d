// Products for many rows of input: tensor cores set their speed. A block takes 128 weight rows and
// 128 input rows; a warp two tiles of weights, which it reads in the order of `mma` without
// shared memory, and 64 input rows, which come through shared memory three chunks ahead. On Hopper it is
// left with 2:4 weights: `wide` does the others.
#include "product.cuh"

#define INPUTS 128u
#define PITCH 144u // bytes of a chunk of an input row in shared memory: no two lanes share a bank
#define STAGES 3u
#define TILES_OF_BLOCK 8u

DEVICE void copy_async(u32 to, const void *from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// One chunk of all input rows of the block; rows that are not there are zero.
DEVICE void fetch_inputs(const Matmul &p, u32 count, u32 chunk, u32 to, const u16 *const (&x)[4]) {
    if (chunk < p.chunks) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 piece = threadIdx.x + 256 * i, row = piece / 8, at = piece % 8;
            u32 bytes = row < count ? 16 : 0;
            copy_async(to + row * PITCH + 16 * at, x[i] + chunk * CHUNK_COLS + 8 * at, bytes);
        }
    }
    asm volatile("cp.async.commit_group;");
}

template <int KIND, bool GATED> DEVICE void mul(const Gemm &m) {
    const Matmul &p = m.matmul;
    extern __shared__ __align__(16) u8 shared[];
    typedef Planes<KIND> Weights;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    u32 inputs = warp / 4 * 64;
    u32 base = shared_address(shared);
    let_next_start();
    if (m.groups) wait_for_inputs();
    Column column(m, blockIdx.y, INPUTS);
    if (column.count == 0) return;

    // Two tiles: neighbours, or a gate and what it gates.
    u32 tile[2], matrix[2];
    const u8 *weights[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 at = GATED ? blockIdx.x * 4 + warp % 4 : blockIdx.x * TILES_OF_BLOCK + warp % 4 * 2 + i;
        bool is_in = at < p.tiles;
        matrix[i] = GATED ? i : matrix_of(p, at);
        const Matrix &of = p.matrices[matrix[i]];
        tile[i] = GATED ? at : at - of.first_tile;
        u64 number = (u64)column.expert * of.tiles + tile[i];
        weights[i] = is_in ? of.packed + number * p.chunks * Weights::BYTES : 0;
    }
    wait_for_inputs();
    const u16 *x[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = (threadIdx.x + 256 * i) / 8, at = column.first + row, from = 0;
        if (row < column.count) from = m.groups ? m.permutation[at] / m.outputs_per_input : input_row(p, at);
        x[i] = (const u16 *)p.input + (u64)from * p.input_stride;
    }
    for (u32 i = 0; i + 1 < STAGES; i++) fetch_inputs(p, column.count, i, base + i * INPUTS * PITCH, x);
    Weights next[2] = {}, now[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (weights[i]) next[i].load(weights[i], lane);
    }

    float sums[2][8][4] = {}, totals[2][8][4] = {};
    for (u32 chunk = 0; chunk < p.chunks; chunk++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        u32 ahead = chunk + STAGES - 1;
        fetch_inputs(p, column.count, ahead, base + ahead % STAGES * INPUTS * PITCH, x);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            now[i] = next[i];
            if (weights[i] && chunk + 1 < p.chunks) {
                next[i].load(weights[i] + (u64)(chunk + 1) * Weights::BYTES, lane);
            }
        }
        Fragment f[2][Weights::STEPS];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int step = 0; step < Weights::STEPS; step++) f[i][step] = now[i].fragment(step);
        }
        const u8 *stage = shared + chunk % STAGES * INPUTS * PITCH + (inputs + g) * PITCH;
        stage += 2 * Weights::first_column(c);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint4 b[2];
            Weights::load_input((const u16 *)(stage + 8 * n * PITCH), b);
#pragma unroll
            for (int step = 0; step < Weights::STEPS; step++) {
                now[0].multiply(sums[0][n], f[0][step], b, step);
                now[1].multiply(sums[1][n], f[1][step], b, step);
            }
        }
        if ((chunk + 1) % p.slice_chunks == 0 || chunk + 1 == p.chunks) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        totals[i][n][j] += sums[i][n][j];
                        sums[i][n][j] = 0.0f;
                    }
                }
            }
        }
    }
    // Through shared memory, each thread its own, so that the loop over results is a short one.
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    float *results = (float *)shared + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) results[256 * (32 * i + 4 * n + j)] = totals[i][n][j];
        }
    }
#pragma unroll 1
    for (u32 k = 0; k < 32; k++) {
        u32 place = inputs + k / 4 * 8 + 2 * c + k % 2, r = g + k % 4 / 2 * 8;
        if (place >= column.count || !weights[0]) continue;
        u32 at = result_row(m, column.first + place), expert = column.expert;
        float first = results[256 * k], second = results[256 * (32 + k)];
        u32 row = tile[0] * TILE_ROWS + r, other = tile[1] * TILE_ROWS + r;
        float scale = row_scale(p.matrices[matrix[0]], expert, row);
        float other_scale = weights[1] ? row_scale(p.matrices[matrix[1]], expert, other) : 0.0f;
        if (GATED) {
            emit_gated(p, expert, row, at, first, second, scale, other_scale);
            continue;
        }
        emit(p, matrix[0], expert, row, at, first, scale, added(p, row, at));
        if (weights[1]) {
            emit(p, matrix[1], expert, other, at, second, other_scale, added(p, other, at));
        }
    }
}

#define MUL(NAME, KIND, GATED)                                                                     \
    KERNEL __launch_bounds__(256, 1) NAME(const __grid_constant__ Gemm m) { mul<KIND, GATED>(m); }
#define MULS(NAME, KIND)                                                                           \
    MUL(mul_##NAME, KIND, false)                                                                   \
    MUL(mul_##NAME##_gated, KIND, true)
MULS(f16, F16)
MULS(s8, S8)
MULS(s8x16, S8X16)
MULS(u8, U8)
MULS(u4, U4)
MULS(s24_f16, S24_F16)
MULS(s24_s8, S24_S8)
MULS(s24_s4, S24_S4)
