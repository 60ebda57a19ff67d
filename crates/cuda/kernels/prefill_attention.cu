// Prefill attention (flash attention): a block takes 64 query rows of a sequence, those of all
// query heads of a KV head side by side, and iterates over 64 positions at a time, counted from
// position 0, with an online softmax. Queries and probabilities are rounded to f16, as the KV cache
// is, or becomes where it holds bytes. A row's result does not depend on the rows beside it:
// invisible positions add nothing.
//
// Positions form splits of 2048. Each split has its own softmax, and splits are merged in order: by
// one block, or, where a step has too few query rows to fill the device, by the last of several
// blocks that share them. A row has the same bits either way. Heads wider than MAX_SPLIT_DIM leave no
// registers for that: all their positions are one split.
//
// Grid: (blocks of query rows, KV heads, blocks that share splits); 128 threads, 16 rows a warp.
// Shared memory: queries, and two stages of keys and values. Bound by tensor cores and exponentials.
#include "decode_mma.cuh"
#include "kv_split.cuh"

#define POSITIONS 64u
#define BLOCK 128u
#define LOG2_E 1.4426950408889634f

DEVICE uint4 ldmatrix_x4_trans(u32 at) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

// Copies sixteen bytes to shared memory asynchronously, or writes zeros.
DEVICE void copy_or_clear(u32 to, const void *from, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_valid ? 16 : 0)
                 : "memory");
}

DEVICE void store_shared(u32 to, const uint4 &x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Reductions over the four lanes that share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Calls `see` with each of a lane's scores, its position in the block, and which of the lane's two
// rows.
template <class See> DEVICE void each(float (&scores)[POSITIONS / 8][4], See see) {
#pragma unroll
    for (u32 n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) see(scores[n][j], 8 * n + threadIdx.x % 4 * 2 + j % 2, j / 2);
    }
}

// The query rows of a block: row r is head r % group of token r / group of a span.
struct QueryRows {
    u32 span, first, count, group, tokens;

    __device__ __forceinline__ u32 token(u32 r) const { return (first + min(r, count - 1)) / group; }
    __device__ __forceinline__ u32 head(u32 r) const { return (first + min(r, count - 1)) % group; }
};

// Finds this block's rows, if there are any. The last rows of a span, which attend to most
// positions, come first. Each lane looks at a span, as a step may have hundreds of short ones.
DEVICE bool find_query_rows(const Attention &a, const StepMetadata &metadata, QueryRows &rows) {
    u32 block = blockIdx.x, spans = metadata.spans(), lane = threadIdx.x % 32;
    rows.group = a.heads / a.kv_heads;
    for (u32 start = 0; start < spans; start += 32) {
        u32 span = start + lane;
        bool is_prompt = span < spans && metadata.is_prompt(span);
        u32 all = is_prompt ? metadata.len(span) * rows.group : 0;
        u32 blocks = (all + PREFILL_ROWS - 1) / PREFILL_ROWS;
        // Blocks of the spans up to a lane's own.
        u32 end = blocks;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += before;
        }
        u32 behind = __ballot_sync(~0u, block < end);
        if (behind) {
            u32 found = __ffs(behind) - 1;
            u32 last = __shfl_sync(~0u, end, found) - 1 - block;
            rows.span = start + found;
            rows.tokens = metadata.len(rows.span);
            rows.first = last * PREFILL_ROWS;
            rows.count = min(PREFILL_ROWS, rows.tokens * rows.group - rows.first);
            return true;
        }
        block -= __shfl_sync(~0u, end, 31);
    }
    return false;
}

