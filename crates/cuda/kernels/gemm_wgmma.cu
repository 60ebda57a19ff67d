// GEMM with `wgmma` on Hopper, grouped by expert where there are experts: bound by reading and unpacking the
// weights of few input rows, by tensor cores with many. The sums have the bits of `mma`.
//
// Grid: (row groups, blocks of weight tiles, splits); 384 threads: two consumer warp groups and one
// producer group. A block takes 128 weight rows, or 64 of the gate and 64 of the up projection, and
// WIDTH input rows. Each consumer group multiplies half of the weights, from registers in fragment
// order, with input from shared memory. The producer fills a ring of three or four stages, two chunks
// each, with full and empty mbarriers; the input was swizzled by `swizzle_input`.
//
// Where weight tiles do not give all multiprocessors work, several blocks (splits) share the split-K
// slices of the same sums. Then the sums of slices go to memory, and `add_slices` adds them.
#include "mbarrier.cuh"
#include "matmul.cuh"
#include "wgmma.cuh"

#define STEP 2u   // chunks of a stage
#define PITCH 132u // floats of a token's results in shared memory, padded against bank conflicts
#define GROUP 128u // threads of a warp group

// A weight tile of a block.
template <bool GATED> struct Tile {
    u32 matrix, tile; // in the matrix
    bool is_in;

    __device__ __forceinline__ Tile(const Matmul &p, u32 i) {
        tile = GATED ? blockIdx.y * (GEMM_TILES / 2) + i % (GEMM_TILES / 2) : blockIdx.y * GEMM_TILES + i;
        is_in = tile < p.tiles;
        matrix = GATED ? i / (GEMM_TILES / 2) : is_in ? matrix_of(p, tile) : 0;
        if (!GATED) tile -= p.matrices[matrix].first_tile;
    }
};

