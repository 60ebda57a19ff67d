// Products for few rows of input: memory sets their speed, so every weight is read once, with as
// many bytes under way as the registers hold. A team of warps takes a tile of 16 weight rows at a
// time, each warp one part of its columns. The next weights are asked for before the last ones are
// used, and the first ones before the input is there.
#include "product.cuh"

#define WARPS 8

// Chunks that a warp asks for at a time: as many as registers hold twice.
template <int KIND, int COLS8, int TILES> struct Batch {
    static const int CHUNKS = KIND == U4 ? 4 / TILES
        : KIND == F16 ? 2 / TILES
        : TILES == 1 ? (KIND == U8 ? 2 : 3)
        : (KIND == U8 || COLS8 == 2 ? 1 : 2);
};

// COLS8: input rows in eights. TILES: 1, or 2 for a gate and what it gates.
template <int KIND, int COLS8, int TILES> struct Dot {
    static const int CHUNKS = Batch<KIND, COLS8, TILES>::CHUNKS;
    typedef Planes<KIND> Weights;

    const Product &p;
    u32 lane, first, end, expert;
    const u16 *x[COLS8];

    __device__ __forceinline__ const u8 *tile_start(u32 tile, int which) const {
        u32 i = TILES == 2 ? which : matrix_of(p, tile);
        const Matrix &m = p.matrices[i];
        u64 at = (u64)expert * m.tiles + (TILES == 2 ? tile : tile - m.first_tile);
        return m.planes + at * p.chunks * Weights::BYTES;
    }

    __device__ __forceinline__ void fetch(u32 tile, u32 chunk, Weights (&w)[TILES][CHUNKS]) const {
        for (int i = 0; i < TILES; i++) {
            const u8 *at = tile_start(tile, i) + (u64)chunk * Weights::BYTES;
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                if (chunk + j < end) w[i][j].template load<true>(at + j * Weights::BYTES, lane);
            }
        }
    }

    __device__ __forceinline__ void multiply(u32 chunk, const Weights (&w)[TILES][CHUNKS],
                                             float (&sums)[TILES][COLS8][4]) const {
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            if (chunk + j >= end) continue;
#pragma unroll
            for (int n = 0; n < COLS8; n++) {
                uint4 b[2] = {};
                if (x[n]) {
                    const uint4 *at = (const uint4 *)(x[n] + (chunk + j) * CHUNK_COLS);
                    b[0] = at[0];
                    b[1] = at[1];
                }
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    u32 b0 = word(b[step / 2], step % 2 * 2), b1 = word(b[step / 2], step % 2 * 2 + 1);
#pragma unroll
                    for (int i = 0; i < TILES; i++) mma(sums[i][n], w[i][j].fragment(step), b0, b1);
                }
            }
        }
    }
};

// The normalised row, made by every block for itself; as `normalize` makes it.
DEVICE void normalize_input(const Product &p, u16 *out) {
    __shared__ float room[32];
    float scale = rms_scale(p.norm_x, p.cols, p.norm_eps, room);
    for (u32 i = threadIdx.x; i < p.input_stride; i += blockDim.x) {
        out[i] = i < p.cols ? to_input(p.norm_x[i] * scale * p.norm_weight[i]) : 0;
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
    extern __shared__ __align__(16) u16 normalized[];
    __shared__ float partial[2][WARPS][TILES][8 * COLS8][TILE_ROWS + 1];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // As many warps as parts, or more, of which the last ones have nothing to do.
    u32 parts = (p.chunks + p.part - 1) / p.part;
    u32 warps = parts > 4 ? 8 : parts > 2 ? 4 : parts, teams = WARPS / warps;
    u32 team = warp / warps, member = warp % warps, thread = threadIdx.x % (32 * warps);
    u32 first = member * p.part, end = min(first + p.part, p.chunks);
    u32 start = p.used ? blockIdx.y : blockIdx.y * 8 * COLS8;
    u32 cols = p.used ? 1 : min(8 * COLS8, p.rows - start);
    D d = {p, lane, first, end, 0, {}};
    typename D::Weights next[TILES][D::CHUNKS], now[TILES][D::CHUNKS];

    u32 tile = blockIdx.x * teams + team, step = gridDim.x * teams;
    bool has_part = first < end;
    if (!p.used && has_part && tile < p.tiles) d.fetch(tile, first, next);
    let_next_start();
    wait_for_inputs();
    const u16 *input = (const u16 *)p.input;
    if (p.used) {
        u32 row = start / p.used, i = start % p.used;
        d.expert = p.route ? (u32)p.route[(u64)row * p.route_stride + p.used + i] : i;
        u32 at = p.is_shared ? row : start;
        d.x[0] = g == 0 ? input + (u64)at * p.input_stride + 16 * c : 0;
        if (has_part && tile < p.tiles) d.fetch(tile, first, next);
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
    for (u32 turn = 0; tile < p.tiles; turn ^= 1) {
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
        u32 next_tile = tile + step;
        for (u32 chunk = first; chunk < end; chunk += D::CHUNKS) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int j = 0; j < D::CHUNKS; j++) now[i][j] = next[i][j];
            }
            if (chunk + D::CHUNKS < end) {
                d.fetch(tile, chunk + D::CHUNKS, next);
            } else if (next_tile < p.tiles) {
                d.fetch(next_tile, first, next);
            }
            d.multiply(chunk, now, sums);
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
        tile = next_tile;
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
