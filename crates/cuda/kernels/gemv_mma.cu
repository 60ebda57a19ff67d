// GEMV on tensor cores, for up to 16 input rows: bound by memory, so every weight is read once with
// the most bytes in flight that shared memory holds.
//
// Grid: (blocks of tiles, pairs of row and expert or blocks of rows); 256 threads. A team of warps
// takes a tile of 16 weight rows at a time, each warp one or two split-K slices of its columns
// through its own ring (pipeline.cuh). The first weights are prefetched while the previous kernel
// runs, so a block uses less than half of the shared memory, but for the longest rows. `gemv_f32`
// below takes f32 weights.
#include "pipeline.cuh"
#include "matmul.cuh"

#define WARPS GEMV_WARPS
#define THREADS (32 * WARPS)

// A warp's stream of weights: slices of tiles, one tile after the other. COLS8: input rows in
// eights. TILES: 1, or 2 for gate and up projection.
template <int LAYOUT, int COLS8, int TILES> struct WeightStream {
    typedef Packed<LAYOUT> Weights;
    // A slot holds CHUNKS of each tile, two to four kilobytes; there are up to four slots.
    static const u32 CHUNKS = Weights::SLOT_CHUNKS / TILES;
    static const u32 SLOT = TILES * CHUNKS * Weights::BYTES;
    static const u32 DEPTH = SLOT > 2560 ? 10240 / SLOT : COLS8 * TILES == 4 ? 3 : 4;
    static const u32 RING = DEPTH * SLOT + 32; // with the barriers

    const Matmul &p;
    const u8 *ring;
    u32 lane, first, end, step, expert;
    Pipeline<SLOT, DEPTH> pipe;
    // The next weights to prefetch.
    u32 tile, chunk;
    const u8 *next[TILES];

    __device__ __forceinline__ void find_tile() {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const Matrix &m = p.matrices[TILES == 2 ? i : matrix_of(p, tile)];
            // More than eight rows have no experts.
            const u8 *packed = COLS8 == 1 ? packed_tiles(p, m, expert) : (const u8 *)m.packed;
            u32 at = TILES == 2 ? tile : tile - m.first_tile;
            next[i] = packed + ((u64)at * p.chunks + first) * Weights::BYTES;
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

    // Prefetches the next chunks, if there are any.
    __device__ __forceinline__ void fetch() {
        if (tile >= p.tiles) {
            pipe.commit();
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

// Loads the only input row to shared memory, RMS-normalised as `norm_rows` does where there is a
// norm.
DEVICE void load_input_shared(const Matmul &p, u16 *out) {
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
        __shared__ float scratch[32];
        // `norm_rows` has twice the threads for rows of this length.
        float scale = rms_scale<2>(p.norm_input, p.cols, p.norm_eps, scratch);
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

// Multiplies some chunks of each tile; tiles are `apart` bytes from each other.
template <int LAYOUT, int CHUNKS, int COLS8, int TILES>
DEVICE void multiply(const u8 *slot, u32 apart, u32 lane, const u16 *const (&x)[COLS8], u32 chunk,
                     float (&sums)[TILES][COLS8][4]) {
    uint4 b[CHUNKS][COLS8][2];
    Packed<LAYOUT> w[CHUNKS][TILES];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) w[k][i].load(slot + i * apart + k * Packed<LAYOUT>::BYTES, lane);
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
            // Lanes without an input row multiply zeros.
            b[k][n][0] = b[k][n][1] = make_uint4(0, 0, 0, 0);
            if (x[n]) Packed<LAYOUT>::load_input(x[n] + (chunk + k) * CHUNK_COLS, b[k][n]);
        }
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
#pragma unroll
            for (int step = 0; step < Packed<LAYOUT>::STEPS; step++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    w[k][i].multiply(sums[i][n], w[k][i].fragment(step), b[k][n], step);
                }
            }
        }
    }
}

// Where a warp has two slices of each tile, all tiles share one buffer of partial sums. This tracks
// whether the previous tile's sums have been read there.
struct PartialsReuse {
    u32 team, warps;
#if __CUDA_ARCH__ >= 900
    u32 barrier, tiles;

    // Called by every warp before the team's first barrier.
    __device__ __forceinline__ void begin(const u64 *barriers, u32 thread) {
        barrier = shared_address(barriers + team);
        tiles = 0;
        if (thread == 0) mbarrier_init(barrier, warps);
    }

