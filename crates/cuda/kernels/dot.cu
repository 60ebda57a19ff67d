// Products for few rows of input: memory sets their speed, so every weight is read once, with as
// many bytes under way as shared memory holds. A team of warps takes a tile of 16 weight rows at a
// time, each warp one part of its columns. The first weights are asked for before the input is
// there, while the kernel before this one runs: so a block uses less than half of the shared memory, but for the
// longest rows.
#include "pipe.cuh"
#include "product.cuh"

#define WARPS 8u
#define THREADS (32 * WARPS)

// A warp's share of the weights: parts of tiles, one tile after the other.
// COLS8: input rows in eights. TILES: 1, or 2 for a gate and what it gates.
template <int KIND, int COLS8, int TILES> struct Dot {
    typedef Planes<KIND> Weights;
    // A slot holds so many chunks of each tile, two to four kilobytes; there are up to four.
    static const u32 CHUNKS = Weights::SLOT_CHUNKS / TILES;
    static const u32 SLOT = TILES * CHUNKS * Weights::BYTES;
    static const u32 DEPTH = SLOT > 2560 ? 10240 / SLOT : COLS8 * TILES == 4 ? 3 : 4;
    static const u32 RING = DEPTH * SLOT + 32; // with the barriers

    const Matmul &p;
    const u8 *ring;
    u32 lane, first, end, step, expert;
    Pipe<SLOT, DEPTH> pipe;
    // What is asked for next.
    u32 tile, chunk;
    const u8 *next[TILES];

    __device__ __forceinline__ void find_tile() {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const Matrix &m = p.matrices[TILES == 2 ? i : matrix_of(p, tile)];
            u64 at = (u64)expert * m.tiles + (TILES == 2 ? tile : tile - m.first_tile);
            next[i] = m.packed + (at * p.chunks + first) * Weights::BYTES;
        }
        chunk = first;
    }

    __device__ __forceinline__ void begin() {
        pipe.begin(ring, ring + DEPTH * SLOT);
        if (first >= end || tile >= p.tiles) return;
        find_tile();
#pragma unroll 1
        for (u32 i = 0; i < DEPTH; i++) fetch();
    }

    // Asks for the next chunks, if there are more.
    __device__ __forceinline__ void fetch() {
        if (tile >= p.tiles) {
            pipe.fill_nothing();
            return;
        }
        pipe.fill(next, min(CHUNKS, end - chunk) * Weights::BYTES);
#pragma unroll
        for (int i = 0; i < TILES; i++) next[i] += CHUNKS * Weights::BYTES;
        chunk += CHUNKS;
        if (chunk >= end) {
            tile += step;
            if (tile < p.tiles) find_tile();
        }
    }
};

// The only row of input, for every block in its shared memory: as it is, or normalised as
// `normalize` does it.
DEVICE void share_input(const Matmul &p, u16 *out) {
    if (!p.norm_input) {
        const uint4 *from = (const uint4 *)p.input + input_row(p, 0) * (p.input_stride / 8);
        for (u32 first = threadIdx.x; first < p.input_stride / 8; first += 4 * THREADS) {
            uint4 x[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if (first + j * THREADS < p.input_stride / 8) x[j] = from[first + j * THREADS];
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if (first + j * THREADS < p.input_stride / 8) ((uint4 *)out)[first + j * THREADS] = x[j];
            }
        }
    } else {
        __shared__ float room[32];
        // `normalize` has twice as many threads for rows of this length.
        float scale = rms_scale_by_half(p.norm_input, p.cols, p.norm_eps, room);
        for (u32 first = threadIdx.x; first < p.input_stride; first += 8 * THREADS) {
            float x[8], weight[8];
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u32 i = first + j * THREADS;
                x[j] = i < p.cols ? p.norm_input[i] : 0.0f;
                weight[j] = i < p.cols ? __ldg(p.norm_weight + i) : 0.0f;
            }
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u32 i = first + j * THREADS;
                if (i < p.input_stride) out[i] = to_input(x[j] * scale * weight[j]);
            }
        }
    }
    __syncthreads();
}

