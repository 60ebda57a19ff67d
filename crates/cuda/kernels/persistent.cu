// A step of one row as one kernel: a block on every multiprocessor goes through the list of stages.
// No barrier divides them. Every value has memory of its own. What a step makes is all ones before,
// and whoever needs a number looks at it until it is there (`wait_for`). So stages overlap, and one warp
// of a block fetches weights, stages ahead, as far as shared memory reaches.
//
// The arithmetic is that of `dot` and `attend`: a row has the same bits either way.
#include "persistent.cuh"

// Each kind costs code, which has to be fetched, and registers: so there are several kernels.
#ifndef KINDS
#define NAME persistent
#define KINDS(DO) DO(F16) DO(S8) DO(S8X16) DO(U8) DO(U4)
#endif

#if __CUDA_ARCH__ >= 900

// The input of a product that is kept as such.
DEVICE void share_halves(const Product &p, u32 t, u16 *out) {
    const uint4 *from = (const uint4 *)p.input;
    u32 len = p.input_stride / 8;
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

// The input of a product, normalised as `normalize` does it. The norm's weights come to shared memory,
// to `weights`, while the row is not there yet.
DEVICE void share_normed(const Product &p, u32 t, u16 *out, float *weights, float *room) {
    u32 quads = p.cols / 4, all = p.input_stride / 4;
    for (u32 i = t; i < quads; i += THREADS) copy_async(shared_address(weights + 4 * i), p.norm_weight + 4 * i);
    const uint4 *from = (const uint4 *)p.norm_x;
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
    sync<THREADS>();
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) sum += room[i];
    float scale = rsqrtf(sum / (float)p.cols + p.norm_eps);
#pragma unroll 1
    for (u32 first = t; first < all; first += NORM_QUADS * THREADS) {
        bool is_kept = quads <= NORM_QUADS * THREADS;
        if (!is_kept && first < quads) wait_for_all<false>(from + first, THREADS, quads - first, x);
#pragma unroll
        for (int j = 0; j < NORM_QUADS; j++) {
            u32 i = first + j * THREADS;
            if (i >= all) continue;
            float4 y = as_floats(x[j]), w = i < quads ? ((const float4 *)weights)[i] : make_float4(0, 0, 0, 0);
            u32 low = half_pair(as_input(y.x * scale * w.x), as_input(y.y * scale * w.y));
            u32 high = half_pair(as_input(y.z * scale * w.z), as_input(y.w * scale * w.w));
            ((uint2 *)out)[i] = i < quads ? make_uint2(low, high) : make_uint2(0, 0);
        }
    }
}

// Multiplies some chunks of a tile, or of two.
template <int KIND, int CHUNKS, int TILES>
DEVICE void multiply(const u8 *const (&slots)[TILES], u32 lane, const u16 *x, float (&sums)[TILES][4]) {
    Planes<KIND> w[CHUNKS][TILES];
    uint4 b[CHUNKS][2];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) w[k][i].load(slots[i] + k * Planes<KIND>::BYTES, lane);
        b[k][0] = b[k][1] = make_uint4(0, 0, 0, 0);
        // The only row of input is the first of eight columns.
        if (lane < 4) Planes<KIND>::load_input(x + k * CHUNK_COLS, b[k]);
    }
    // All fragments before the first `mma`: or else each would wait for the registers of the one
    // before.
    Fragment f[CHUNKS][TILES][Planes<KIND>::STEPS];
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int step = 0; step < Planes<KIND>::STEPS; step++) {
                f[k][i][step] = w[k][i].fragment(step);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
#pragma unroll
        for (int step = 0; step < Planes<KIND>::STEPS; step++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) w[k][i].multiply(sums[i], f[k][i][step], b[k], step);
        }
    }
}

DEVICE void team_sync(u32 team, u32 warps) {
    if (warps == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 2), "r"(32 * warps) : "memory");
    }
}

