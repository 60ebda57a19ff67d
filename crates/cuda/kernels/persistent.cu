// A step of one row as one kernel: a block on every multiprocessor goes through the list of stages.
// No barrier divides them. Every value has memory of its own. What a step makes is all ones before,
// and whoever needs a number looks at it until it is there (`wait_for_all`). So stages overlap, and one warp
// of a block fetches weights, keys and values, stages ahead, as far as shared memory reaches.
//
// The arithmetic is that of the single kernels, of `dot` and `attend_meet` above all: a row has the same bits
// either way.
#include "persistent_attend.cuh"
#include "persistent_experts.cuh"

// Each kind costs code, which has to be fetched, and registers, as do experts: so there are several
// kernels.
#ifndef KINDS
#define NAME persistent
#define KINDS(DO) DO(F16) DO(S8) DO(S8X16) DO(U8) DO(U4)
#endif

#if __CUDA_ARCH__ >= 900

// The input of a product that is kept as such; where experts' results are summed, that of each.
DEVICE void share_halves(const Matmul &p, bool is_gated, u32 t, u16 *out) {
    const uint4 *from = (const uint4 *)p.input;
    u32 len = p.input_stride / 8;
    if (EXPERTS && p.experts_used && !is_gated) len *= p.experts_used;
#pragma unroll 1
    for (u32 first = t; first < len; first += 4 * THREADS) {
        uint4 x[4];
        wait_for_all<true>(from + first, THREADS, len - first, x);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 i = first + j * THREADS;
            if (i < len) ((uint4 *)out)[i] = x[j];
        }
    }
}

// A thread's weights of a norm, from its first four on.
DEVICE void own_quads(const float4 *weights, u32 first, u32 quads, float4 (&w)[NORM_QUADS]) {
#pragma unroll
    for (u32 j = 0; j < NORM_QUADS; j++) {
        u32 i = first + j * THREADS;
        w[j] = i < quads ? weights[i] : make_float4(0, 0, 0, 0);
    }
}