// Multiplies some chunks of each tile; tiles lie `apart` bytes apart.
template <int KIND, int CHUNKS, int COLS8, int TILES>
DEVICE void multiply(const u8 *slot, u32 apart, u32 lane, const u16 *const (&x)[COLS8], u32 chunk,
                     float (&sums)[TILES][COLS8][4]) {
    uint4 b[CHUNKS][COLS8][2];
    Planes<KIND> w[CHUNKS][TILES];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) w[k][i].load(slot + i * apart + k * Planes<KIND>::BYTES, lane);
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
            // A lane without a row has zeros.
            b[k][n][0] = b[k][n][1] = make_uint4(0, 0, 0, 0);
            if (x[n]) Planes<KIND>::load_input(x[n] + (chunk + k) * CHUNK_COLS, b[k][n]);
        }
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
#pragma unroll
            for (int step = 0; step < Planes<KIND>::STEPS; step++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    w[k][i].multiply(sums[i][n], w[k][i].fragment(step), b[k][n], step);
                }
            }
        }
    }
}

// Waits for the other warps of a team.
DEVICE void team_sync(u32 team, u32 warps) {
    if (warps == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(32 * warps) : "memory");
    }
}

// Where a warp has two parts of each tile, sums of all tiles are kept at one place: whether those of the tile
// before have been read there.
struct Reading {
    u32 team, warps;
#if __CUDA_ARCH__ >= 900
    u32 barrier, tiles;

    // By every warp, before the team meets for the first time.
    __device__ __forceinline__ void begin(const u64 *barriers, u32 thread) {
        barrier = shared_address(barriers + team);
        tiles = 0;
        if (thread == 0) make_barrier(barrier, warps);
    }

    __device__ __forceinline__ void end() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(barrier);
        tiles++;
    }

    __device__ __forceinline__ void wait() const {
        if (tiles > 0) wait_phase(barrier, (tiles - 1) % 2);
    }
#else
    __device__ __forceinline__ void begin(const u64 *, u32) {}
    __device__ __forceinline__ void end() const { team_sync(team, warps); }
    __device__ __forceinline__ void wait() const {}
#endif
};

