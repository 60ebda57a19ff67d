// Persistent megakernel: a decode step of one row in one cooperative launch. A block on every
// multiprocessor goes through the list of stages. There are no grid barriers: every value of the
// step has memory of its own, which holds sentinels until it is written, and consumers poll it
// (`poll_all`). So stages overlap, and the producer warp of a block fetches weights, keys and
// values stages ahead, as far as shared memory reaches.
//
// Grid: one block a multiprocessor; 512 consumer threads and a producer warp group. Shared memory:
// `SharedMemory` and a workspace. Bound by reading the weights, then by the latency of dependent
// instructions between stages.
//
// The arithmetic is that of the single kernels (`gemv_mma`, `decode_attention_mma`): a row has the
// same bits either way.
#include "persistent_attention.cuh"
#include "persistent_experts.cuh"

// Layouts cost code, which has to be fetched, and registers, as experts do: so there are several
// kernels.
#ifndef NAME
#define NAME persistent
#endif
#ifndef LAYOUTS
#define LAYOUTS(DO) DO(F16) DO(S8) DO(S6X16) DO(U5) DO(U4) DO(S4X16) DO(U2X16) DO(IQ4) DO(CODEBOOK) DO(FP4)
#endif

#if __CUDA_ARCH__ >= 900

// Loads an f16 input to shared memory, or each expert's.
DEVICE void load_halves(const Matmul &p, bool is_gated, u32 t, u16 *out) {
    const uint4 *from = (const uint4 *)p.input;
    u32 len = p.input_stride / 8;
    if (EXPERTS && p.experts_used && !is_gated && !p.shares_input) len *= p.experts_used;
#pragma unroll 1
    for (u32 first = t; first < len; first += 4 * THREADS) {
        uint4 x[4];
        poll_all<true>(from + first, THREADS, len - first, x);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 i = first + j * THREADS;
            if (i < len) ((uint4 *)out)[i] = x[j];
        }
    }
}

// Loads a thread's norm weights, from its first four on.
DEVICE void load_quads(const float4 *weights, u32 first, u32 quads, float4 (&w)[NORM_QUADS]) {
#pragma unroll
    for (u32 j = 0; j < NORM_QUADS; j++) {
        u32 i = first + j * THREADS;
        w[j] = i < quads ? weights[i] : make_float4(0, 0, 0, 0);
    }
}

// Loads an input to shared memory, RMS-normalised as `norm_rows` does. The norm's weights are
// prefetched to `weights` in shared memory while the row is not there yet.
DEVICE void load_normed(const Matmul &p, u32 t, u16 *out, float *weights) {
    u32 quads = p.cols / 4, all = p.input_stride / 4;
    for (u32 i = t; i < quads; i += THREADS) copy_async(shared_address(weights + 4 * i), p.norm_weight + 4 * i);
    const uint4 *from = (const uint4 *)p.norm_input;
    uint4 x[NORM_QUADS];
    float square = 0.0f;
#pragma unroll 1
    for (u32 first = t; first < quads; first += NORM_QUADS * THREADS) {
        poll_all<false>(from + first, THREADS, quads - first, x);
#pragma unroll
        for (int j = 0; j < NORM_QUADS; j++) square = add_squares(as_floats(x[j]), square);
    }
    float inverse_count, eps;
    float4 w[NORM_QUADS];
    // Operands of what follows the sum are read before the barrier. Each thread reads the weights
    // that it copied itself.
    float sum = sum_of_warps(warp_sum(square), t, [&] {
        asm volatile("cp.async.wait_all;" ::: "memory");
        inverse_count = 1.0f / (float)p.cols, eps = p.norm_eps;
        load_quads((const float4 *)weights, t, quads, w);
    });
    float scale = rms_factor(sum, inverse_count, eps);
#pragma unroll 1
    for (u32 first = t; first < all; first += NORM_QUADS * THREADS) {
        if (quads > NORM_QUADS * THREADS) {
            if (first < quads) poll_all<false>(from + first, THREADS, quads - first, x);
            load_quads((const float4 *)weights, first, quads, w);
        }
#pragma unroll
        for (u32 j = 0; j < NORM_QUADS; j++) {
            u32 i = first + j * THREADS;
            float4 y = as_floats(x[j]);
            u32 low = half_pair(as_input(y.x * scale * w[j].x), as_input(y.y * scale * w[j].y));
            u32 high = half_pair(as_input(y.z * scale * w[j].z), as_input(y.w * scale * w[j].w));
            if (i < all) ((uint2 *)out)[i] = i < quads ? make_uint2(low, high) : make_uint2(0, 0);
        }
    }
}