// The input of a product, normalised as `normalize` does it. The norm's weights come to shared memory,
// to `weights`, while the row is not there yet.
DEVICE void share_normed(const Matmul &p, u32 t, u16 *out, float *weights) {
    float(&room)[WARPS] = shared_memory().sums;
    u32 quads = p.cols / 4, all = p.input_stride / 4;
    for (u32 i = t; i < quads; i += THREADS) copy_async(shared_address(weights + 4 * i), p.norm_weight + 4 * i);
    const uint4 *from = (const uint4 *)p.norm_input;
    uint4 x[NORM_QUADS];
    float square = 0.0f;
#pragma unroll 1
    for (u32 first = t; first < quads; first += NORM_QUADS * THREADS) {
        wait_for_all<false>(from + first, THREADS, quads - first, x);
#pragma unroll
        for (int j = 0; j < NORM_QUADS; j++) square = add_squares(as_floats(x[j]), square);
    }
    square = warp_sum(square);
    if (t % 32 == 0) room[t / 32] = square;
    asm volatile("cp.async.wait_all;" ::: "memory");
    // What comes behind the sum is read before it. Weights are each thread's own.
    float one_of = 1.0f / (float)p.cols, eps = p.norm_eps;
    float4 w[NORM_QUADS];
    own_quads((const float4 *)weights, t, quads, w);
    sync<THREADS>();
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += room[i];
    float scale = rms_of(sum, one_of, eps);
#pragma unroll 1
    for (u32 first = t; first < all; first += NORM_QUADS * THREADS) {
        if (quads > NORM_QUADS * THREADS) {
            if (first < quads) wait_for_all<false>(from + first, THREADS, quads - first, x);
            own_quads((const float4 *)weights, first, quads, w);
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

// Some chunks of a tile, or of two, as `mma` takes them.
template <int KIND, int COUNT, int TILES> struct Chunks {
    static const int STEPS = Planes<KIND>::STEPS;
    Planes<KIND> w[COUNT][TILES];
    Fragment f[COUNT][TILES][STEPS];

    __device__ __forceinline__ void load(const u8 *const (&slots)[TILES], u32 lane) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) w[k][i].load(slots[i] + k * Planes<KIND>::BYTES, lane);
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
        // Where unpacking takes longest, it is faster to have all of it before the first `mma`.
        if (KIND == U4) __syncwarp();
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

// A lane's part of the columns of some chunks.
template <int KIND, int CHUNKS> DEVICE void load_input(const u16 *x, u32 lane, uint4 (&b)[CHUNKS][2]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        // The only row of input is the first of eight columns. What others have is nobody's.
        b[k][0] = b[k][1] = anything();
        if (lane < 4) Planes<KIND>::load_input(x + k * CHUNK_COLS, b[k]);
    }
}

// Multiplies some chunks of a tile, or of two.
template <int KIND, int CHUNKS, int TILES>
DEVICE void multiply(const u8 *const (&slots)[TILES], u32 lane, const u16 *x, float (&sums)[TILES][4]) {
    Chunks<KIND, CHUNKS, TILES> weights;
    uint4 b[CHUNKS][2];
    weights.load(slots, lane);
    load_input<KIND, CHUNKS>(x, lane, b);
    weights.unpack();
    weights.multiply(b, sums);
}

// Slots of a warp with what is next of a tile, or of two.
template <int TILES> struct Slots {
    const u8 *at[TILES];
    u32 left; // chunks

    __device__ __forceinline__ void take(Shared &shared, Ring &ring, u32 chunks) {
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

// What the end of a tile needs beside its sums: where a row goes, its scales, and what is added to it.
// All is asked for before the tile is begun. Where nothing is added, that is minus zero, which changes
// no number.
struct Ending {
    u32 row;
    float *out; // or none: of gated rows, or of those beyond the last one
    float scale, other_scale, bias;
    u32 residual;

    __device__ __forceinline__ void begin(const Matmul &p, bool is_gated, u32 tile, u32 thread) {
        if (thread >= TILE_ROWS) return;
        Member member(p, tile);
        tile -= member.place * p.tiles;
        u32 matrix = is_gated ? 0 : matrix_of(p, tile);
        const Matrix &m = p.matrices[matrix];
        row = (tile - m.first_tile) * TILE_ROWS + thread;
        scale = row_scale(m, member.expert, row);
        bool is_row = row < m.rows;
        out = is_row ? m.out + row : 0;
        residual = p.residual && matrix == 0 && is_row ? look(p.residual + row) : MINUS_ZERO;
        bias = m.bias && is_row ? m.bias[row] : __uint_as_float(MINUS_ZERO);
        if (is_gated) other_scale = row_scale(p.matrices[1], member.expert, row);
    }
};

// As many chunks as registers allow at a time.
template <int KIND, int TILES> struct AtOnce {
    static const u32 IN_SLOT = Slot<KIND>::CHUNKS, COUNT = IN_SLOT > 1 && TILES == 1 ? 2 : 1;
};

// Multiplies the input with a warp's part of a tile, or of two, from a chunk on.
template <int KIND, int TILES>
DEVICE void multiply_part(Shared &shared, Ring &ring, u32 chunk, u32 end, Slots<TILES> slots, const u16 *input,
                          float (&sums)[TILES][4]) {
    typedef AtOnce<KIND, TILES> At;
    u32 lane = ring.lane;
    const u16 *x = input + chunk * CHUNK_COLS + Planes<KIND>::first_column(lane % 4);
#pragma unroll 1
    while (chunk < end) {
        if (slots.left == 0) slots.take(shared, ring, min(At::IN_SLOT, end - chunk));
        chunk += slots.left;
#pragma unroll 1
        while (slots.left >= At::COUNT) {
            multiply<KIND, At::COUNT>(slots.at, lane, x, sums);
            x += At::COUNT * CHUNK_COLS;
            slots.skip(At::COUNT, Planes<KIND>::BYTES);
        }
        if (slots.left > 0) multiply<KIND, 1>(slots.at, lane, x, sums);
        x += slots.left * CHUNK_COLS;
        slots.left = 0;
        ring.release(shared, TILES);
    }
}

// The row of its team's tile of this number that a thread ends, if that is one. The team's warps do it by turns,
// so that nobody waits for the one that does.
DEVICE u32 row_to_end(u32 t, const Share &share, u32 turn) { return (t - 32 * turn) & (32 * share.warps - 1); }

// Makes numbers unwritten, each block some.
DEVICE void unwrite(uint4 *values, u32 len) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < len; i += gridDim.x * THREADS) {
        values[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
    }
}

// Takes a product's input to shared memory once it is there.
DEVICE void share_input(const Matmul &p, bool is_gated, u32 t, const PersistentStep *last) {
    Shared &shared = shared_memory();
    u16 *input = (u16 *)shared.area;
    if (p.norm_input) {
        // Chosen experts lie behind the input.
        float *weights = (float *)(input + p.input_stride + (EXPERTS ? sizeof(Chosen) / 2 : 0));
        share_normed(p, t, input, weights);
    } else {
        share_halves(p, is_gated, t, input);
    }
    if (EXPERTS && p.experts_used && is_gated) share_chosen(p, true, t);
    if (EXPERTS) asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
    // Where the last stage's input is all there, every block has read what it had to.
    if (last) unwrite(last->values, last->values_len);
}

// Multiplies the input with a warp's parts of its tiles, and gives the slots that it has then taken.
template <int KIND, int TILES> DEVICE u32 product(u32 stage, u32 taken, const PersistentStep *last) {
    Shared &shared = shared_memory();
    const Matmul &p = shared.stages[own(stage % 2)].matmul;
    u32 t = own(threadIdx.x), lane = t % 32, warp = t / 32;
    Ring ring = {warp, lane, taken};
    const u16 *input = (const u16 *)shared.area;
    const bool IS_GATED = TILES == 2;
    Share share(p, IS_GATED, warp);
    Ending ending = {};
    // What is multiplied first comes out of its slots before the input is there.
    typedef AtOnce<KIND, TILES> At;
    Chunks<KIND, At::COUNT, TILES> first = {};
    Slots<TILES> slots = {};
    bool is_ready = false;
    bool has_experts = EXPERTS && p.experts_used, has_tile = share.tile < share.tiles;
    if (!has_experts && has_tile) {
        ending.begin(p, IS_GATED, share.tile, t & (32 * share.warps - 1));
        is_ready = share.first + At::COUNT <= share.end && ring.has_next(shared);
        if (is_ready) {
            slots.take(shared, ring, min(At::IN_SLOT, share.end - share.first));
            first.load(slots.at, lane);
            first.unpack();
            slots.skip(At::COUNT, Planes<KIND>::BYTES);
        }
    }
    share_input(p, IS_GATED, t, last);
    if (has_experts && has_tile) ending.begin(p, IS_GATED, share.tile, t & (32 * share.warps - 1));
    float sums[TILES][4] = {};
    u32 chunk = share.first;
    if (is_ready) {
        uint4 b[At::COUNT][2];
        load_input<KIND, At::COUNT>(input + chunk * CHUNK_COLS + Planes<KIND>::first_column(lane % 4), lane, b);
        first.multiply(b, sums);
        chunk += At::COUNT;
        if (slots.left == 0) ring.release(shared, TILES);
    }
#pragma unroll 1
    for (u32 tile = share.tile, turn = 0; tile < share.tiles; tile += share.step, turn++) {
        Ending now = ending;
        if (tile + share.step < share.tiles) {
            ending.begin(p, IS_GATED, tile + share.step, row_to_end(t, share, turn + 1));
        }
        multiply_part<KIND, TILES>(shared, ring, chunk, share.end, slots, input, sums);
        float (*partial)[2][TILE_ROWS] = shared.partials[turn % 2] + share.team * share.warps;
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
        team_sync(share.team, share.warps);
        u32 row = row_to_end(t, share, turn);
        if (row < TILE_ROWS) {
            float total = 0.0f, other = 0.0f;
            // All at once, as far as the team has warps: those without a part have made zeros.
            float x[WARPS], y[WARPS];
#pragma unroll
            for (u32 part = 0; part < WARPS; part++) {
                u32 least = part < 2 ? part + 1 : part < 4 ? 4 : part < 8 ? 8 : 16;
                bool is_there = share.warps >= least;
                x[part] = is_there ? partial[part][0][row] : 0.0f;
                if (IS_GATED) y[part] = is_there ? partial[part][1][row] : 0.0f;
            }
#pragma unroll
            for (u32 part = 0; part < WARPS; part++) {
                total += x[part];
                if (IS_GATED) other += y[part];
            }
            if (IS_GATED) {
                Member member(p, own(tile));
                emit_gated(p, member.expert, now.row, member.place, total, other, now.scale, now.other_scale);
            } else {
                while (now.residual == UNWRITTEN) now.residual = look(p.residual + now.row);
                // As `emit` does it.
                if (now.out) publish(now.out, __uint_as_float(now.residual) + (total * now.scale + now.bias));
            }
        }
    }
    return ring.taken;
}

// Multiplies the inputs of the chosen experts with a warp's parts of the block's tiles, and adds up their
// results as `expert_sum` does. Results stay in shared memory until all of a tile's are done. Where blocks share
// a tile, the one that has its first expert adds up; the others do their part of it first, and publish it.
template <int KIND> DEVICE u32 summed(u32 stage, u32 taken) {
    Shared &shared = shared_memory();
    const Matmul &p = shared.stages[own(stage % 2)].matmul;
    const Matrix &m = p.matrices[0];
    Chosen &chosen = chosen_of(p, false);
    u32 t = own(threadIdx.x), lane = t % 32;
    Ring ring = {t / 32, lane, taken};
    Share share(p, false, t / 32);
    // Of the two it waits for that comes last.
    share_chosen(p, false, t);
    share_scales(p, first_summed(p, blockIdx.x), share.tiles, t);
    share_input(p, false, t, 0);
    u32 first = first_summed(p, blockIdx.x), end = share.tiles;
#pragma unroll 1
    for (u32 unit = share.tile, turn = 0; unit < end; unit += share.step, turn++) {
        u32 i = unit % p.experts_used;
        float sums[1][4] = {};
        const u16 *input = (const u16 *)shared.area + i * p.input_stride;
        multiply_part<KIND, 1>(shared, ring, share.first, share.end, {}, input, sums);
        float (*partial)[2][TILE_ROWS] = shared.partials[turn % 2] + share.team * share.warps;
        if (lane % 4 == 0) {
            partial[share.member][0][lane / 4] = sums[0][0];
            partial[share.member][0][lane / 4 + 8] = sums[0][2];
        }
        team_sync(share.team, share.warps);
        u32 row = row_to_end(t, share, turn);
        if (row >= TILE_ROWS) continue;
        float total = 0.0f;
#pragma unroll 8
        for (u32 part = 0; part < share.parts; part++) total += partial[part][0][row];
        float &result = chosen.results[unit - first][row];
        row += (unit - i) / p.experts_used * TILE_ROWS;
        bool has_bias = m.bias && row < m.rows;
        float bias = has_bias ? m.bias[chosen.experts[i] * m.rows + row] : __uint_as_float(MINUS_ZERO);
        result = total = total * result + bias;
        if (unit - i < first && row < m.rows) publish(p.matrices[1].out + i * m.rows + row, total);
    }
    // The tiles that begin here. Of the last one others may have had some experts to do first: their results take
    // places behind the own. Who has nothing to add up waits for nobody, as nobody waits for it then.
    u32 from = (first + p.experts_used - 1) / p.experts_used, to = (end + p.experts_used - 1) / p.experts_used;
    for (u32 at = max(end, from * p.experts_used) * TILE_ROWS + t; at < to * p.experts_used * TILE_ROWS; at += THREADS) {
        u32 unit = at / TILE_ROWS, tile = unit / p.experts_used, row = tile * TILE_ROWS + at % TILE_ROWS;
        const float *other = p.matrices[1].out + (unit - tile * p.experts_used) * m.rows + row;
        chosen.results[unit - first][at % TILE_ROWS] = row < m.rows ? wait_for(other) : 0.0f;
    }
    sync<THREADS>();
    for (u32 row = from * TILE_ROWS + t; row < min(to * TILE_ROWS, m.rows); row += THREADS) {
        u32 residual = look(p.residual + row);
        float sum = 0.0f;
#pragma unroll 1
        for (u32 k = 0, place = row / TILE_ROWS * p.experts_used - first; k < p.experts_used; k++, place++) {
            sum = fmaf(chosen.results[place][row % TILE_ROWS], chosen.weights[k], sum);
        }
        while (residual == UNWRITTEN) residual = look(p.residual + row);
        publish(m.out + row, __uint_as_float(residual) + sum);
    }
    return ring.taken;
}

// Runs a product of any kind.
DEVICE u32 product_of(u32 work, u32 stage, u32 taken, const PersistentStep *last) {
    Shared &shared = shared_memory();
    const Matmul &p = shared.stages[own(stage % 2)].matmul;
    // Who makes nothing must not read either: nobody would wait for it.
    bool is_gated = work >= GATED;
    if (!has_tiles(p, is_gated)) return taken;
    switch (work) {
#define PRODUCT(KIND)                                                                              \
    case KIND:                                                                                     \
        if (EXPERTS && p.experts_used) return summed<KIND>(stage, taken);                                  \
        return product<KIND, 1>(stage, taken, last);                                               \
    case KIND + GATED: return product<KIND, 2>(stage, taken, last);
    KINDS(PRODUCT)
    }
    return taken;
}

// Writes down what attention needs of the feed.
DEVICE void read_feed(const u32 *numbers) {
    Shared &shared = shared_memory();
    Feed feed = {numbers};
    if (threadIdx.x < TABLES) shared.pages[threadIdx.x] = feed.pages(threadIdx.x, 0);
    if (threadIdx.x == 0) shared.position = feed.position(0);
}

DEVICE void compute_all(const PersistentStep &list) {
    Shared &shared = shared_memory();
    u32 taken = 0;
    describe(list.stages, shared.stages[0], threadIdx.x);
    let_next_start();
    wait_for_inputs();
    read_feed(list.metadata);
    tell_fed();
    unwrite(list.last_input, list.last_input_len);
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
#pragma unroll 1
    for (u32 i = 0; i < list.stage_count; i++) {
        if (i + 1 < list.stage_count) {
            describe(list.stages + i + 1, shared.stages[(i + 1) % 2], own(threadIdx.x));
        }
        u32 work = shared.stages[i % 2].op;
        if (work == ATTENTION) {
            taken = attend(i, taken, list.workspace_bytes);
        } else if (EXPERTS && work > ATTENTION) {
            other(work, i);
        } else {
            taken = product_of(work, i, taken, i + 1 == list.stage_count ? &list : 0);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync<THREADS>();
    }
}

#endif

KERNEL __launch_bounds__(THREADS + 128, 1) NAME(const __grid_constant__ PersistentStep list) {
#if __CUDA_ARCH__ >= 900
    Shared &shared = shared_memory();
    if (threadIdx.x < WARPS * DEPTH) {
        u64 *barriers = &shared.filled[0][0] + threadIdx.x, *others = &shared.emptied[0][0] + threadIdx.x;
        make_barrier(shared_address(barriers), 1);
        make_barrier(shared_address(others), 1);
        show_barriers();
    }
    __syncthreads();
    // Registers go from the warps that fetch, of which one does, to those that compute.
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x < THREADS + 32) fetch_all(list.stages, list.stage_count);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        compute_all(list);
    }
#endif
}
