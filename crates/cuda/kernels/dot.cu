// Products for few rows of input: memory sets their speed, so every weight is read once, with as
// many bytes under way as the registers hold. A team of warps takes a tile of 16 weight rows at a
// time, each warp one part of its columns. The next weights are asked for before the last ones are
// used, and the first ones before the input is there.
#include "product.cuh"

#define WARPS 8

// Bytes of weights that a warp has under way or in use.
template <int COLS8> struct Ring { static const u32 BYTES = COLS8 == 1 ? 10240 : 8192; };

DEVICE void copy_async(u32 to, const u8 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// A warp's weights on their way through shared memory: a stage is a chunk of each of its tiles.
// COLS8: input rows in eights. TILES: 1, or 2 for a gate and what it gates.
template <int KIND, int COLS8, int TILES> struct Dot {
    typedef Planes<KIND> Weights;
    static const u32 STAGE = TILES * Weights::BYTES, DEPTH = Ring<COLS8>::BYTES / STAGE;

    const Product &p;
    const u8 *ring;
    u32 lane, first, end, step, expert;
    const u16 *x[COLS8];
    // What is asked for next, and where it goes.
    u32 tile, chunk, slot;

    __device__ __forceinline__ const u8 *tile_start(int which) const {
        u32 i = TILES == 2 ? which : matrix_of(p, tile);
        const Matrix &m = p.matrices[i];
        u64 at = (u64)expert * m.tiles + (TILES == 2 ? tile : tile - m.first_tile);
        return m.planes + at * p.chunks * Weights::BYTES;
    }

    // Asks for the next stage, if there is one.
    __device__ __forceinline__ void fetch() {
        if (first < end && tile < p.tiles) {
            u32 to = (u32)__cvta_generic_to_shared(ring) + slot * STAGE;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const u8 *from = tile_start(i) + (u64)chunk * Weights::BYTES;
#pragma unroll
                for (u32 at = 0; at < Weights::BYTES; at += 512) {
                    u32 piece = at + 16 * lane;
                    if (piece < Weights::BYTES) copy_async(to + i * Weights::BYTES + piece, from + piece);
                }
            }
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
            chunk++;
            if (chunk == end) {
                chunk = first;
                tile += step;
            }
        }
        asm volatile("cp.async.commit_group;");
    }

    // Multiplies the stage in a slot, which is that of a chunk.
    __device__ __forceinline__ void multiply(u32 chunk, u32 slot, float (&sums)[TILES][COLS8][4]) const {
        Weights w[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            w[i].load(ring + slot * STAGE + i * Weights::BYTES, lane);
        }
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
            uint4 b[2] = {};
            if (x[n]) {
                const uint4 *at = (const uint4 *)(x[n] + chunk * CHUNK_COLS);
                b[0] = at[0];
                b[1] = at[1];
            }
#pragma unroll
            for (int step = 0; step < 4; step++) {
                u32 b0 = word(b[step / 2], step % 2 * 2), b1 = word(b[step / 2], step % 2 * 2 + 1);
#pragma unroll
                for (int i = 0; i < TILES; i++) mma(sums[i][n], w[i].fragment(step), b0, b1);
            }
        }
    }
};

// The normalised row, made by every block for itself; as `normalize` makes it.
DEVICE void normalize_input(const Product &p, u16 *out) {
    __shared__ float room[32];
    float scale = rms_scale(p.norm_x, p.cols, p.norm_eps, room);
    for (u32 first = threadIdx.x; first < p.input_stride; first += 8 * blockDim.x) {
        float x[8], weight[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = first + j * blockDim.x;
            x[j] = i < p.cols ? p.norm_x[i] : 0.0f;
            weight[j] = i < p.cols ? __ldg(p.norm_weight + i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = first + j * blockDim.x;
            if (i < p.input_stride) out[i] = to_input(x[j] * scale * weight[j]);
        }
    }
    __syncthreads();
}

// Waits for the other warps of a team.
DEVICE void team_sync(u32 team, u32 warps) {
    if (warps == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(32 * warps) : "memory");
    }
}

