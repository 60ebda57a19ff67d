// Prefill attention (flash attention) by `mma`: a block takes 64 query rows of a sequence, those of all
// query heads of a KV head side by side, and iterates over 64 positions at a time, counted from
// position 0, with an online softmax. Queries and probabilities are rounded to f16, as the KV cache
// is, or becomes where it holds bytes. A row's result does not depend on the rows beside it: positions
// that no row of the block sees are zeros, and others add zero where they are invisible, unless their
// values are NaN.
//
// On Hopper only for rows that attend to PREFILL_POSITIONS at most: prefill_attention_wgmma.cu gives them the
// same bits, and is faster for others.
//
// Grid: (blocks of query rows, KV heads, blocks that share splits); 128 threads, 16 rows a warp.
// Shared memory: queries, and two stages of keys and values. Bound by tensor cores and exponentials.
#include "prefill_attention.cuh"

#define POSITIONS PREFILL_POSITIONS
#define BLOCK 128u

DEVICE uint4 ldmatrix_x4_trans(u32 at) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

template <u32 DIM> using Block = PrefillBlock<DIM, PREFILL_ROWS, POSITIONS>;

// Loads queries to shared memory, `[PREFILL_ROWS, DIM]`. Eights are swizzled by row, so that no two rows of
// a matrix share a bank; values likewise.
template <u32 DIM> DEVICE void load_queries(const Attention &a, const Block<DIM> &block, u8 *to) {
    const u32 EIGHTS = DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PREFILL_ROWS * EIGHTS; i += BLOCK) {
        u32 r = i / EIGHTS, at = i % EIGHTS;
        *(uint4 *)(to + r * (2 * DIM) + (at ^ r % 8) * 16) = block.query(a, r, 8 * at);
    }
}

// Index of a key's eight in shared memory: `[DIM / 8, POSITIONS]`, swizzled so that neighbouring
// eights share no bank.
DEVICE u32 key_place(u32 eight, u32 position) { return eight * POSITIONS + (position ^ eight % 4 * 2); }

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
        if (a.key_dim == DIM && a.value_dim == DIM && range.has_block(start, POSITIONS)) {
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
    Block<DIM> block;
    if (!block.find(a, metadata)) return;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4, first_row = 16 * warp + lane / 4;
    u32 base = shared_address(shared);
    u32 keys = base + PREFILL_ROWS * DIM * 2, values = keys + 2 * STAGE, kv_block = block.first_kv_block();
    Loader<DIM> fetch(a, metadata.pages(a.page_table, block.rows.span), block.kv_head, block.any);
    fetch.begin(kv_block * POSITIONS, keys, values);
    fetch.finish(keys, values);
    asm volatile("cp.async.commit_group;" ::: "memory");
    load_queries<DIM>(a, block, shared);

    // Visible positions of a lane's two rows.
    PositionRange visible[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) visible[i] = block.visible(a, first_row + 8 * i);
    LaneSoftmax<EIGHTS> softmax;
    softmax.clear();
    u32 query = base + (16 * warp + lane % 16) * (2 * DIM);
    for (u32 stage = 0, next; kv_block <= block.last; kv_block = next, stage ^= 1) {
        next = block.after(kv_block);
        u32 next_keys = keys + (stage ^ 1) * STAGE, next_values = values + (stage ^ 1) * STAGE;
        if (next <= block.last) fetch.begin(next * POSITIONS, next_keys, next_values);
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float scores[POSITIONS / 8][4] = {};
        multiply_keys<DIM>(a, query, keys + stage * STAGE, lane, scores);
        u32 start = kv_block * POSITIONS;
        mask(a, visible, start, block.all.has_block(start, POSITIONS), scores);
        softmax.rescale(softmax.add(scores));
        multiply_values<DIM>(a, scores, values + stage * STAGE, lane, softmax.out);
        if (next <= block.last) fetch.finish(next_keys, next_values);
        __syncthreads();
        if (!block.ends_split(kv_block)) continue;
        end_split(a, block, kv_block, first_row, c, LanePartials(a, block, first_row, c, 0), softmax);
    }
    if (merge_splits<BLOCK>(a, block, first_row, c, softmax)) store_outputs(a, block, first_row, c, softmax);
}

#define ATTEND(DIM)                                                                                \
    KERNEL __launch_bounds__(BLOCK, 1) prefill_attention_##DIM(const __grid_constant__ Attention a) {     \
        prefill_attention<DIM>(a);                                                                     \
    }
ATTEND(64)
ATTEND(128)
ATTEND(256)