// A consumer thread's sums of a split-K slice in memory: of four accumulators, then at a distance of
// 2 GROUP the next ones. Shape: [slices, blocks of weight tiles, row groups, fours, 2 GROUP].
DEVICE float4 *slice_sums(const Gemm &m, u32 slice, u32 fours) {
    u32 block = (slice * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    return (float4 *)m.slice_sums + (u64)block * fours * 2 * GROUP + threadIdx.x;
}

#if __CUDA_ARCH__ >= 900

// The shared memory of a block.
template <int LAYOUT, u32 WIDTH> struct SharedMemory {
    // Of the ring: a fourth where a block is alone on its multiprocessor and there is room.
    static const u32 STAGES = WIDTH == 128 && Packed<LAYOUT>::BYTES < CHUNK_BYTES_F16 ? 4 : 3;

    u8 inputs[STAGES][STEP][WIDTH * ROW_BYTES];
    u8 weights[STAGES][GEMM_TILES][STEP * Packed<LAYOUT>::BYTES];
    u64 full[STAGES], empty[STAGES];
};

// The chunks of a block: all, or those of its split, which begins with a slice.
struct ChunkRange {
    u32 first, count;

    __device__ __forceinline__ ChunkRange(const Gemm &m) {
        first = blockIdx.z * m.split_chunks;
        count = min(m.split_chunks, m.matmul.chunks - first);
    }
};

// Producer: each of four warps copies two weight tiles, and one of them the input. Chunks count from
// the first of the block's.
template <int LAYOUT, bool GATED, u32 WIDTH>
DEVICE void produce(const Gemm &m, const RowGroup &group, const ChunkRange &range,
                    SharedMemory<LAYOUT, WIDTH> &shared) {
    const Matmul &p = m.matmul;
    const u32 BYTES = Packed<LAYOUT>::BYTES, INPUT_BYTES = WIDTH * ROW_BYTES;
    const u32 STAGES = SharedMemory<LAYOUT, WIDTH>::STAGES;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32, i = 2 * warp + lane;
    Tile<GATED> tile(p, i % GEMM_TILES);
    bool has_tile = lane < 2 && tile.is_in;
    u32 tiles = __popc(__ballot_sync(~0u, Tile<GATED>(p, lane % GEMM_TILES).is_in)) / (32 / GEMM_TILES);
    const Matrix &matrix = p.matrices[tile.matrix];
    const u8 *weights = packed_tiles(p, matrix, group.expert) + ((u64)tile.tile * p.chunks + range.first) * BYTES;
    // A panel holds the first chunk of all its rows, then the second.
    u64 cell_bytes = m.panel_rows * ROW_BYTES;
    const u8 *input = (const u8 *)p.input + (group.first / m.panel_rows * p.chunks + range.first) * cell_bytes
                      + group.first % m.panel_rows * ROW_BYTES;
    // 8-bit weights that only one row group reads are the first to be evicted from the L2 cache. For those of
    // 4 bits that was slower.
    const bool HAS_BYTES = Packed<LAYOUT>::BYTES >= CHUNK_BYTES_S8 && LAYOUT != F16;
    bool is_read_once = HAS_BYTES && gridDim.x == 1;
    auto produce_weights = [&](u32 chunk) {
        u32 stage = chunk / STEP % STAGES, count = min(STEP, range.count - chunk);
        u32 barrier = shared_address(&shared.full[stage]), to = shared_address(shared.weights[stage][i]);
        if (warp == 0 && lane == 0) mbarrier_expect_tx(barrier, count * (tiles * BYTES + INPUT_BYTES));
        const u8 *from = weights + (u64)chunk * BYTES;
        if (has_tile && is_read_once) bulk_copy_evict_first(to, from, count * BYTES, barrier);
        if (has_tile && !is_read_once) bulk_copy(to, from, count * BYTES, barrier);
    };
    auto produce_input = [&](u32 chunk) {
        u32 stage = chunk / STEP % STAGES, count = min(STEP, range.count - chunk);
        const u8 *from = input + chunk * cell_bytes;
        if (warp != 3 || lane != 0) return;
        // Chunks of whole panels are contiguous.
        u32 pieces = m.panel_rows == WIDTH ? 1 : count, bytes = count / pieces * INPUT_BYTES;
        for (u32 j = 0; j < pieces; j++) {
            u32 to = shared_address(shared.inputs[stage][j]);
            bulk_copy(to, from + j * cell_bytes, bytes, shared_address(&shared.full[stage]));
        }
    };
    u32 first = min(STAGES * STEP, range.count);
    for (u32 chunk = 0; chunk < first; chunk += STEP) produce_weights(chunk);
    grid_dependency_wait();
    for (u32 chunk = 0; chunk < first; chunk += STEP) produce_input(chunk);
    for (u32 chunk = STAGES * STEP; chunk < range.count; chunk += STEP) {
        u32 stages = chunk / STEP;
        mbarrier_wait(shared_address(&shared.empty[stages % STAGES]), (stages / STAGES % 2) ^ 1);
        produce_weights(chunk);
        produce_input(chunk);
    }
}

// A consumer group's accumulators: of the current split-K slice, and totals.
template <int LAYOUT, u32 WIDTH> struct Accumulators {
    static const int COUNT = WIDTH / 2;
    float sums[COUNT], totals[COUNT];
    u32 warp;
    u32 slice, chunks_left; // of the current slice

    // Issues the products of a chunk of a stage.
    __device__ __forceinline__ void multiply(const Matmul &p, const SharedMemory<LAYOUT, WIDTH> &shared,
                                             u32 stage, u32 chunk, const Fragment (&weights)[4]) {
        u64 inputs = wgmma_matrix(shared_address(shared.inputs[stage][chunk]));
        bool is_first = chunks_left == p.slice_chunks;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            wgmma<false>(sums, weights[step], inputs + 2 * step, step > 0 || !is_first);
        }
        wgmma_commit();
    }

    // Behind the last chunk of a slice: adds up its sums, or stores them for `add_slices`.
    __device__ __forceinline__ void end_chunk(const Gemm &m, bool is_last) {
        if (--chunks_left > 0 && !is_last) return;
        chunks_left = m.matmul.slice_chunks;
        if (!m.slice_sums) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) totals[i] += sums[i];
            return;
        }
        float4 *out = slice_sums(m, slice++, COUNT / 4);
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            out[2 * GROUP * (i / 4)] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        }
    }

    // Main loop: the next chunk's weights are read while a chunk's products run. The tensor cores work for
    // the other consumer group, or for another block, while weights are unpacked; those of 4 bits with few
    // input rows leave registers to unpack the next ones meanwhile. F16 weights are not unpacked: products
    // that run read the registers that the next ones would be read to.
    __device__ __forceinline__ void all(const Gemm &m, const ChunkRange &range, SharedMemory<LAYOUT, WIDTH> &shared) {
        const Matmul &p = m.matmul;
        const bool READS_AHEAD = LAYOUT != F16;
        const bool UNPACKS_AHEAD = WIDTH <= 32 && Packed<LAYOUT>::BYTES < CHUNK_BYTES_S8;
        u32 lane = threadIdx.x % 32;
        slice = range.first / p.slice_chunks;
        chunks_left = p.slice_chunks;
#pragma unroll
        for (int i = 0; i < COUNT; i++) sums[i] = totals[i] = 0.0f;
        RingPosition<SharedMemory<LAYOUT, WIDTH>::STAGES> next = {};
        Packed<LAYOUT> packed;
        Fragment weights[2][4]; // of even and of odd chunks
        static_assert(STEP % 2 == 0, "a stage begins with an even chunk");
        auto unpack = [&](u32 chunk) {
#pragma unroll
            for (int step = 0; step < 4; step++) weights[chunk % 2][step] = packed.fragment(step);
        };
        mbarrier_wait(shared_address(&shared.full[0]), 0);
        packed.load(shared.weights[0][warp], lane);
        if (UNPACKS_AHEAD) unpack(0);
        for (u32 first = 0; first < range.count; first += STEP) {
            u32 now = next.slot;
            next.advance();
#pragma unroll
            for (u32 i = 0; i < STEP; i++) {
                bool is_last = first + i + 1 == range.count;
                auto read_next = [&] {
                    if (is_last) return;
                    bool is_new = i + 1 == STEP;
                    if (is_new) mbarrier_wait(shared_address(&shared.full[next.slot]), next.parity);
                    const u8 *stage = shared.weights[is_new ? next.slot : now][warp];
                    packed.load(stage + (is_new ? 0 : i + 1) * Packed<LAYOUT>::BYTES, lane);
                    if (UNPACKS_AHEAD) unpack(i + 1);
                };
                if (!UNPACKS_AHEAD) unpack(i);
                multiply(p, shared, now, i, weights[i % 2]);
                if (READS_AHEAD) read_next();
                wgmma_wait<0>();
                wgmma_results(sums);
                if (!READS_AHEAD) read_next();
                if (lane == 0 && i + 1 == STEP) mbarrier_arrive(shared_address(&shared.empty[now]));
                end_chunk(m, is_last);
                if (is_last) break;
            }
        }
    }
};