// Loads queries to shared memory, `[PREFILL_ROWS, DIM]`. Eights are swizzled by row, so that no two rows of
// a matrix share a bank; values likewise.
template <u32 DIM> DEVICE void load_queries(const Attention &a, const QueryRows &rows, u32 row, u32 kv_head, u8 *to) {
    const u32 EIGHTS = DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PREFILL_ROWS * EIGHTS; i += BLOCK) {
        u32 r = i / EIGHTS, at = i % EIGHTS;
        const float *q = a.q + (u64)(row + rows.token(r)) * a.q_stride
                         + (kv_head * rows.group + rows.head(r)) * a.key_dim;
        float x[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) x[j] = 8 * at + j < a.key_dim ? clamp_half(q[8 * at + j]) : 0.0f;
        uint4 halves = make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
                                  half_pair(x[6], x[7]));
        *(uint4 *)(to + r * (2 * DIM) + (at ^ r % 8) * 16) = halves;
    }
}

// Index of a key's eight in shared memory: `[DIM / 8, POSITIONS]`, swizzled so that neighbouring
// eights share no bank.
DEVICE u32 key_place(u32 eight, u32 position) { return eight * POSITIONS + (position ^ eight % 4 * 2); }

// Visible positions of some rows.
struct PositionRange {
    u32 from, to;

    __device__ __forceinline__ bool has(u32 position) const { return position >= from && position < to; }
    __device__ __forceinline__ bool has_block(u32 start) const { return start >= from && start + POSITIONS <= to; }
};

// Loads the keys (`key_place`) and values `[POSITIONS, DIM]` of blocks of positions, in the order
// of the pages in f16.
template <u32 DIM> struct KvLoader {
    static const u32 PAGES = POSITIONS / PAGE_TOKENS, STEPS = POSITIONS / TILE_POSITIONS, PIECES = DIM / 8;
    static_assert(BLOCK == 4 * PAGE_TOKENS && BLOCK == 8 * TILE_POSITIONS,
        "a thread takes the same piece of each page");
    const Attention &a;
    const u32 *pages;
    u32 kv_head;
    PositionRange range; // visible positions
    // A thread's key piece in two tiles at a time, and its value piece in each tile.
    u32 at, c, place, g;
    // Their offsets in shared memory, and in pages of whole heads.
    u32 key_to, value_to, key_from, value_from;

    __device__ __forceinline__ KvLoader(const Attention &a, const u32 *pages, u32 kv_head, const PositionRange &range)
        : a(a), pages(pages), kv_head(kv_head), range(range) {
        u32 t = threadIdx.x;
        at = t / 4, c = t % 4, place = t % 4 * 2 + t / 32 % 2 + t / 64 * 8, g = t / 4 % 8;
        key_to = 16 * key_place(c, at), value_to = place * (2 * DIM) + (g ^ place % 8) * 16;
        key_from = 8 * key_piece(at, c, PIECES), value_from = 8 * value_piece(place, g, PIECES);
    }

    // Index of the first piece of a head's page, for pieces of one element a token.
    __device__ __forceinline__ u64 head(u32 position) const {
        return ((u64)pages[position / PAGE_TOKENS] * a.kv_heads + kv_head) * PAGE_TOKENS;
    }

    // Begins to load a block to these addresses.
    __device__ __forceinline__ void begin(u32 start, u32 keys, u32 values) const {
        if (a.key_dim == DIM && a.value_dim == DIM && range.has_block(start)) {
            whole(start, keys, values);
        } else {
            some(start, keys, values);
        }
    }

    // The full block: all offsets are compile-time distances.
    __device__ __forceinline__ void whole(u32 start, u32 keys, u32 values) const {
        u64 heads[PAGES];
#pragma unroll
        for (u32 i = 0; i < PAGES; i++) heads[i] = head(start + i * PAGE_TOKENS) * DIM;
#pragma unroll
        for (u32 k = 0; k < DIM / 32 * PAGES; k++) {
            u32 four = k / PAGES, page = k % PAGES;
            const u16 *key = a.keys + heads[page] + key_from;
            copy_async(keys + key_to + 16 * (4 * POSITIONS * four + PAGE_TOKENS * page),
                key + 8 * SLICE_PIECES / 2 * four);
        }
#pragma unroll
        for (u32 k = 0; k < DIM / 64 * STEPS; k++) {
            u32 eight = k / STEPS, first = k % STEPS * TILE_POSITIONS;
            const u16 *value = a.values + heads[first / PAGE_TOKENS] + value_from + first % PAGE_TOKENS * DIM;
            copy_async(values + value_to + first * (2 * DIM) + 128 * eight, value + 8 * SLICE_PIECES * eight);
        }
    }

    // The partial block: zeros beyond the head and at invisible positions, whose pages may be gone.
    __device__ __forceinline__ void some(u32 start, u32 keys, u32 values) const {
        u32 key_pieces = round_up8(a.key_dim) / 8, value_pieces = round_up8(a.value_dim) / 8;
        u64 heads[PAGES];
#pragma unroll
        for (u32 i = 0; i < PAGES; i++) {
            u32 first = start + i * PAGE_TOKENS;
            heads[i] = first < range.to && first + PAGE_TOKENS > range.from ? head(first) : 0;
        }
#pragma unroll (PAGES)
        for (u32 k = 0; k < DIM / 32 * PAGES; k++) {
            u32 piece = k / PAGES * 4 + c, page = k % PAGES, token = page * PAGE_TOKENS + at;
            bool is_valid = range.has(start + token) && piece < key_pieces;
            u64 from = heads[page] * key_pieces + key_piece(at, piece, key_pieces);
            copy_or_clear(keys + 16 * key_place(piece, token), is_valid ? a.keys + 8 * from : a.keys, is_valid);
        }
#pragma unroll (STEPS)
        for (u32 k = 0; k < DIM / 64 * STEPS; k++) {
            u32 piece = k / STEPS * 8 + g, token = k % STEPS * TILE_POSITIONS + place, page = token / PAGE_TOKENS;
            bool is_valid = range.has(start + token) && piece < value_pieces;
            u64 from = heads[page] * value_pieces + value_piece(token % PAGE_TOKENS, piece, value_pieces);
            u32 to = values + token * (2 * DIM) + (piece ^ place % 8) * 16;
            copy_or_clear(to, is_valid ? a.values + 8 * from : a.values, is_valid);
        }
    }

    // The copies need no thread.
    __device__ __forceinline__ void finish(u32, u32) const {}
};