// Some chunks of a tile, or of two, unpacked to fragments.
template <int LAYOUT, int COUNT, int TILES> struct Chunks {
    static const int STEPS = Packed<LAYOUT>::STEPS;
    Packed<LAYOUT> w[COUNT][TILES];
    Fragment f[COUNT][TILES][STEPS];

    __device__ __forceinline__ void load(const u8 *const (&slots)[TILES], u32 lane) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) w[k][i].load(slots[i] + k * Packed<LAYOUT>::BYTES, lane);
        }
    }

    __device__ __forceinline__ void unpack() {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int step = 0; step < STEPS; step++) f[k][i][step] = w[k][i].fragment(step);
            }
        }
    }

    __device__ __forceinline__ void multiply(const uint4 (&b)[COUNT][2], float (&sums)[TILES][4]) const {
        // Dense codes of less than a byte take longest to unpack: all of it before the first `mma` is faster.
        if (STEPS == Dense::STEPS && Packed<LAYOUT>::BYTES < CHUNK_BYTES_S8) __syncwarp();
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) w[k][i].multiply(sums[i], f[k][i][step], b[k], step);
            }
        }
    }
};

// Loads a lane's part of the input columns of some chunks.
template <int LAYOUT, int CHUNKS> DEVICE void load_input(const u16 *x, u32 lane, uint4 (&b)[CHUNKS][2]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        // The only input row is the first of eight columns; the results of other columns are
        // unused.
        b[k][0] = b[k][1] = undefined_registers();
        if (lane < 4) Packed<LAYOUT>::load_input(x + k * CHUNK_COLS, b[k]);
    }
}

// Multiplies some chunks of a tile, or of two.
template <int LAYOUT, int CHUNKS, int TILES>
DEVICE void multiply(const u8 *const (&slots)[TILES], u32 lane, const u16 *x, float (&sums)[TILES][4]) {
    Chunks<LAYOUT, CHUNKS, TILES> weights;
    uint4 b[CHUNKS][2];
    weights.load(slots, lane);
    load_input<LAYOUT, CHUNKS>(x, lane, b);
    weights.unpack();
    weights.multiply(b, sums);
}

// A cursor in the ring slots with the next chunks of a tile, or of two.
template <int TILES> struct TileCursor {
    const u8 *at[TILES];
    u32 left; // chunks

    __device__ __forceinline__ void take(SharedMemory &shared, ConsumerRing &ring, u32 chunks) {
#pragma unroll
        for (int i = 0; i < TILES; i++) at[i] = ring.take(shared);
        left = chunks;
    }

    __device__ __forceinline__ void skip(u32 chunks, u32 bytes) {
#pragma unroll
        for (int i = 0; i < TILES; i++) at[i] += chunks * bytes;
        left -= chunks;
    }
};

#define MINUS_ZERO 0x80000000u

// Operands of a tile's epilogue: destination, exponents of scales, bias and residual, loaded before the tile's
// products. Without bias or residual they are minus zero, which changes no result.
struct Epilogue {
    u32 row;
    float *out; // or none: for gated rows, and beyond the last row
    u32 exponent, other_exponent;
    float bias;
    u32 residual;