template <int KIND, int COLS8, int TILES> DEVICE void dot(const Product &p) {
    typedef Dot<KIND, COLS8, TILES> D;
    extern __shared__ __align__(16) u8 shared[];
    u16 *normalized = (u16 *)(shared + WARPS * Ring<COLS8>::BYTES);
    __shared__ float partial[2][WARPS][TILES][8 * COLS8][TILE_ROWS + 1];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // As many warps as parts, or more, of which the last ones have nothing to do.
    u32 parts = (p.chunks + p.part - 1) / p.part;
    u32 warps = parts > 4 ? 8 : parts > 2 ? 4 : parts, teams = WARPS / warps;
    u32 team = warp / warps, member = warp % warps, thread = threadIdx.x % (32 * warps);
    u32 first = member * p.part, end = min(first + p.part, p.chunks);
    u32 start = p.used ? blockIdx.y : blockIdx.y * 8 * COLS8;
    u32 cols = p.used ? 1 : min(8 * COLS8, p.rows - start);
    u32 tile = blockIdx.x * teams + team, step = gridDim.x * teams;
    const u8 *ring = shared + warp * Ring<COLS8>::BYTES;
    D d = {p, ring, lane, first, end, step, 0, {}, tile, first, 0};
    if (!p.used) {
#pragma unroll 1
        for (u32 i = 0; i < D::DEPTH; i++) d.fetch();
    }
    if (p.norm_x) {
        for (u32 i = 32 * threadIdx.x; i < p.cols; i += 32 * blockDim.x) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm_weight + i));
        }
    }
    let_next_start();
    wait_for_inputs();
    const u16 *input = (const u16 *)p.input;
    if (p.used) {
        u32 row = start / p.used, i = start % p.used;
        d.expert = p.route ? (u32)p.route[(u64)row * p.route_stride + p.used + i] : i;
        u32 at = p.is_shared ? row : start;
        d.x[0] = g == 0 ? input + (u64)at * p.input_stride + 16 * c : 0;
#pragma unroll 1
        for (u32 i = 0; i < D::DEPTH; i++) d.fetch();
    } else if (p.norm_x) {
        normalize_input(p, normalized);
        d.x[0] = g == 0 ? normalized + 16 * c : 0;
    } else {
        for (int n = 0; n < COLS8; n++) {
            bool is_in = 8 * n + g < cols;
            u64 at = is_in ? input_row(p, start + 8 * n + g) : 0;
            d.x[n] = is_in ? input + at * p.input_stride + 16 * c : 0;
        }
    }
    for (u32 turn = 0, slot = 0; tile < p.tiles; turn ^= 1) {
        // What the end of the tile needs is asked for at its beginning.
        u32 matrix = TILES == 2 ? 0 : matrix_of(p, tile);
        u32 row = (tile - p.matrices[matrix].first_tile) * TILE_ROWS + thread % TILE_ROWS;
        float scales[TILES], residual = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES; i++) scales[i] = row_scale(p.matrices[matrix + i], d.expert, row);
        if (p.residual && thread / TILE_ROWS < cols) {
            residual = added(p, row, start + thread / TILE_ROWS);
        }
        float sums[TILES][COLS8][4] = {};
        for (u32 chunk = first; chunk < end; chunk++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(D::DEPTH - 1) : "memory");
            __syncwarp();
            d.multiply(chunk, slot, sums);
            __syncwarp();
            d.fetch();
            slot = slot + 1 == D::DEPTH ? 0 : slot + 1;
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int n = 0; n < COLS8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 col = 8 * n + 2 * c + j % 2;
                    if (col < cols) partial[turn][warp][i][col][g + j / 2 * 8] = sums[i][n][j];
                }
            }
        }
        team_sync(team, warps);
        for (u32 at = thread; at < TILE_ROWS * cols; at += 32 * warps) {
            u32 r = at % TILE_ROWS, col = at / TILE_ROWS;
            float total[TILES] = {};
            for (u32 part = 0; part < parts; part++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    total[i] += partial[turn][team * warps + part][i][col][r];
                }
            }
            if (TILES == 2) {
                emit_gated(p, d.expert, row, start + col, total[0], total[TILES - 1], scales[0],
                           scales[TILES - 1]);
            } else {
                if (at != thread) residual = added(p, row, start + col);
                emit(p, matrix, d.expert, row, start + col, total[0], scales[0], residual);
            }
        }
        tile += step;
    }
}

#define DOT(NAME, KIND, COLS8, TILES)                                                              \
    KERNEL __launch_bounds__(256, 2) NAME(const __grid_constant__ Product p) {                     \
        dot<KIND, COLS8, TILES>(p);                                                                \
    }
#define DOTS(NAME, KIND)                                                                           \
    DOT(dot_##NAME##_8, KIND, 1, 1)                                                                \
    DOT(dot_##NAME##_16, KIND, 2, 1)                                                               \
    DOT(dot_##NAME##_8_gated, KIND, 1, 2)                                                          \
    DOT(dot_##NAME##_16_gated, KIND, 2, 2)
DOTS(f16, F16)
DOTS(s8, S8)
DOTS(s8x16, S8X16)
DOTS(u8, U8)
DOTS(u4, U4)

// Products with weights in f32, which are few or those of tests: a warp for a row of weights, in
// plain arithmetic, for routers' choices hang on small differences.
KERNEL __launch_bounds__(256) exact(const __grid_constant__ Product p) {
    let_next_start();
    wait_for_inputs();
    u32 lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32, expert = 0;
    const Matrix &m = p.matrices[0];
    if (row >= m.rows) return;
    const float *x = (const float *)p.input;
    if (p.used) {
        u32 at = blockIdx.y / p.used, i = blockIdx.y % p.used;
        expert = p.route ? (u32)p.route[(u64)at * p.route_stride + p.used + i] : i;
        x += (u64)at * p.input_stride + (p.is_shared ? 0 : i * p.cols);
    } else {
        x += (u64)input_row(p, blockIdx.y) * p.input_stride;
    }
    u64 tile = (u64)expert * m.tiles + row / TILE_ROWS;
    const u8 *weights = m.planes + tile * p.chunks * Planes<F32>::BYTES;
    weights += row % TILE_ROWS * 4 * CHUNK_COLS + 8 * lane;
    float sum = 0.0f;
    for (u32 chunk = 0; chunk < p.chunks; chunk++) {
        float2 w = *(const float2 *)(weights + chunk * Planes<F32>::BYTES);
        u32 column = chunk * CHUNK_COLS + 2 * lane;
        if (column < p.cols) sum = fmaf(w.x, x[column], sum);
        if (column + 1 < p.cols) sum = fmaf(w.y, x[column + 1], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) emit(p, 0, expert, row, blockIdx.y, sum, 1.0f, added(p, row, blockIdx.y));
}