// Sixteen codes of a key and eight codes of each of two values, with their scales.
struct Q8Unit {
    uint4 keys, values;
    u32 key_scales;
    uint2 value_scales;
};

// Likewise from bytes, which become halves on the way: a thread holds its codes in registers from
// `begin` to `finish`, but where heads are wide: there are too few for that.
template <u32 DIM> struct Q8Loader {
    static const u32 PAGES = POSITIONS / PAGE_TOKENS, UNITS = DIM / SLICE_DIM * PAGES;
    static const u32 HELD = DIM > MAX_SPLIT_DIM ? PAGES : UNITS;
    const Attention &a;
    const u32 *pages;
    u32 kv_head;
    PositionRange range; // visible positions
    Q8Unit units[HELD];

    __device__ __forceinline__ Q8Loader(const Attention &a, const u32 *pages, u32 kv_head, const PositionRange &range)
        : a(a), pages(pages), kv_head(kv_head), range(range) {}

    // Of a unit's codes of a key: its token in the page, and sixteens before them in the slice.
    static __device__ __forceinline__ u32 key_token() { return threadIdx.x / 4; }
    static __device__ __forceinline__ u32 key_sixteen() { return threadIdx.x % 4; }
    // Of its codes of values: the first token in the page, and eights before them.
    static __device__ __forceinline__ u32 value_token() {
        return threadIdx.x / 64 * TILE_POSITIONS + threadIdx.x / 32 % 2 * 8 + threadIdx.x % 4 * 2;
    }
    static __device__ __forceinline__ u32 value_eight() { return threadIdx.x / 4 % 8; }

    // Loads unit `k` of a block. Scales of invisible positions, whose pages may be gone, are zero, as
    // they are beyond the head.
    __device__ __forceinline__ void load(Q8Unit &unit, u32 start, u32 k) const {
        u32 column = k / PAGES * SLICE_DIM, first = start + k % PAGES * PAGE_TOKENS;
        u32 token = key_token(), at = column + 16 * key_sixteen();
        unit = {};
        if (first >= range.to || first + PAGE_TOKENS <= range.from) return;
        u64 head = (u64)pages[first / PAGE_TOKENS] * a.kv_heads + kv_head;
        if (range.has(first + token) && at < a.key_dim) {
            const u8 *from = (const u8 *)a.keys + q8_head(head, a.key_dim);
            unit.keys = read_piece<true>((const uint4 *)(from + q8_key(token, a.key_dim, at)));
            unit.key_scales = read_piece<true>((const u32 *)(from + q8_scale(token, a.key_dim, column)));
        }
        token = value_token(), at = column + 8 * value_eight();
        bool has_first = range.has(first + token), has_second = range.has(first + token + 1);
        if ((has_first || has_second) && at < a.value_dim) {
            const u8 *from = (const u8 *)a.values + q8_head(head, a.value_dim);
            unit.values = read_piece<true>((const uint4 *)(from + q8_value(token, a.value_dim, at)));
            unit.value_scales = read_piece<true>((const uint2 *)(from + q8_scale(token, a.value_dim, column)));
            if (!has_first) unit.value_scales.x = 0;
            if (!has_second) unit.value_scales.y = 0;
        }
    }

    // Stores unit `k` of a block at these addresses.
    static __device__ __forceinline__ void store(const Q8Unit &unit, u32 k, u32 keys, u32 values) {
        u32 eight = k / PAGES * (SLICE_DIM / 8), first = k % PAGES * PAGE_TOKENS;
        u32 scale = __byte_perm(unit.key_scales, 0, key_sixteen() < 2 ? 0x1010 : 0x3232);
        u32 i = eight + 2 * key_sixteen(), token = first + key_token();
        store_shared(keys + 16 * key_place(i, token), q8_piece(unit.keys.x, unit.keys.y, scale));
        store_shared(keys + 16 * key_place(i + 1, token), q8_piece(unit.keys.z, unit.keys.w, scale));
        u32 select = value_eight() < 4 ? 0x1010 : 0x3232;
        i = eight + value_eight(), token = first + value_token();
        scale = __byte_perm(unit.value_scales.x, 0, select);
        store_shared(values + token * (2 * DIM) + (i ^ token % 8) * 16, q8_piece(unit.values.x, unit.values.y, scale));
        token++;
        scale = __byte_perm(unit.value_scales.y, 0, select);
        store_shared(values + token * (2 * DIM) + (i ^ token % 8) * 16, q8_piece(unit.values.z, unit.values.w, scale));
    }

    __device__ __forceinline__ void begin(u32 start, u32 keys, u32 values) {
#pragma unroll
        for (u32 k = 0; k < UNITS; k += HELD) {
#pragma unroll
            for (u32 i = 0; i < HELD; i++) load(units[i], start, k + i);
            if (HELD < UNITS) store_held(k, keys, values);
        }
    }

    __device__ __forceinline__ void finish(u32 keys, u32 values) const {
        if (HELD == UNITS) store_held(0, keys, values);
    }

    __device__ __forceinline__ void store_held(u32 first, u32 keys, u32 values) const {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) store(units[i], first + i, keys, values);
    }
};