template <int KIND, int COLS8, int TILES> DEVICE void dot(const Matmul &p) {
    typedef Dot<KIND, COLS8, TILES> D;
    extern __shared__ __align__(128) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // As many warps as parts, or more, of which the last ones have nothing to do; or half as many.
    u32 parts = (p.chunks + p.slice_chunks - 1) / p.slice_chunks, each = parts > WARPS ? 2 : 1;
    u32 warps = parts > 4 ? 8 : parts > 2 ? 4 : parts, teams = WARPS / warps;
    u32 team = warp / warps, member = warp % warps, thread = threadIdx.x % (32 * warps);
    u32 first = member * each * p.slice_chunks, end = min(first + each * p.slice_chunks, p.chunks);
    // More than eight rows neither meet experts nor are alone.
    u32 used = COLS8 == 1 ? p.experts_used : 0;
    bool is_alone = COLS8 == 1 && p.rows == 1;
    u32 start = used ? blockIdx.y : blockIdx.y * 8 * COLS8;
    u32 cols = used ? 1 : min(8 * COLS8, p.rows - start);
    u32 tile = blockIdx.x * teams + team, step = gridDim.x * teams;
    const u64 *readings = (const u64 *)(shared + WARPS * D::RING);
    Reading reading = {team, warps};
    reading.begin(readings, thread);
    // Sums of parts: [2, WARPS, TILES, cols, TILE_ROWS + 1], of tiles by turns, or of twice as many parts.
    float *partials = (float *)(readings + WARPS);
    u32 tile_sums = cols * (TILE_ROWS + 1);
    u16 *only = (u16 *)(partials + 2 * WARPS * TILES * (tile_sums + 3) / 4 * 4);
    D d = {p, shared + warp * D::RING, lane, first, end, step};
    d.tile = tile;
    if (!used) d.begin();
    if (is_alone && p.norm_input) {
        for (u32 i = 32 * threadIdx.x; i < p.cols; i += 32 * blockDim.x) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm_weight + i));
        }
    }
    let_next_start();
    wait_for_inputs();
    const u16 *input = (const u16 *)p.input, *x[COLS8];
    u32 column = D::Weights::first_column(c);
    if (used) {
        u32 row = start / used, i = start % used;
        d.expert = p.route ? (u32)p.route[(u64)row * p.route_stride + used + i] : i;
        u32 at = p.shares_input ? row : start;
        x[0] = g == 0 ? input + (u64)at * p.input_stride + column : 0;
        d.begin();
    } else if (is_alone) {
        share_input(p, only);
        x[0] = g == 0 ? only + column : 0;
    } else {
        for (int n = 0; n < COLS8; n++) {
            bool is_in = 8 * n + g < cols;
            u64 at = is_in ? input_row(p, start + 8 * n + g) : 0;
            x[n] = is_in ? input + at * p.input_stride + column : 0;
        }
    }
    for (u32 turn = 0; tile < p.tiles; turn ^= each % 2) {
        // What the end of the tile needs is asked for at its beginning.
        u32 matrix = TILES == 2 ? 0 : matrix_of(p, tile);
        u32 row = (tile - p.matrices[matrix].first_tile) * TILE_ROWS + thread % TILE_ROWS;
        float scales[TILES] = {}, residual = 0.0f;
        if (thread < TILE_ROWS * cols) {
#pragma unroll
            for (int i = 0; i < TILES; i++) scales[i] = row_scale(p.matrices[matrix + i], d.expert, row);
            if (TILES == 1 && p.residual) residual = added(p, row, start + thread / TILE_ROWS);
        }
        float sums[TILES][COLS8][4] = {};
        float *partial = partials + (turn * WARPS + warp - member) * each * TILES * tile_sums;
        u32 part = member * each, stop = min(first + p.slice_chunks, end);
        auto keep = [&]() {
            if (each > 1 && part == member * each) reading.wait();
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int n = 0; n < COLS8; n++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 col = 8 * n + 2 * c + j % 2;
                        u32 at = (part * TILES + i) * tile_sums + col * (TILE_ROWS + 1) + g + j / 2 * 8;
                        if (col < cols) partial[at] = sums[i][n][j];
                        sums[i][n][j] = 0.0f;
                    }
                }
            }
            part++;
            stop = end;
        };
        for (u32 chunk = first; chunk < end; chunk += D::CHUNKS) {
            const u8 *slot = d.ring + d.pipe.wait();
            if (chunk == stop) keep();
            // Of two tiles and many rows there are registers for one chunk at a time.
            if (COLS8 * TILES < 4 && chunk + D::CHUNKS <= stop) {
                multiply<KIND, D::CHUNKS>(slot, D::SLOT / TILES, lane, x, chunk, sums);
            } else {
#pragma unroll 1
                for (u32 k = 0; k < D::CHUNKS && chunk + k < end; k++) {
                    if (chunk + k == stop) keep();
                    const u8 *weights = slot + k * D::Weights::BYTES;
                    multiply<KIND, 1>(weights, D::SLOT / TILES, lane, x, chunk + k, sums);
                }
            }
            d.pipe.release();
            d.fetch();
        }
        keep();
        team_sync(team, warps);
        for (u32 at = thread; at < TILE_ROWS * cols; at += 32 * warps) {
            u32 r = at % TILE_ROWS, col = at / TILE_ROWS;
            float total[TILES] = {};
#pragma unroll 8
            for (u32 part = 0; part < parts; part++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    total[i] += partial[(part * TILES + i) * tile_sums + col * (TILE_ROWS + 1) + r];
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
        if (each > 1) reading.end();
        tile += step;
    }
}