// Loads neighbouring numbers from shared memory at once.
template <u32 N> DEVICE void load(float (&to)[N], const float *from) {
    if (N == 4) {
        float4 x = *(const float4 *)from;
        to[0] = x.x, to[1] = x.y, to[2 % N] = x.z, to[3 % N] = x.w;
    } else {
        float2 x = *(const float2 *)from;
        to[0] = x.x, to[1] = x.y;
    }
}

// Epilogue: results pass through shared memory; then a warp takes some tokens, and a lane four
// neighbouring weight rows, or of a gated matmul two of the gate and two of the up projection.
template <bool GATED, u32 WIDTH, int COUNT>
DEVICE void epilogue_all(const Gemm &m, const RowGroup &group, float *results, const float (&totals)[COUNT]) {
    const Matmul &p = m.matmul;
    const u32 ROWS = GATED ? 2 : 4, WARPS = 2 * GROUP / 32, UP = GEMM_TILES / 2 * TILE_ROWS, BATCH = 4;
    static_assert(WIDTH * PITCH * 4 <= 3 * STEP * WIDTH * ROW_BYTES, "room for the results");
    u32 t = threadIdx.x, lane = t % 32, row_of_lane = t / 32 * TILE_ROWS + lane / 4;
    // All products are complete: the input's space is free.
    sync<2 * GROUP>();
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        u32 token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        results[token * PITCH + row_of_lane + i % 4 / 2 * 8] = totals[i];
    }
    sync<2 * GROUP>();
    u32 row_in_block = ROWS * lane;
    Tile<GATED> tile(p, row_in_block / TILE_ROWS);
    if (!tile.is_in) return;
    u32 row = tile.tile * TILE_ROWS + row_in_block % TILE_ROWS;
    if (row >= p.matrices[tile.matrix].rows) return;
    RowEpilogue<GATED, ROWS, 1, false> epilogue(p, tile.matrix, group.expert, row);
    u32 end = group.count;
    bool has_act_epilogue = !GATED && p.has_act_epilogue;