#ifdef KV_Q8
template <u32 DIM> using Loader = Q8Loader<DIM>;
#else
template <u32 DIM> using Loader = KvLoader<DIM>;
#endif

// The softmax of a lane's two rows over some positions: row max, row sum, and sum of values. Before
// `sum_quads` a row sum is this lane's part of it.
template <u32 EIGHTS> struct LaneSoftmax {
    float row_max[2], row_sum[2], out[EIGHTS][4];

    __device__ __forceinline__ void clear() {
        row_max[0] = row_max[1] = -INFINITY_F;
        row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    }

    __device__ __forceinline__ void sum_quads() {
        row_sum[0] = quad_sum(row_sum[0]);
        row_sum[1] = quad_sum(row_sum[1]);
    }
};

// Where the results of a lane's rows over splits are in memory: `[splits, value_stride +
// PARTIAL_EXTRA]` for each row.
struct LanePartials {
    float *rows[2]; // none for rows that the block does not have
    u32 c, stride;

    __device__ __forceinline__ LanePartials(const Attention &a, const QueryRows &rows_of, u32 row, u32 kv_head,
                                            u32 first, u32 c)
        : c(c), stride(round_up8(a.value_dim)) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 r = first + 8 * i, head = kv_head * rows_of.group + rows_of.head(r);
            u64 at = ((u64)(row + rows_of.token(r)) * a.heads + head) * a.max_splits;
            rows[i] = r < rows_of.count ? a.partials + at * (stride + PARTIAL_EXTRA) : nullptr;
        }
    }

    template <u32 EIGHTS> __device__ __forceinline__ void store(u32 split, const LaneSoftmax<EIGHTS> &softmax) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (!rows[i]) continue;
            float *to = rows[i] + split * (stride + PARTIAL_EXTRA);
#pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) {
                if (8 * n >= stride) break;
                *(float2 *)(to + 8 * n + 2 * c) = make_float2(softmax.out[n][2 * i], softmax.out[n][2 * i + 1]);
            }
            if (c == 0) *(float2 *)(to + stride) = make_float2(softmax.row_max[i], softmax.row_sum[i]);
        }
    }

    // Merges a stored split with these results.
    template <u32 EIGHTS>
    __device__ __forceinline__ void merge_stored(u32 split, LaneSoftmax<EIGHTS> &softmax) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (!rows[i]) continue;
            const float *from = rows[i] + split * (stride + PARTIAL_EXTRA);
            auto stored = [&](u32 at) { return __uint_as_float(load_relaxed(from + at)); };
            float stored_max = stored(stride), m = fmaxf(softmax.row_max[i], stored_max);
            // A row without visible positions so far must not become NaN.
            float reference = m == -INFINITY_F ? 0.0f : m;
            float factor = exp2_approx(softmax.row_max[i] - reference);
            float stored_factor = exp2_approx(stored_max - reference);
            softmax.row_max[i] = m;
            softmax.row_sum[i] = softmax.row_sum[i] * factor + stored(stride + 1) * stored_factor;
#pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) {
                if (8 * n >= stride) break;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    float &x = softmax.out[n][2 * i + j];
                    x = x * factor + stored(8 * n + 2 * c + j) * stored_factor;
                }
            }
        }
    }
};

// Divides a lane's outputs by their row sums, sinks included, and stores them. `row`: of the span's
// first token.
template <u32 EIGHTS>
DEVICE void store_outputs(const Attention &a, const QueryRows &rows, u32 row, u32 kv_head, u32 first, u32 c,
                          const LaneSoftmax<EIGHTS> &softmax) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 r = first + 8 * i, head = kv_head * rows.group + rows.head(r);
        float all = softmax.row_sum[i], scale = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head] * LOG2_E, m = fmaxf(softmax.row_max[i], sink);
            scale = exp2_approx(softmax.row_max[i] - m);
            all = all * scale + exp2_approx(sink - m);
        }
        if (r >= rows.count) continue;
        u64 at = row + rows.token(r);
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            float y[2];
            u32 column = 8 * n + 2 * c, to_column = head * a.value_dim + column;
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                y[j] = softmax.out[n][2 * i + j] * scale / all;
                if (a.out && column + j < a.value_dim) store_relaxed(a.out + at * a.out_stride + to_column + j, y[j]);
            }
            // Heads have an even number of columns.
            if (a.half_out && column < a.value_dim) {
                u16 *to = a.half_out + half_at(a.half_stride, at, to_column);
                *(u32 *)to = half_pair(as_input(y[0]), as_input(y[1]));
            }
        }
    }
}