    __device__ __forceinline__ void begin(const Matmul &p, bool is_gated, u32 tile, u32 thread) {
        if (thread >= TILE_ROWS) return;
        TileExpert member(p, tile);
        tile -= member.place * p.tiles;
        u32 matrix = is_gated ? 0 : matrix_of(p, tile);
        const Matrix &m = p.matrices[matrix];
        row = (tile - m.first_tile) * TILE_ROWS + thread;
        exponent = row_exponent(m, member.expert, row);
        bool is_row = row < m.rows;
        out = is_row ? m.out + row : 0;
        residual = p.residual && matrix == 0 && is_row ? load_relaxed(p.residual + row) : MINUS_ZERO;
        bias = m.bias && is_row ? m.bias[row] : __uint_as_float(MINUS_ZERO);
        if (is_gated) other_exponent = row_exponent(p.matrices[1], member.expert, row);
    }
};

// Chunks that registers allow at a time.
template <int LAYOUT, int TILES> struct ChunkBatch {
    static const u32 IN_SLOT = Slot<LAYOUT>::CHUNKS, COUNT = IN_SLOT > 1 && TILES == 1 && LAYOUT != U2X16 ? 2 : 1;
};

// Multiplies the input with a warp's slice of a tile, or of two, from a chunk on.
template <int LAYOUT, int TILES>
DEVICE void multiply_slice(SharedMemory &shared, ConsumerRing &ring, u32 chunk, u32 end,
    TileCursor<TILES> slots, const u16 *input,
                          float (&sums)[TILES][4]) {
    typedef ChunkBatch<LAYOUT, TILES> At;
    u32 lane = ring.lane;
    const u16 *x = input + chunk * CHUNK_COLS + Packed<LAYOUT>::first_column(lane % 4);
#pragma unroll 1
    while (chunk < end) {
        if (slots.left == 0) {
            slots.take(shared, ring, min(At::IN_SLOT, end - chunk));
            ring.store(shared, TILES, slots.left * Packed<LAYOUT>::BYTES);
        }
        chunk += slots.left;
#pragma unroll 1
        while (slots.left >= At::COUNT) {
            multiply<LAYOUT, At::COUNT>(slots.at, lane, x, sums);
            x += At::COUNT * CHUNK_COLS;
            slots.skip(At::COUNT, Packed<LAYOUT>::BYTES);
        }
        if (slots.left > 0) multiply<LAYOUT, 1>(slots.at, lane, x, sums);
        x += slots.left * CHUNK_COLS;
        slots.left = 0;
        ring.release(shared, TILES);
    }
}

// The row of the team's tile that a thread finishes, if it is below TILE_ROWS. The team's warps
// take turns, so that none of them is always late.
DEVICE u32 epilogue_row(u32 t, const Partition &share, u32 buffer) {
    return (t - 32 * buffer) & (32 * share.warps - 1);
}

// Resets values to sentinels, each block a part.
DEVICE void reset_sentinels(uint4 *values, u32 len) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < len; i += gridDim.x * THREADS) {
        values[i] = make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL);
    }
}

// Loads a matmul's input to shared memory, polling until it is written.
DEVICE void load_input_rows(const Matmul &p, bool is_gated, u32 t) {
    SharedMemory &shared = shared_memory();
    u16 *input = (u16 *)shared.workspace;
    if (p.norm_input) {
        // The chosen experts lie behind the input.
        float *weights = (float *)(input + p.input_stride + (EXPERTS ? sizeof(ChosenExperts) / 2 : 0));
        load_normed(p, t, input, weights);
    } else {
        load_halves(p, is_gated, t, input);
    }
}

// The same, with the experts that were chosen, once all threads have loaded.
DEVICE void load_input_shared(const Matmul &p, bool is_gated, u32 t, const PersistentStep *last) {
    load_input_rows(p, is_gated, t);
    if (EXPERTS && p.experts_used && is_gated) load_chosen(p, true, t);
    if (EXPERTS) asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
    // Once the last stage's input is written, every block has read what it needed.
    if (last) reset_sentinels(last->values, last->values_len);
}

