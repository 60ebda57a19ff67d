// Products for few rows of input: memory sets their speed, so every weight is read once, with as
// many bytes under way as the registers hold. A block takes a tile of 16 weight rows at a time, a
// warp one part of its columns. The next weights are asked for before the last ones are used.
#include "product.cuh"

#define WARPS 8

// Chunks that a warp asks for at a time: as many as registers hold twice.
template <int KIND, int TILES> struct Batch { static const int CHUNKS = 2; };
template <> struct Batch<U4, 1> { static const int CHUNKS = 4; };
template <> struct Batch<F16, 2> { static const int CHUNKS = 1; };
template <> struct Batch<U8, 2> { static const int CHUNKS = 1; };

// COLS8: input rows in eights. TILES: 1, or 2 for a gate and what it gates.
template <int KIND, int COLS8, int TILES> struct Dot {
    static const int CHUNKS = Batch<KIND, TILES>::CHUNKS;
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
    float scale = rms_scale(p.norm_x, p.norm_n, p.norm_eps, room);
    for (u32 i = threadIdx.x; i < p.input_stride; i += blockDim.x) {
        out[i] = i < p.norm_n ? to_input(p.norm_x[i] * scale * p.norm_weight[i]) : 0;
    }
    __syncthreads();
}

template <int KIND, int COLS8, int TILES> DEVICE void dot(const Product &p) {
    typedef Dot<KIND, COLS8, TILES> D;
    extern __shared__ __align__(16) u16 normalized[];
    __shared__ float partial[2][WARPS][TILES][8 * COLS8][TILE_ROWS + 1];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    u32 first = warp * p.part, end = min(first + p.part, p.chunks);
    u32 parts = (p.chunks + p.part - 1) / p.part;
    u32 start = p.used ? blockIdx.y : blockIdx.y * 8 * COLS8;
    u32 cols = p.used ? 1 : min(8 * COLS8, p.rows - start);
    D d = {p, lane, first, end, 0, {}};
    typename D::Weights next[TILES][D::CHUNKS], now[TILES][D::CHUNKS];

    u32 tile = blockIdx.x;
    if (!p.used && first < end && tile < p.tiles) d.fetch(tile, first, next);
    let_next_start();
    wait_for_inputs();
    if (p.used) {
        u32 row = start / p.used, i = start % p.used;
        d.expert = p.route ? (u32)p.route[(u64)row * p.route_stride + p.used + i] : i;
        u32 at = p.is_shared ? row : start;
        d.x[0] = g == 0 ? p.input + (u64)at * p.input_stride + 16 * c : 0;
        if (first < end && tile < p.tiles) d.fetch(tile, first, next);
    } else if (p.norm_x) {
        normalize_input(p, normalized);
        d.x[0] = g == 0 ? normalized + 16 * c : 0;
    } else {
        for (int n = 0; n < COLS8; n++) {
            bool is_in = 8 * n + g < cols;
            u64 at = is_in ? input_row(p, start + 8 * n + g) : 0;
            d.x[n] = is_in ? p.input + at * p.input_stride + 16 * c : 0;
        }
    }
    for (u32 turn = 0; tile < p.tiles; turn ^= 1) {
        float sums[TILES][COLS8][4] = {};
        u32 next_tile = tile + gridDim.x;
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
        __syncthreads();
        u32 r = threadIdx.x % TILE_ROWS, col = threadIdx.x / TILE_ROWS;
        if (col < cols) {
            float total[TILES] = {};
            for (u32 part = 0; part < parts; part++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) total[i] += partial[turn][part][i][col][r];
            }
            if (TILES == 2) {
                emit_gated(p, d.expert, tile * TILE_ROWS + r, start + col, total[0], total[TILES - 1]);
            } else {
                u32 i = matrix_of(p, tile);
                u32 row = (tile - p.matrices[i].first_tile) * TILE_ROWS + r;
                emit(p, i, d.expert, row, start + col, total[0]);
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