// Adds P V to the outputs of a warp's rows. `values` is a shared address.
template <u32 DIM>
DEVICE void multiply_values(const Attention &a, const float (&scores)[POSITIONS / 8][4], u32 values, u32 lane,
                            float (&out)[DIM / 8][4]) {
    const u32 EIGHTS = DIM / 8;
#pragma unroll
    for (u32 k = 0; k < POSITIONS / 16; k++) {
        const float(&x)[4] = scores[2 * k], (&y)[4] = scores[2 * k + 1];
        Fragment f = {half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(y[0], y[1]), half_pair(y[2], y[3])};
        u32 token = 16 * k + lane % 16, at = values + token * (2 * DIM);
#pragma unroll
        for (u32 n = 0; n < EIGHTS / 2; n++) {
            if (16 * n >= a.value_dim) break;
            uint4 b = ldmatrix_x4_trans(at + ((2 * n + lane / 16) ^ token % 8) * 16);
            mma(out[2 * n], f, b.x, b.y);
            mma(out[2 * n + 1], f, b.z, b.w);
        }
    }
}

// Turns scores to probabilities relative to the new row max, and rescales what the older ones gave.
template <u32 EIGHTS>
DEVICE void online_softmax(float (&scores)[POSITIONS / 8][4], LaneSoftmax<EIGHTS> &softmax) {
    float now[2] = {-INFINITY_F, -INFINITY_F};
    each(scores, [&](float &s, u32, u32 i) { now[i] = fmaxf(now[i], s); });
    float old_factor[2], reference[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float m = fmaxf(softmax.row_max[i], quad_max(now[i]));
        // A row without visible positions so far must not become NaN.
        reference[i] = m == -INFINITY_F ? 0.0f : m;
        old_factor[i] = exp2_approx(softmax.row_max[i] - reference[i]);
        softmax.row_max[i] = m;
        softmax.row_sum[i] *= old_factor[i];
    }
    // Mostly no row max changes.
    if (__any_sync(~0u, old_factor[0] != 1.0f || old_factor[1] != 1.0f)) {
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) softmax.out[n][j] *= old_factor[j / 2];
        }
    }
    each(scores, [&](float &s, u32, u32 i) {
        s = exp2_approx(s - reference[i]);
        softmax.row_sum[i] += s;
    });
}

// Scores of a warp's rows: Q K^T. `query` and `keys` are shared addresses.
template <u32 DIM>
DEVICE void multiply_keys(const Attention &a, u32 query, u32 keys, u32 lane, float (&scores)[POSITIONS / 8][4]) {
#pragma unroll
    for (u32 k = 0; k < DIM / 16; k++) {
        if (16 * k >= a.key_dim) break;
        uint4 q = ldmatrix_x4(query + ((2 * k + lane / 16) ^ lane % 8) * 16);
        Fragment f = {q.x, q.y, q.z, q.w};
        u32 at = keys + key_place(2 * k + lane / 8 % 2, lane / 16 * 8 + lane % 8) * 16;
#pragma unroll
        for (u32 n = 0; n < POSITIONS / 16; n++) {
            uint4 b = ldmatrix_x4(at + n * 256);
            mma(scores[2 * n], f, b.x, b.y);
            mma(scores[2 * n + 1], f, b.z, b.w);
        }
    }
}