// A plain or gated matmul: a warp multiplies its slices of the block's tiles. Returns the slots
// taken so far.
template <int LAYOUT, int TILES> DEVICE u32 matmul(u32 stage, u32 taken, const PersistentStep *last) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = shared.stages[opaque(stage % 2)].matmul;
    u32 t = opaque(threadIdx.x), lane = t % 32, warp = t / 32;
    ConsumerRing ring = {warp, lane, taken};
    const u16 *input = (const u16 *)shared.workspace;
    const bool IS_GATED = TILES == 2;
    Partition share(p, IS_GATED, warp);
    Epilogue epilogue = {};
    // The first chunks are unpacked before the input arrives.
    typedef ChunkBatch<LAYOUT, TILES> At;
    Chunks<LAYOUT, At::COUNT, TILES> first = {};
    TileCursor<TILES> slots = {};
    bool is_unpacked = false;
    bool has_experts = EXPERTS && p.experts_used, has_tile = share.tile < share.tiles;
    if (!has_experts && has_tile) {
        epilogue.begin(p, IS_GATED, share.tile, t & (32 * share.warps - 1));
        is_unpacked = share.first + At::COUNT <= share.end && ring.has_next(shared);
        if (is_unpacked) {
            slots.take(shared, ring, min(At::IN_SLOT, share.end - share.first));
            first.load(slots.at, lane);
            first.unpack();
            slots.skip(At::COUNT, Packed<LAYOUT>::BYTES);
        }
    }
    load_input_shared(p, IS_GATED, t, last);
    if (has_experts && has_tile) epilogue.begin(p, IS_GATED, share.tile, t & (32 * share.warps - 1));
    float sums[TILES][4] = {};
    u32 chunk = share.first;
    if (is_unpacked) {
        uint4 b[At::COUNT][2];
        load_input<LAYOUT, At::COUNT>(input + chunk * CHUNK_COLS + Packed<LAYOUT>::first_column(lane % 4), lane, b);
        first.multiply(b, sums);
        chunk += At::COUNT;
        if (slots.left == 0) ring.release(shared, TILES);
    }
#pragma unroll 1
    for (u32 tile = share.tile, buffer = 0; tile < share.tiles; tile += share.step, buffer++) {
        Epilogue current = epilogue;
        if (tile + share.step < share.tiles) {
            epilogue.begin(p, IS_GATED, tile + share.step, epilogue_row(t, share, buffer + 1));
        }
        multiply_slice<LAYOUT, TILES>(shared, ring, chunk, share.end, slots, input, sums);
        float (*partial)[2][TILE_ROWS] = shared.partials[buffer % 2] + share.team * share.warps;
        if (lane % 4 == 0) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                partial[share.member][i][lane / 4] = sums[i][0];
                partial[share.member][i][lane / 4 + 8] = sums[i][2];
            }
        }
        chunk = share.first;
        slots.left = 0;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
        }
        team_sync(TEAM_BARRIER + share.team, share.warps);
        u32 row = epilogue_row(t, share, buffer);
        if (row < TILE_ROWS) {
            float total = 0.0f, other = 0.0f;
            // All slices at once, as far as the team has warps: warps without a slice have written
            // zeros.
            float x[WARPS], y[WARPS];
#pragma unroll
            for (u32 slice = 0; slice < WARPS; slice++) {
                u32 least = slice < 2 ? slice + 1 : slice < 4 ? 4 : slice < 8 ? 8 : 16;
                bool has_slice = share.warps >= least;
                x[slice] = has_slice ? partial[slice][0][row] : 0.0f;
                if (IS_GATED) y[slice] = has_slice ? partial[slice][1][row] : 0.0f;
            }
#pragma unroll
            for (u32 slice = 0; slice < WARPS; slice++) {
                total += x[slice];
                if (IS_GATED) other += y[slice];
            }
            if (IS_GATED) {
                TileExpert member(p, opaque(tile));
                epilogue_gated(p, member.expert, current.row, member.place, total, other, current.exponent,
                    current.other_exponent);
            } else {
                while (current.residual == SENTINEL) current.residual = load_relaxed(p.residual + current.row);
                // The same arithmetic as `epilogue` in matmul.cuh.
                float y = total * power_of_two(current.exponent) + current.bias;
                if (EXPERTS && p.has_act_epilogue) {
                    const Matrix &m = p.matrices[0];
                    if (current.row < m.rows) store_activated(p, m, current.row, 0, activate(p.act, y));
                } else if (current.out) {
                    store_result(p, current.out, __uint_as_float(current.residual) + y * p.factor);
                }
            }
        }
    }
    return ring.taken;
}