    __device__ __forceinline__ void end() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
        tiles++;
    }

    __device__ __forceinline__ void wait() const {
        if (tiles > 0) mbarrier_wait(barrier, (tiles - 1) % 2);
    }
#else
    __device__ __forceinline__ void begin(const u64 *, u32) {}
    __device__ __forceinline__ void end() const { team_sync(team + 1, warps); }
    __device__ __forceinline__ void wait() const {}
#endif
};

// Finds the input rows of a lane, zero where there is none: of the block's expert, whose weights it
// begins to prefetch; the only one, in shared memory; or of several.
template <class Stream, int COLS8>
DEVICE void find_inputs(const Matmul &p, Stream &d, u32 experts_used, bool is_single_row, u32 start, u32 cols,
                        u32 g, u32 c, u16 *single_row, const u16 *(&x)[COLS8]) {
    const u16 *input = (const u16 *)p.input;
    u32 column = Stream::Weights::first_column(c);
    if (experts_used) {
        u32 row = start / experts_used, i = start % experts_used;
        d.expert = p.route ? (u32)p.route[(u64)row * p.route_stride + experts_used + i] : i;
        u32 at = p.shares_input ? row : start;
        x[0] = g == 0 ? input + (u64)at * p.input_stride + column : 0;
        d.begin();
    } else if (is_single_row) {
        load_input_shared(p, single_row);
        x[0] = g == 0 ? single_row + column : 0;
    } else {
        for (int n = 0; n < COLS8; n++) {
            bool is_in = 8 * n + g < cols;
            u64 at = is_in ? input_row(p, start + 8 * n + g) : 0;
            x[n] = is_in ? input + at * p.input_stride + column : 0;
        }
    }
}

// Stores a warp's sums of a slice to the partial sums of a tile, and zeroes them.
template <int TILES, int COLS8>
DEVICE void store_slice(float *partials, u32 slice, u32 tile_sums, u32 cols, u32 g, u32 c,
                        float (&sums)[TILES][COLS8][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int n = 0; n < COLS8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 col = 8 * n + 2 * c + j % 2;
                u32 at = (slice * TILES + i) * tile_sums + col * (TILE_ROWS + 1) + g + j / 2 * 8;
                if (col < cols) partials[at] = sums[i][n][j];
                sums[i][n][j] = 0.0f;
            }
        }
    }
}