template <u32 DIM> DEVICE void prefill_attention(const Attention &a) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 EIGHTS = DIM / 8, STAGE = DIM * POSITIONS * 2;
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {a.metadata};
    QueryRows rows;
    if (!find_query_rows(a, metadata, rows)) return;
    u32 kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    u32 start = metadata.start(rows.span), row = metadata.first(rows.span);
    u32 low = start + rows.token(0), high = start + rows.token(rows.count - 1);
    u32 end = start + rows.tokens;
    // Positions that some row, and that all rows attend to.
    PositionRange any_visible = {first_visible(a, low), end_visible(a, high, end)};
    PositionRange all_visible = {first_visible(a, high), end_visible(a, low, end)};
    u32 base = shared_address(shared);
    u32 keys = base + PREFILL_ROWS * DIM * 2, values = keys + 2 * STAGE;
    u32 block = any_visible.from / POSITIONS, last = (any_visible.to - 1) / POSITIONS;
    const u32 SPLIT_BLOCKS = DIM > MAX_SPLIT_DIM ? ~0u / POSITIONS : PREFILL_SPLIT / POSITIONS;
    u32 first_split = block / SPLIT_BLOCKS, splits = last / SPLIT_BLOCKS - first_split + 1;
    if (blockIdx.z >= splits) return;
    if (blockIdx.z > 0) block = (first_split + blockIdx.z) * SPLIT_BLOCKS;
    bool is_shared = gridDim.z > 1 && splits > 1;
    Loader<DIM> fetch(a, metadata.pages(a.page_table, rows.span), kv_head, any_visible);
    fetch.begin(block * POSITIONS, keys, values);
    fetch.finish(keys, values);
    asm volatile("cp.async.commit_group;" ::: "memory");
    load_queries<DIM>(a, rows, row, kv_head, shared);

    // Visible positions of a lane's two rows.
    PositionRange visible[2];
    float factor[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 position = start + rows.token(16 * warp + g + 8 * i);
        visible[i] = {first_visible(a, position), end_visible(a, position, end)};
        float scale = query_scale(a, position);
        factor[i] = a.softcap > 0.0f ? scale / a.softcap : scale * LOG2_E;
    }
    LaneSoftmax<EIGHTS> softmax;
    softmax.clear();
    u32 query = base + (16 * warp + lane % 16) * (2 * DIM);
    for (u32 stage = 0, next; block <= last; block = next, stage ^= 1) {
        bool ends_split = block == last || (block + 1) % SPLIT_BLOCKS == 0;
        // Blocks that share splits take turns.
        next = block + 1 + (ends_split ? (gridDim.z - 1) * SPLIT_BLOCKS : 0);
        u32 next_keys = keys + (stage ^ 1) * STAGE, next_values = values + (stage ^ 1) * STAGE;
        if (next <= last) fetch.begin(next * POSITIONS, next_keys, next_values);
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float scores[POSITIONS / 8][4] = {};
        multiply_keys<DIM>(a, query, keys + stage * STAGE, lane, scores);
        each(scores, [&](float &s, u32, u32 i) { s *= factor[i]; });
        if (a.softcap > 0.0f) each(scores, [&](float &s, u32, u32) { s = tanhf(s) * (a.softcap * LOG2_E); });
        if (!all_visible.has_block(block * POSITIONS)) {
            each(scores, [&](float &s, u32 at, u32 i) {
                if (!visible[i].has(block * POSITIONS + at)) s = -INFINITY_F;
            });
        }
        online_softmax(scores, softmax);
        multiply_values<DIM>(a, scores, values + stage * STAGE, lane, softmax.out);
        if (next <= last) fetch.finish(next_keys, next_values);
        __syncthreads();
        if (DIM > MAX_SPLIT_DIM || !ends_split) continue;
        softmax.sum_quads();
        LanePartials partials(a, rows, row, kv_head, 16 * warp + g, c);
        u32 split = block / SPLIT_BLOCKS - first_split;
        if (!is_shared && split > 0) partials.merge_stored(0, softmax);
        // All lanes have read the row max and the row sum that one of them replaces.
        __syncwarp();
        if (is_shared || block < last) {
            partials.store(is_shared ? split : 0, softmax);
            softmax.clear();
        }
    }
    if (DIM > MAX_SPLIT_DIM) {
        softmax.sum_quads();
    } else if (is_shared) {
        if (!is_last_block<BLOCK>(a.arrivals + blockIdx.y * gridDim.x + blockIdx.x, min(gridDim.z, splits))) return;
        LanePartials partials(a, rows, row, kv_head, 16 * warp + g, c);
        for (u32 split = 0; split < splits; split++) partials.merge_stored(split, softmax);
    }
    store_outputs(a, rows, row, kv_head, 16 * warp + g, c, softmax);
}

#define ATTEND(DIM)                                                                                \
    KERNEL __launch_bounds__(BLOCK, 1) prefill_attention_##DIM(const __grid_constant__ Attention a) {     \
        prefill_attention<DIM>(a);                                                                     \
    }
ATTEND(64)
ATTEND(128)
ATTEND(256)