// Blocks of two kernels, or two of one, share a multiprocessor; one of the kernels needs too many registers.
#define DOT(NAME, KIND, COLS8, TILES)                                                              \
    KERNEL __launch_bounds__(THREADS, KIND == U8 && COLS8 * TILES == 4 ? 1 : 2) NAME(const __grid_constant__ Matmul p) { \
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
DOTS(s24_f16, S24_F16)
DOTS(s24_s8, S24_S8)
DOTS(s24_s4, S24_S4)

#define EXACT_ROWS 8u // of input, at most

// Products with weights in f32, which are few or those of tests, but for routers', whose choices hang
// on small differences. A block takes some rows of weights.
template <u32 WEIGHTS> DEVICE void exact(const Matmul &p) {
    __shared__ float sums[EXACT_ROWS][WEIGHTS][EXACT_THREADS / 32];
    let_next_start();
    wait_for_inputs();
    u32 t = threadIdx.x, row = blockIdx.x * WEIGHTS, expert = 0;
    u32 start = blockIdx.y * (p.experts_used ? 1 : EXACT_ROWS), end = p.experts_used ? start + 1 : min(start + EXACT_ROWS, p.rows);
    if (p.experts_used && p.route) expert = (u32)p.route[(u64)(start / p.experts_used) * p.route_stride + p.experts_used + start % p.experts_used];
    if (p.experts_used && !p.route) expert = start % p.experts_used;
    const float *inputs[EXACT_ROWS];
#pragma unroll
    for (u32 r = 0; r < EXACT_ROWS; r++) {
        u64 from = p.experts_used ? start / p.experts_used : start + r < end ? input_row(p, start + r) : 0;
        inputs[r] = (const float *)p.input + from * p.input_stride;
        if (p.experts_used && !p.shares_input) inputs[r] += start % p.experts_used * p.cols;
    }
    bool is_whole = p.cols % 4 == 0 && (p.input_stride % 4 == 0 || end == start + 1) && (u64)inputs[0] % 16 == 0;
    float parts[EXACT_ROWS][WEIGHTS] = {};
#pragma unroll (WEIGHTS == 1 ? 2 : 1)
    for (u32 quad = t; 4 * quad < p.cols; quad += EXACT_THREADS) {
        float4 w[WEIGHTS], x[EXACT_ROWS];
        u32 i = 4 * quad;
#pragma unroll
        for (u32 j = 0; j < WEIGHTS; j++) w[j] = *exact_weights(p, expert, row + j, quad);
#pragma unroll
        for (u32 r = 0; r < EXACT_ROWS; r++) {
            x[r] = make_float4(0, 0, 0, 0);
            if (start + r >= end) continue;
            if (is_whole) {
                x[r] = *(const float4 *)(inputs[r] + i);
            } else {
                x[r].x = inputs[r][i];
                x[r].y = i + 1 < p.cols ? inputs[r][i + 1] : 0.0f;
                x[r].z = i + 2 < p.cols ? inputs[r][i + 2] : 0.0f;
                x[r].w = i + 3 < p.cols ? inputs[r][i + 3] : 0.0f;
            }
        }
#pragma unroll
        for (u32 r = 0; r < EXACT_ROWS; r++) {
#pragma unroll
            for (u32 j = 0; j < WEIGHTS; j++) parts[r][j] = add_products(w[j], x[r], parts[r][j]);
        }
    }
#pragma unroll
    for (u32 r = 0; r < EXACT_ROWS; r++) {
#pragma unroll
        for (u32 j = 0; j < WEIGHTS; j++) {
            float sum = warp_sum(parts[r][j]);
            if (t % 32 == 0) sums[r][j][t / 32] = sum;
        }
    }
    __syncthreads();
    u32 r = t / WEIGHTS, j = t % WEIGHTS;
    if (r >= end - start || row + j >= p.matrices[0].rows) return;
    float total = 0.0f;
    for (u32 i = 0; i < EXACT_THREADS / 32; i++) total += sums[r][j][i];
    emit(p, 0, expert, row + j, start + r, total, 1.0f, added(p, row + j, start + r));
}

KERNEL __launch_bounds__(EXACT_THREADS) exact_1(const __grid_constant__ Matmul p) { exact<1>(p); }
KERNEL __launch_bounds__(EXACT_THREADS) exact_4(const __grid_constant__ Matmul p) { exact<4>(p); }