template <int LAYOUT, int COLS8, int TILES> DEVICE void gemv(const Matmul &p) {
    typedef WeightStream<LAYOUT, COLS8, TILES> D;
    extern __shared__ __align__(128) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // A warp for each slice (the last warps may be idle), or for two.
    u32 slices = (p.chunks + p.slice_chunks - 1) / p.slice_chunks, slices_per_warp = slices > WARPS ? 2 : 1;
    u32 warps = slices > 4 ? 8 : slices > 2 ? 4 : slices, teams = WARPS / warps;
    u32 team = warp / warps, member = warp % warps, thread = threadIdx.x % (32 * warps);
    u32 first = member * slices_per_warp * p.slice_chunks;
    u32 end = min(first + slices_per_warp * p.slice_chunks, p.chunks);
    // More than eight rows have no experts and more than one row.
    u32 experts_used = COLS8 == 1 ? p.experts_used : 0;
    bool is_single_row = COLS8 == 1 && p.rows == 1;
    u32 start = experts_used ? blockIdx.y : blockIdx.y * 8 * COLS8;
    u32 cols = experts_used ? 1 : min(8 * COLS8, p.rows - start);
    u32 tile = blockIdx.x * teams + team, step = gridDim.x * teams;
    const u64 *reuse_barriers = (const u64 *)(shared + WARPS * D::RING);
    PartialsReuse reuse = {team, warps};
    reuse.begin(reuse_barriers, thread);
    // Partial sums: [2, WARPS, TILES, cols, TILE_ROWS + 1], of two tiles or of twice the slices.
    float *partials = (float *)(reuse_barriers + WARPS);
    u32 tile_sums = cols * (TILE_ROWS + 1);
    u16 *single_row = (u16 *)(partials + 2 * WARPS * TILES * (tile_sums + 3) / 4 * 4);
    D d = {p, shared + warp * D::RING, lane, first, end, step};
    d.tile = tile;
    if (!experts_used) {
        d.begin();
    } else if (threadIdx.x < 32) {
        prefetch_experts(p, lane, TILES);
    }
    if (is_single_row && p.norm_input) {
        for (u32 i = 32 * threadIdx.x; i < p.cols; i += 32 * blockDim.x) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm_weight + i));
        }
    }
    launch_dependents();
    grid_dependency_wait();
    const u16 *x[COLS8];
    find_inputs(p, d, experts_used, is_single_row, start, cols, g, c, single_row, x);
    for (u32 buffer = 0; tile < p.tiles; buffer ^= slices_per_warp % 2) {
        // The epilogue's operands are loaded before the tile's products.
        u32 matrix = TILES == 2 ? 0 : matrix_of(p, tile);
        u32 row = (tile - p.matrices[matrix].first_tile) * TILE_ROWS + thread % TILE_ROWS;
        u32 exponents[TILES] = {};
        float residual = 0.0f;
        if (thread < TILE_ROWS * cols) {
#pragma unroll
            for (int i = 0; i < TILES; i++) exponents[i] = row_exponent(p.matrices[matrix + i], d.expert, row);
            if (TILES == 1 && p.residual) residual = residual_at(p, row, start + thread / TILE_ROWS);
        }
        float sums[TILES][COLS8][4] = {};
        float *partials_of_tile = partials + (buffer * WARPS + warp - member) * slices_per_warp * TILES * tile_sums;
        u32 slice = member * slices_per_warp, slice_end = min(first + p.slice_chunks, end);
        auto store_partials = [&]() {
            if (slices_per_warp > 1 && slice == member * slices_per_warp) reuse.wait();
            store_slice(partials_of_tile, slice, tile_sums, cols, g, c, sums);
            slice++;
            slice_end = end;
        };
        for (u32 chunk = first; chunk < end; chunk += D::CHUNKS) {
            const u8 *slot = d.ring + d.pipe.wait();
            if (chunk == slice_end) store_partials();
            // Two tiles and many rows leave registers for one chunk at a time.
            if (COLS8 * TILES < 4 && chunk + D::CHUNKS <= slice_end) {
                multiply<LAYOUT, D::CHUNKS>(slot, D::SLOT / TILES, lane, x, chunk, sums);
            } else {
#pragma unroll 1
                for (u32 k = 0; k < D::CHUNKS && chunk + k < end; k++) {
                    if (chunk + k == slice_end) store_partials();
                    const u8 *weights = slot + k * D::Weights::BYTES;
                    multiply<LAYOUT, 1>(weights, D::SLOT / TILES, lane, x, chunk + k, sums);
                }
            }
            d.pipe.release();
            d.fetch();
        }
        store_partials();
        team_sync(team + 1, warps);
        for (u32 at = thread; at < TILE_ROWS * cols; at += 32 * warps) {
            u32 r = at % TILE_ROWS, col = at / TILE_ROWS;
            float total[TILES] = {};
#pragma unroll 8
            for (u32 slice = 0; slice < slices; slice++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    total[i] += partials_of_tile[(slice * TILES + i) * tile_sums + col * (TILE_ROWS + 1) + r];
                }
            }
            if (TILES == 2) {
                epilogue_gated(p, d.expert, row, start + col, total[0], total[TILES - 1], exponents[0],
                           exponents[TILES - 1]);
            } else {
                if (at != thread) residual = residual_at(p, row, start + col);
                epilogue(p, matrix, d.expert, row, start + col, total[0], exponents[0], residual);
            }
        }
        if (slices_per_warp > 1) reuse.end();
        tile += step;
    }
}

// Two blocks share a multiprocessor.
#define GEMV(NAME, LAYOUT, COLS8, TILES)                                                              \
    KERNEL __launch_bounds__(THREADS, 2)                                                             \
    NAME(const __grid_constant__ Matmul p) {                                                       \
        gemv<LAYOUT, COLS8, TILES>(p);                                                                \
    }