// The same number, which the compiler takes for another: what is read by it stays where it is read.
DEVICE u32 own(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

#define MINUS_ZERO 0x80000000u

// What the end of a tile needs beside its sums: where a row goes, its scales, and what is added to it.
// All is asked for before the tile is begun. Where nothing is added, that is minus zero, which changes
// no number.
struct Ending {
    u32 row;
    float *out; // or none: of gated rows, or of those beyond the last one
    float scale, other_scale, bias;
    u32 residual;

    __device__ __forceinline__ void begin(const Product &p, bool is_gated, u32 tile, u32 thread) {
        if (thread >= TILE_ROWS) return;
        u32 matrix = is_gated ? 0 : matrix_of(p, tile);
        const Matrix &m = p.matrices[matrix];
        row = (tile - m.first_tile) * TILE_ROWS + thread;
        scale = row_scale(m, 0, row);
        bool is_row = row < m.rows;
        out = is_row ? m.out + row : 0;
        residual = p.residual && matrix == 0 && is_row ? look(p.residual + row) : MINUS_ZERO;
        bias = m.bias && is_row ? m.bias[row] : __uint_as_float(MINUS_ZERO);
        if (is_gated) other_scale = row_scale(p.matrices[1], 0, row);
    }
};

// Multiplies the input with a warp's parts of its tiles, and gives the slots that it has then taken.
template <int KIND, int TILES> DEVICE u32 product(u32 stage, u32 taken, const Share &share, Ending ending) {
    Shared &shared = shared_memory();
    const Product &p = shared.stages[own(stage % 2)].product;
    const u32 CHUNKS = Slot<KIND>::CHUNKS;
    u32 t = own(threadIdx.x), lane = t % 32, warp = t / 32;
    Ring ring = {warp, lane, taken};
    u32 thread = t & (32 * share.warps - 1);
    const u16 *input = (const u16 *)shared.area;
#pragma unroll 1
    for (u32 tile = share.tile, turn = 0; tile < share.tiles; tile += share.step, turn ^= 1) {
        Ending now = ending;
        if (tile + share.step < share.tiles) ending.begin(p, TILES == 2, tile + share.step, thread);
        float sums[TILES][4] = {};
#pragma unroll 1
        for (u32 chunk = share.first; chunk < share.end; chunk += CHUNKS) {
            const u8 *slots[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++) slots[i] = ring.take(shared);
            const u16 *x = input + chunk * CHUNK_COLS + Planes<KIND>::first_column(lane % 4);
            // Two chunks at a time, as registers allow, or the last one.
            const u32 AT_ONCE = CHUNKS > 1 && TILES == 1 ? 2 : 1;
            u32 left = min(CHUNKS, share.end - chunk);
#pragma unroll 1
            for (; left >= AT_ONCE; left -= AT_ONCE) {
                multiply<KIND, AT_ONCE>(slots, lane, x, sums);
                x += AT_ONCE * CHUNK_COLS;
#pragma unroll
                for (int i = 0; i < TILES; i++) slots[i] += AT_ONCE * Planes<KIND>::BYTES;
            }
            if (left > 0) multiply<KIND, 1>(slots, lane, x, sums);
            ring.release<TILES>(shared);
        }
        float (*partial)[2][TILE_ROWS] = shared.partials[turn] + share.team * share.warps;
        if (lane % 4 == 0) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                partial[share.member][i][lane / 4] = sums[i][0];
                partial[share.member][i][lane / 4 + 8] = sums[i][2];
            }
        }
        team_sync(share.team, share.warps);
        if (thread < TILE_ROWS) {
            float total = 0.0f, other = 0.0f;
#pragma unroll 8
            for (u32 part = 0; part < share.parts; part++) {
                total += partial[part][0][thread];
                if (TILES == 2) other += partial[part][1][thread];
            }
            if (TILES == 2) {
                emit_gated(p, 0, now.row, 0, total, other, now.scale, now.other_scale);
            } else {
                while (now.residual == UNWRITTEN) now.residual = look(p.residual + now.row);
                // As `emit` does it.
                if (now.out) publish(now.out, __uint_as_float(now.residual) + (total * now.scale + now.bias));
            }
        }
    }
    return ring.taken;
}

// Makes numbers unwritten, each block some.
DEVICE void unwrite(uint4 *values, u32 len) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < len; i += gridDim.x * THREADS) {
        values[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
    }
}