#pragma unroll 1
    for (u32 token = t / 32; has_act_epilogue && token < end; token += WARPS) {
        float y[ROWS];
        load<ROWS>(y, results + token * PITCH + row_in_block);
        epilogue.activate_row(y);
        epilogue.store(result_row(m, group.first + token), y);
    }
#pragma unroll 1
    for (u32 first = t / 32; !has_act_epilogue && first < end; first += BATCH * WARPS) {
        float sums[BATCH][ROWS], others[BATCH][ROWS];
        u32 at[BATCH];
        // All loads before the first store.
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
            u32 token = min(first + j * WARPS, end - 1);
            const float *result = results + token * PITCH + row_in_block;
            load<ROWS>(sums[j], result);
            if (GATED) {
                load<ROWS>(others[j], result + UP);
            } else {
                epilogue.residual(group.first + token, others[j]);
            }
            at[j] = result_row(m, group.first + token);
        }
        epilogue.finish(sums, others);
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
            if (first + j * WARPS < end) epilogue.store(at[j], sums[j]);
        }
    }
    if (p.peers == 0) return;
    // Not above, where it would slow down a device that is alone.
#pragma unroll 4
    for (u32 token = t / 32; token < end; token += WARPS) {
        for (u32 j = 0; j < ROWS; j++) {
            store_again_on_peers<GATED>(p, tile.matrix, row + j, result_row(m, group.first + token));
        }
    }
}

template <int LAYOUT, bool GATED, u32 WIDTH> DEVICE void gemm_wgmma(const Gemm &m) {
    extern __shared__ __align__(1024) u8 bytes[];
    SharedMemory<LAYOUT, WIDTH> &shared = *(SharedMemory<LAYOUT, WIDTH> *)bytes;
    if (threadIdx.x < shared.STAGES) {
        mbarrier_init(shared_address(&shared.full[threadIdx.x]), 1);
        mbarrier_init(shared_address(&shared.empty[threadIdx.x]), 2 * GROUP / 32);
        fence_proxy_async();
    }
    launch_dependents();
    if (m.groups) {
        if (threadIdx.x < 32) prefetch_experts(m.matmul, threadIdx.x, GATED ? 2 : 1);
        grid_dependency_wait();
    }
    RowGroup group(m, blockIdx.x, WIDTH);
    if (group.count == 0) return;
    ChunkRange range(m);
    __syncthreads();
    if (threadIdx.x >= 2 * GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        // A warp that copies nothing does not hold up the ring, and could miss a whole phase of it.
        u32 warp = threadIdx.x % GROUP / 32;
        if (warp == 0 || warp == 3 || Tile<GATED>(m.matmul, 2 * warp).is_in) {
            produce<LAYOUT, GATED, WIDTH>(m, group, range, shared);
        }
    } else {
        if (WIDTH <= 64) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        }
        Accumulators<LAYOUT, WIDTH> results;
        results.warp = threadIdx.x / 32;
        // An earlier kernel may still use the memory of the slices' sums.
        if (m.slice_sums) grid_dependency_wait();
        results.all(m, range, shared);
        if (m.slice_sums) return;
        grid_dependency_wait();
        epilogue_all<GATED, WIDTH>(m, group, (float *)shared.inputs, results.totals);
    }
}