#define GEMVS(NAME, LAYOUT)                                                                           \
    GEMV(gemv_mma_##NAME##_8, LAYOUT, 1, 1)                                                                \
    GEMV(gemv_mma_##NAME##_16, LAYOUT, 2, 1)                                                               \
    GEMV(gemv_mma_##NAME##_8_gated, LAYOUT, 1, 2)                                                          \
    GEMV(gemv_mma_##NAME##_16_gated, LAYOUT, 2, 2)
GEMVS(f16, F16)
GEMVS(s8, S8)
GEMVS(s6x16, S6X16)
GEMVS(u5, U5)
GEMVS(u4, U4)
GEMVS(s4x16, S4X16)
GEMVS(u2x16, U2X16)
GEMVS(iq4, IQ4)
GEMVS(codebook, CODEBOOK)
GEMVS(fp4, FP4)
GEMVS(s24_f16, S24_F16)
GEMVS(s24_s8, S24_S8)
GEMVS(s24_s4, S24_S4)

// GEMV with f32 weights, which are few (routers, tests), in plain f32 arithmetic. A block takes
// WEIGHTS rows of weights and up to eight input rows. Bound by memory.
template <u32 WEIGHTS> DEVICE void gemv_f32(const Matmul &p) {
    __shared__ float sums[GEMV_F32_ROWS][WEIGHTS][GEMV_F32_THREADS / 32];
    launch_dependents();
    grid_dependency_wait();
    u32 t = threadIdx.x, row = blockIdx.x * WEIGHTS, expert = 0;
    u32 start = blockIdx.y * (p.experts_used ? 1 : GEMV_F32_ROWS);
    u32 end = p.experts_used ? start + 1 : min(start + GEMV_F32_ROWS, p.rows);
    if (p.experts_used && p.route) {
        expert = (u32)p.route[(u64)(start / p.experts_used) * p.route_stride + p.experts_used
                              + start % p.experts_used];
    }
    if (p.experts_used && !p.route) expert = start % p.experts_used;
    const float *inputs[GEMV_F32_ROWS];
#pragma unroll
    for (u32 r = 0; r < GEMV_F32_ROWS; r++) {
        u64 from = p.experts_used ? start / p.experts_used : start + r < end ? input_row(p, start + r) : 0;
        inputs[r] = (const float *)p.input + from * p.input_stride;
        if (p.experts_used && !p.shares_input) inputs[r] += start % p.experts_used * p.cols;
    }
    const u8 *packed = packed_tiles(p, p.matrices[0], expert);
    bool is_whole = p.cols % 4 == 0 && (p.input_stride % 4 == 0 || end == start + 1) && (u64)inputs[0] % 16 == 0;
    float slices[GEMV_F32_ROWS][WEIGHTS] = {};
#pragma unroll (WEIGHTS == 1 ? 2 : 1)
    for (u32 quad = t; 4 * quad < p.cols; quad += GEMV_F32_THREADS) {
        float4 w[WEIGHTS], x[GEMV_F32_ROWS];
        u32 i = 4 * quad;
#pragma unroll
        for (u32 j = 0; j < WEIGHTS; j++) w[j] = *f32_weights(p, packed, row + j, quad);
#pragma unroll
        for (u32 r = 0; r < GEMV_F32_ROWS; r++) {
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
        for (u32 r = 0; r < GEMV_F32_ROWS; r++) {
#pragma unroll
            for (u32 j = 0; j < WEIGHTS; j++) slices[r][j] = fma4(w[j], x[r], slices[r][j]);
        }
    }
    // Lane i gets the warp's sum of result i.
    float results[GEMV_F32_ROWS * WEIGHTS];
#pragma unroll
    for (u32 i = 0; i < GEMV_F32_ROWS * WEIGHTS; i++) results[i] = slices[i / WEIGHTS][i % WEIGHTS];
    sum_of_each(results);
    u32 lane = t % 32;
    if (lane < GEMV_F32_ROWS * WEIGHTS) sums[lane / WEIGHTS][lane % WEIGHTS][t / 32] = results[0];
    __syncthreads();
    u32 r = t / WEIGHTS, j = t % WEIGHTS;
    if (r >= end - start || row + j >= p.matrices[0].rows) return;
    float total = 0.0f;
    for (u32 i = 0; i < GEMV_F32_THREADS / 32; i++) total += sums[r][j][i];
    epilogue(p, 0, expert, row + j, start + r, total, ONE_EXPONENT, residual_at(p, row + j, start + r));
}

KERNEL __launch_bounds__(GEMV_F32_THREADS) gemv_f32_1(const __grid_constant__ Matmul p) { gemv_f32<1>(p); }
KERNEL __launch_bounds__(GEMV_F32_THREADS) gemv_f32_4(const __grid_constant__ Matmul p) { gemv_f32<4>(p); }