// Runs a product of any kind.
DEVICE u32 product_of(u32 work, u32 stage, u32 taken, const Persistent *last) {
    Shared &shared = shared_memory();
    const Product &p = shared.stages[own(stage % 2)].product;
    // Who makes nothing must not read either: nobody would wait for it.
    if (blockIdx.x >= p.tiles) return taken;
    u32 t = own(threadIdx.x);
    u16 *input = (u16 *)shared.area;
    Share share(p, t / 32);
    Ending ending = {};
    if (share.tile < share.tiles) ending.begin(p, work >= GATED, share.tile, t & (32 * share.warps - 1));
    if (p.norm_x) {
        share_normed(p, t, input, (float *)(input + p.input_stride), shared.room);
    } else {
        share_halves(p, t, input);
    }
    sync<THREADS>();
    // Where the last stage's input is all there, every block has read what it had to.
    if (last) unwrite(last->values, last->values_len);
    switch (work) {
#define PRODUCT(KIND)                                                                              \
    case KIND: return product<KIND, 1>(stage, taken, share, ending);                               \
    case KIND + GATED: return product<KIND, 2>(stage, taken, share, ending);
    KINDS(PRODUCT)
    }
    return taken;
}

// An element of a query, key or value that may have to be rotated by the row's angles.
struct Element {
    const float *at[2]; // it and the other one of its pair, or none
    float2 angle;
    bool is_second;

    __device__ __forceinline__ void find(const Attend &a, const float *head, u32 i, bool rotates) {
        at[0] = head + i;
        if (!rotates || i >= 2 * a.pairs) return;
        is_second = a.is_neox ? i >= a.pairs : i % 2 == 1;
        u32 first = a.is_neox && is_second ? i - a.pairs : i;
        at[1] = head + (!a.is_neox ? i ^ 1 : is_second ? first : i + a.pairs);
        angle = a.angles[a.is_neox ? first : i / 2];
    }

    __device__ __forceinline__ float of(float y, float z) const {
        if (!at[1]) return y;
        return is_second ? fmaf(z, angle.y, y * angle.x) : fmaf(-z, angle.y, y * angle.x);
    }
};

// One of four numbers, of which every thread may want another.
DEVICE u32 of_four(const u32 (&x)[4], u32 i) {
    u32 low = i % 2 ? x[1] : x[0], high = i % 2 ? x[3] : x[2];
    return i / 2 ? high : low;
}