// An ungated matmul of experts, or of the parts of an input with a matrix each. It stores the results of parts
// and up projections. Those of down projections it sums as `expert_sum` does. Results
// stay in shared memory until all of a tile's are done. Where blocks share a tile, the one with its first expert
// sums; the others compute their part of it first, and publish it.
template <int LAYOUT> DEVICE u32 matmul_ungated_experts(u32 stage, u32 taken) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = shared.stages[opaque(stage % 2)].matmul;
    const Matrix &m = p.matrices[0];
    ChosenExperts &chosen = chosen_experts(p, false);
    u32 t = opaque(threadIdx.x), lane = t % 32;
    ConsumerRing ring = {t / 32, lane, taken};
    Partition share(p, false, t / 32);
    // An input that all experts share exists before they are chosen; other inputs come after that. A loop, as the
    // code for inputs is long.
    bool is_input = p.shares_input;
#pragma unroll 1
    for (u32 part = 0; part < 2; part++, is_input = !is_input) {
        if (is_input) {
            load_input_rows(p, false, t);
        } else {
            load_chosen(p, false, t);
            load_exponents(p, first_tile_of_block(p, blockIdx.x), share.tiles, t);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
    u32 first = first_tile_of_block(p, blockIdx.x), end = share.tiles;
#pragma unroll 1
    for (u32 unit = share.tile, buffer = 0; unit < end; unit += share.step, buffer++) {
        u32 i = unit % p.experts_used;
        float sums[1][4] = {};
        const u16 *input = (const u16 *)shared.workspace + (p.shares_input ? 0 : i * p.input_stride);
        multiply_slice<LAYOUT, 1>(shared, ring, share.first, share.end, {}, input, sums);
        float (*partial)[2][TILE_ROWS] = shared.partials[buffer % 2] + share.team * share.warps;
        if (lane % 4 == 0) {
            partial[share.member][0][lane / 4] = sums[0][0];
            partial[share.member][0][lane / 4 + 8] = sums[0][2];
        }
        team_sync(TEAM_BARRIER + share.team, share.warps);
        u32 row = epilogue_row(t, share, buffer);
        if (row >= TILE_ROWS) continue;
        float total = 0.0f;
#pragma unroll 8
        for (u32 slice = 0; slice < share.slices; slice++) total += partial[slice][0][row];
        float &result = chosen.results[unit - first][row];
        row += (unit - i) / p.experts_used * TILE_ROWS;
        bool has_bias = m.bias && row < m.rows;
        float bias = has_bias ? m.bias[chosen.experts[i] * m.rows + row] : __uint_as_float(MINUS_ZERO);
        result = total = total * power_of_two(chosen.exponents[unit - first][row % TILE_ROWS]) + bias;
        if (row >= m.rows) continue;
        if (!is_summed(p)) store_activated(p, m, row, i, activate(p.act, total));
        else if (unit - i < first) store_relaxed(p.matrices[1].out + i * m.rows + row, total);
    }
    if (!is_summed(p)) return ring.taken;
    // The tiles that begin in this block. Other blocks may have computed experts of the last one:
    // those results come behind this block's own. A block without tiles to sum does not wait.
    u32 from = (first + p.experts_used - 1) / p.experts_used, to = (end + p.experts_used - 1) / p.experts_used;
    for (u32 at = max(end, from * p.experts_used) * TILE_ROWS + t; at < to * p.experts_used * TILE_ROWS;
         at += THREADS) {
        u32 unit = at / TILE_ROWS, tile = unit / p.experts_used, row = tile * TILE_ROWS + at % TILE_ROWS;
        const float *other = p.matrices[1].out + (unit - tile * p.experts_used) * m.rows + row;
        chosen.results[unit - first][at % TILE_ROWS] = row < m.rows ? poll(other) : 0.0f;
    }
    sync<THREADS>();
    for (u32 row = from * TILE_ROWS + t; row < min(to * TILE_ROWS, m.rows); row += THREADS) {
        u32 residual = p.residual ? load_relaxed(p.residual + row) : MINUS_ZERO;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 k = 0, place = row / TILE_ROWS * p.experts_used - first; k < p.experts_used; k++, place++) {
            sum = fmaf(chosen.results[place][row % TILE_ROWS], chosen.weights[k], sum);
        }
        while (residual == SENTINEL) residual = load_relaxed(p.residual + row);
        store_result(p, m.out + row, __uint_as_float(residual) + sum);
    }
    return ring.taken;
}