#endif

DEVICE void add_to(float (&sums)[2][2], const float4 &x) {
    sums[0][0] += x.x, sums[1][0] += x.y, sums[0][1] += x.z, sums[1][1] += x.w;
}

// Adds the sums of slices, in order, and runs the epilogue. Grid: (row groups, blocks of weight
// tiles, eights of input rows), so that a block takes eight rows of one of `gemm_wgmma`; 256
// threads, or 128 of a gated matmul, which take a row of the gate and one of the up projection.
template <bool GATED> DEVICE void add_slices(const Gemm &m) {
    const Matmul &p = m.matmul;
    u32 lane = threadIdx.x % 32, first = 8 * blockIdx.z + lane % 4 * 2;
    launch_dependents();
    RowGroup group(m, blockIdx.x, 8 * gridDim.z);
    Tile<GATED> tile(p, threadIdx.x / 32);
    if (8 * blockIdx.z >= group.count || !tile.is_in) return;
    u32 row = tile.tile * TILE_ROWS + lane / 4;
    if (row >= p.matrices[tile.matrix].rows) return;
    RowEpilogue<GATED, 2, 8, true> epilogue(p, tile.matrix, 0, row);
    grid_dependency_wait();
    float sums[2][2] = {}, others[2][2] = {}; // of two tokens and two rows
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        if (!GATED) epilogue.residual(group.first + min(first + i, group.count - 1), others[i]);
    }
#pragma unroll 8
    for (u32 slice = 0; slice < p.slices; slice++) {
        const float4 *from = slice_sums(m, slice, gridDim.z) + 2 * GROUP * blockIdx.z;
        add_to(sums, from[0]);
        if (GATED) add_to(others, from[GROUP]);
    }
    if (!GATED && p.has_act_epilogue) {
        epilogue.activate_row(sums[0]);
        epilogue.activate_row(sums[1]);
    } else {
        epilogue.finish(sums, others);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        if (first + i < group.count) epilogue.store(group.first + first + i, sums[i]);
    }
}

KERNEL __launch_bounds__(2 * GROUP) add_slices(const __grid_constant__ Gemm m) { add_slices<false>(m); }
KERNEL __launch_bounds__(GROUP) add_slices_gated(const __grid_constant__ Gemm m) { add_slices<true>(m); }

#if __CUDA_ARCH__ >= 900
#define GEMM(NAME, LAYOUT, GATED, WIDTH)                                                             \
    KERNEL __launch_bounds__(3 * GROUP, WIDTH <= 64 ? 2 : 1) NAME(const __grid_constant__ Gemm m) {    \
        gemm_wgmma<LAYOUT, GATED, WIDTH>(m);                                                               \
    }
#else
#define GEMM(NAME, LAYOUT, GATED, WIDTH) KERNEL NAME(const __grid_constant__ Gemm) {}
#endif
#define GEMM_PAIR(NAME, LAYOUT, WIDTH)                                                               \
    GEMM(NAME, LAYOUT, false, WIDTH)                                                                     \
    GEMM(NAME##_gated, LAYOUT, true, WIDTH)
#define GEMMS(NAME, LAYOUT)                                                                          \
    GEMM_PAIR(gemm_wgmma_##NAME##_16, LAYOUT, 16)                                                        \
    GEMM_PAIR(gemm_wgmma_##NAME##_32, LAYOUT, 32)                                                        \
    GEMM_PAIR(gemm_wgmma_##NAME##_64, LAYOUT, 64)                                                        \
    GEMM_PAIR(gemm_wgmma_##NAME##_128, LAYOUT, 128)
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