// Up to four query heads of a key head meet a segment: four warps for each head, a thread for each
// position; then a thread for two columns of some positions' values.
DEVICE void attend(u32 stage, u32 area) {
    Shared &shared = shared_memory();
    const Attend &a = shared.stages[own(stage % 2)].attend;
    const u32 MOST = 16; // positions whose values a thread takes, at most
    Seen seen(a, shared.position);
    uint2 range = seen.range;
    u32 first = seen.first, last = seen.last, segments = seen.segments();
    if (blockIdx.x >= a.blocks * segments) return;
    u32 t = own(threadIdx.x), h = t / SEGMENT, token = t % SEGMENT;
    u32 per_kv = (a.group + HEADS - 1) / HEADS;
    u32 key_stride = up8(a.key_dim), stride = up8(a.value_dim);
    u32 eights = key_stride / 8, splits = a.splits, pairs = stride / 2;
    u32 split = divide(t, a.by_pairs), pair = t - split * pairs;
    float *q = (float *)shared.area;                 // [HEADS, key_stride]
    float *weights = q + HEADS * key_stride;         // [HEADS, SEGMENT]
    float *part = weights + HEADS * SEGMENT;         // [splits, HEADS, stride]
    u16 *own_value = (u16 *)(part + splits * HEADS * stride); // [stride]
    u16 *keys = own_value + stride;                  // [key_stride / 8, SEGMENT, 8]
    const u32 *all_pages = shared.pages[a.table];
    for (u32 item = blockIdx.x; item < a.blocks * segments; item += gridDim.x) {
        u32 segment = divide(item, a.by_blocks), block = item - segment * a.blocks;
        segment += first;
        u32 kv_head = divide(block, a.by_group_blocks), place_in_group = block - kv_head * per_kv;
        u32 first_head = kv_head * a.group + place_in_group * HEADS;
        u32 count = min(HEADS, (kv_head + 1) * a.group - first_head);
        u32 from = max(range.x, segment * SEGMENT) - segment * SEGMENT;
        u32 to = min(range.y, (segment + 1) * SEGMENT) - segment * SEGMENT;
        // Where the pages of the segment begin, in heads of a page.
        u32 pages[SEGMENT / PAGE_TOKENS];
#pragma unroll
        for (u32 i = 0; i < SEGMENT / PAGE_TOKENS; i++) {
            bool is_there = i >= from / PAGE_TOKENS && i <= (to - 1) / PAGE_TOKENS;
            u32 page = is_there ? all_pages[segment * (SEGMENT / PAGE_TOKENS) + i] : 0;
            pages[i] = page * a.kv_heads + kv_head;
        }
        // The row's own position is in the last segment, and not yet in memory.
        u32 own = segment == last ? to - 1 : SEGMENT;
        bool is_in = token >= from && token < to;
        if (is_in && token != own) {
            u64 page = of_four(pages, token / PAGE_TOKENS);
            const u16 *key = a.keys + (page * eights * PAGE_TOKENS + token % PAGE_TOKENS) * 8;
            for (u32 i = h; i < eights; i += HEADS) {
                copy_async(shared_address(keys + (i * SEGMENT + token) * 8), key + i * PAGE_TOKENS * 8);
            }
        }
        u64 own_page = of_four(pages, own / PAGE_TOKENS);
        u32 v[MOST];
        if (split < splits) {
#pragma unroll
            for (u32 i = 0; i < SEGMENT / PAGE_TOKENS; i++) pages[i] = (pages[i] - i) * PAGE_TOKENS * pairs;
            u32 at = split, cell = split * pairs + pair;
#pragma unroll
            for (u32 j = 0; j < MOST; j++) {
                if (j * splits >= to) break;
                v[j] = 0;
                if (at - from < to - from) v[j] = ((const u32 *)a.values)[of_four(pages, at / PAGE_TOKENS) + cell];
                at += splits;
                cell += splits * pairs;
            }
        }
        // A thread's element of its query; and of the row's own key, or value.
        Element query = {}, more = {};
        const float *heads = a.q + (first_head + h) * a.key_dim;
        if (h < count && token < a.key_dim) query.find(a, heads, token, true);
        bool has_own = own < SEGMENT && h < 2 && token < (h == 0 ? key_stride : stride);
        if (has_own && h == 0 && token < a.key_dim) more.find(a, a.k + kv_head * a.key_dim, token, true);
        if (has_own && h == 1 && token < a.value_dim) more.find(a, a.v + kv_head * a.value_dim, token, false);
        float y[4];
        wait_for_each({query.at[0], query.at[1], more.at[0], more.at[1]}, y);
        if (token < key_stride) q[h * key_stride + token] = query.of(y[0], y[1]);
        if (has_own) {
            u32 place = own % PAGE_TOKENS;
            u64 page = own_page;
            bool is_first = place_in_group == 0;
            u16 x = to_half(more.of(y[2], y[3]));
            if (h == 0) {
                keys[(token / 8 * SEGMENT + own) * 8 + token % 8] = x;
                if (is_first) a.keys[((page * eights + token / 8) * PAGE_TOKENS + place) * 8 + token % 8] = x;
            } else {
                own_value[token] = x;
                if (is_first) a.values[(page * PAGE_TOKENS + place) * stride + token] = x;
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync<THREADS>();
        float score = 0.0f;
        if (is_in) {
            const uint4 *key = (const uint4 *)keys + token;
            const float4 *query = (const float4 *)(q + h * key_stride);
#pragma unroll 4
            for (u32 i = 0; i < eights; i++) {
                uint4 eight = key[i * SEGMENT];
                float4 low = query[2 * i], high = query[2 * i + 1];
                float2 x0 = from_half_pair(eight.x), x1 = from_half_pair(eight.y);
                float2 x2 = from_half_pair(eight.z), x3 = from_half_pair(eight.w);
                score = fmaf(low.x, x0.x, score);
                score = fmaf(low.y, x0.y, score);
                score = fmaf(low.z, x1.x, score);
                score = fmaf(low.w, x1.y, score);
                score = fmaf(high.x, x2.x, score);
                score = fmaf(high.y, x2.y, score);
                score = fmaf(high.z, x3.x, score);
                score = fmaf(high.w, x3.y, score);
            }
        }
        score *= a.scale;
        if (a.softcap > 0.0f) score = tanhf(score / a.softcap) * a.softcap;
        float most = warp_max(is_in ? score : -INFINITY_F);
        if (t % 32 == 0) shared.room[t / 32] = most;
        sync<THREADS>();
        const float *room = shared.room + 4 * h;
        most = fmaxf(fmaxf(room[0], room[1]), fmaxf(room[2], room[3]));
        float w = is_in ? expf(score - most) : 0.0f;
        weights[t] = w;
        float sum = warp_sum(w);
        sync<THREADS>();
        if (t % 32 == 0) shared.room[t / 32] = sum;
        if (split < splits) {
            float sums[HEADS][2] = {};
#pragma unroll
            for (u32 j = 0; j < MOST; j++) {
                u32 at = split + j * splits;
                if (at >= to) break;
                float2 x = from_half_pair(at == own ? ((const u32 *)own_value)[pair] : v[j]);
#pragma unroll
                for (u32 i = 0; i < HEADS; i++) {
                    float weight = weights[i * SEGMENT + at];
                    sums[i][0] = fmaf(weight, x.x, sums[i][0]);
                    sums[i][1] = fmaf(weight, x.y, sums[i][1]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < HEADS; i++) {
                float2 *to_part = (float2 *)(part + (split * HEADS + i) * stride) + pair;
                *to_part = make_float2(sums[i][0], sums[i][1]);
            }
        }
        sync<THREADS>();
        if (h < count && token < stride) {
            float value = 0.0f;
#pragma unroll 8
            for (u32 k = 0; k < splits; k++) value += part[(k * HEADS + h) * stride + token];
            const float *sums = shared.room + 4 * h;
            sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            if (segments == 1) {
                // As if joined with nothing: a zero loses its sign.
                finish(a, 0, first_head + h, token, most, sum, value + 0.0f);
            } else {
                u64 at = (u64)(first_head + h) * a.segments + segment - first;
                float *out = a.partials + at * (stride + PART_EXTRA);
                out[token] = value;
                if (token == 0) {
                    out[stride] = most;
                    out[stride + 1] = sum;
                }
            }
        }
        if (segments > 1 && is_last<THREADS>(a.arrivals + block, segments)) {
            join_segments<HEADS, THREADS, 1>(a, 0, first_head, count, segments, (float *)shared.area, area);
        }
        sync<THREADS>();
    }
}

// Writes down what attention needs of the feed.
DEVICE void read_feed(const u32 *numbers) {
    Shared &shared = shared_memory();
    Feed feed = {numbers};
    if (threadIdx.x < TABLES) shared.pages[threadIdx.x] = feed.pages(threadIdx.x, 0);
    if (threadIdx.x == 0) shared.position = feed.position(0);
}

DEVICE void compute_all(const Persistent &list) {
    Shared &shared = shared_memory();
    u32 taken = 0;
    describe(list.stages, shared.stages[0], threadIdx.x);
    let_next_start();
    wait_for_inputs();
    read_feed(list.feed);
    unwrite(list.last, list.last_len);
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync<THREADS>();
#pragma unroll 1
    for (u32 i = 0; i < list.count; i++) {
        if (i + 1 < list.count) {
            describe(list.stages + i + 1, shared.stages[(i + 1) % 2], own(threadIdx.x));
        }
        u32 work = shared.stages[i % 2].work;
        if (work == ATTENTION) {
            attend(i, list.area);
        } else {
            taken = product_of(work, i, taken, i + 1 == list.count ? &list : 0);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync<THREADS>();
    }
}

#endif

KERNEL __launch_bounds__(THREADS + 128, 1) NAME(const __grid_constant__ Persistent list) {
#if __CUDA_ARCH__ >= 900
    Shared &shared = shared_memory();
    if (threadIdx.x < WARPS * DEPTH) {
        u64 *barriers = &shared.filled[0][0] + threadIdx.x, *others = &shared.emptied[0][0] + threadIdx.x;
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barriers)));
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(others)));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    // Registers go from the warps that fetch, of which one does, to those that compute.
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x < THREADS + 32) fetch_all(list.stages, list.count, list.feed);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        compute_all(list);
    }
#endif
}