DEVICE u32 run_matmul(u32 work, u32 stage, u32 taken, const PersistentStep *last) {
    SharedMemory &shared = shared_memory();
    const Matmul &p = shared.stages[opaque(stage % 2)].matmul;
    // A block without tiles must not read the input: nothing waits for its reads before the
    // sentinels are reset.
    bool is_gated = work >= OP_GATED;
    if (!has_tiles(p, is_gated)) return taken;
    switch (work) {
#define MATMUL(LAYOUT)                                                                              \
    case LAYOUT:                                                                                     \
        if (EXPERTS && p.experts_used) return matmul_ungated_experts<LAYOUT>(stage, taken);         \
        return matmul<LAYOUT, 1>(stage, taken, last);                                               \
    case LAYOUT + OP_GATED: return matmul<LAYOUT, 2>(stage, taken, last);
    LAYOUTS(MATMUL)
    }
    return taken;
}

// Copies the metadata that attention needs to shared memory.
DEVICE void load_metadata(const u32 *numbers) {
    SharedMemory &shared = shared_memory();
    StepMetadata metadata = {numbers};
    if (threadIdx.x < MAX_TABLES) shared.pages[threadIdx.x] = metadata.pages(threadIdx.x, 0);
    if (threadIdx.x == 0) shared.position = metadata.position(0);
    if (EXPERTS && threadIdx.x == 32) {
        shared.state_slot = metadata.state_slot(0);
        shared.is_new = metadata.start(0) == 0;
    }
}

DEVICE void consume_all(const PersistentStep &step) {
    SharedMemory &shared = shared_memory();
    u32 taken = 0;
    prefetch_stage(step.stages, shared.stages[0], threadIdx.x);
    launch_dependents();
    grid_dependency_wait();
    load_metadata(step.metadata);
    arrive_metadata();
    reset_sentinels(step.last_input, step.last_input_len);
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
#pragma unroll 1
    for (u32 i = 0; i < step.stage_count; i++) {
        if (i + 1 < step.stage_count) {
            prefetch_stage(step.stages + i + 1, shared.stages[(i + 1) % 2], opaque(threadIdx.x));
        }
        shared.stage = i; // by all threads, as a branch would cost more
        u32 work = shared.stages[i % 2].op;
        if (work == OP_ATTENTION) {
            taken = attention(i, taken, step.workspace_bytes);
        } else if (EXPERTS && work > OP_ATTENTION) {
            other(work, i);
        } else {
            taken = run_matmul(work, i, taken, i + 1 == step.stage_count ? &step : 0);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync<THREADS>();
    }
}

#endif

KERNEL __launch_bounds__(THREADS + 128, 1) NAME(const __grid_constant__ PersistentStep step) {
#if __CUDA_ARCH__ >= 900
    SharedMemory &shared = shared_memory();
    if (threadIdx.x == 0) {
        shared.stage = NOT_STARTED;
        mbarrier_init(shared_address(&shared.finished), 1);
    }
    if (threadIdx.x < WARPS * SLOT_DEPTH) {
        u64 *barriers = &shared.full[0][0] + threadIdx.x, *others = &shared.empty[0][0] + threadIdx.x;
        mbarrier_init(shared_address(barriers), 1);
        mbarrier_init(shared_address(others), 1);
        fence_proxy_async();
    }
    __syncthreads();
    // Registers move from the producer warp group to the consumers.
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x < THREADS + 32) {
            produce_all(step.stages, step.stage_count);
        } else if (threadIdx.x == THREADS + 32) {
            watch(step.stalled);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        consume_all(step);
        if (opaque(threadIdx.x) == 0) mbarrier_arrive(shared_address(&shared.finished));
    }
#endif
}
