// GEMM with `mma`, for many input rows, grouped by expert where there are experts: bound by tensor
// cores. On Hopper it runs 2:4 weights only: `gemm_wgmma` takes the others.
//
// Grid: (blocks of weight tiles, row groups); 256 threads. A block takes 128 weight rows and 128
// input rows; a warp two weight tiles, loaded in fragment order without shared memory, and 64 input
// rows, which come through three stages of shared memory.
#include "matmul.cuh"

#define INPUTS 128u
#define PITCH 144u // bytes of a chunk of an input row in shared memory, padded against bank conflicts
#define STAGES 3u

DEVICE void copy_async(u32 to, const void *from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// Copies one chunk of all input rows of the block; missing rows are zero.
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

// Runs the epilogue on a thread's sums. They pass through shared memory, so that the epilogue's loop
// is a short one. `inputs`, `g` and `c`: the warp's first input row, and the lane's row and column.
template <bool GATED>
DEVICE void store_results(const Gemm &m, const RowGroup &group, u8 *shared, const float (&totals)[2][8][4],
                          const u32 (&tile)[2], const u32 (&matrix)[2], const u8 *const (&weights)[2], u32 inputs,
                          u32 g, u32 c) {
    const Matmul &p = m.matmul;
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
        u32 input = inputs + k / 4 * 8 + 2 * c + k % 2, r = g + k % 4 / 2 * 8;
        if (input >= group.count || !weights[0]) continue;
        u32 at = result_row(m, group.first + input), expert = group.expert;
        float first = results[256 * k], second = results[256 * (32 + k)];
        u32 row = tile[0] * TILE_ROWS + r, other = tile[1] * TILE_ROWS + r;
        u32 exponent = row_exponent(p.matrices[matrix[0]], expert, row);
        u32 other_exponent = weights[1] ? row_exponent(p.matrices[matrix[1]], expert, other) : 0;
        if (GATED) {
            epilogue_gated(p, expert, row, at, first, second, exponent, other_exponent);
            continue;
        }
        epilogue(p, matrix[0], expert, row, at, first, exponent, residual_at(p, row, at));
        if (weights[1]) {
            epilogue(p, matrix[1], expert, other, at, second, other_exponent, residual_at(p, other, at));
        }
    }
}

template <int LAYOUT, bool GATED> DEVICE void gemm(const Gemm &m) {
    const Matmul &p = m.matmul;
    extern __shared__ __align__(16) u8 shared[];
    typedef Packed<LAYOUT> Weights;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    u32 inputs = warp / 4 * 64;
    u32 base = shared_address(shared);
    launch_dependents();
    if (m.groups) {
        if (threadIdx.x < 32) prefetch_experts(p, threadIdx.x, GATED ? 2 : 1);
        grid_dependency_wait();
    }
    RowGroup group(m, blockIdx.y, INPUTS);
    if (group.count == 0) return;

    // Two tiles: neighbours, or gate and up projection.
    u32 tile[2], matrix[2];
    const u8 *weights[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 at = GATED ? blockIdx.x * 4 + warp % 4 : blockIdx.x * GEMM_TILES + warp % 4 * 2 + i;
        bool is_in = at < p.tiles;
        matrix[i] = GATED ? i : matrix_of(p, at);
        const Matrix &of = p.matrices[matrix[i]];
        tile[i] = GATED ? at : at - of.first_tile;
        const u8 *packed = packed_tiles(p, of, group.expert);
        weights[i] = is_in ? packed + (u64)tile[i] * p.chunks * Weights::BYTES : 0;
    }
    grid_dependency_wait();
    const u16 *x[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 row = (threadIdx.x + 256 * i) / 8, at = group.first + row, from = 0;
        if (row < group.count) from = m.groups ? m.permutation[at] / m.outputs_per_input : input_row(p, at);
        x[i] = (const u16 *)p.input + (u64)from * p.input_stride;
    }
    for (u32 i = 0; i + 1 < STAGES; i++) fetch_inputs(p, group.count, i, base + i * INPUTS * PITCH, x);
    Weights next[2] = {}, now[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (weights[i]) next[i].load(weights[i], lane);
    }

    float sums[2][8][4] = {}, totals[2][8][4] = {};
    for (u32 chunk = 0; chunk < p.chunks; chunk++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        u32 next_stage = chunk + STAGES - 1;
        fetch_inputs(p, group.count, next_stage, base + next_stage % STAGES * INPUTS * PITCH, x);
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
    store_results<GATED>(m, group, shared, totals, tile, matrix, weights, inputs, g, c);
}

#define GEMM(NAME, LAYOUT, GATED)                                                                     \
    KERNEL __launch_bounds__(256, 1) NAME(const __grid_constant__ Gemm m) { gemm<LAYOUT, GATED>(m); }
#define GEMMS(NAME, LAYOUT)                                                                           \
    GEMM(gemm_mma_##NAME, LAYOUT, false)                                                                   \
    GEMM(gemm_mma_##NAME##_gated, LAYOUT, true)
GEMMS(f16, F16)
GEMMS(s8, S8)
GEMMS(s6x16, S6X16)
GEMMS(u5, U5)
GEMMS(u4, U4)
GEMMS(s4x16, S4X16)
GEMMS(u2x16, U2X16)
GEMMS(iq4, IQ4)
GEMMS(codebook, CODEBOOK)
GEMMS(fp4, FP4)
GEMMS(s24_f16, S24_F16)
GEMMS(s24_s8, S24_S8)
GEMMS(s24_s4, S24_S4)
