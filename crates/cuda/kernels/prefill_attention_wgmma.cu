// Prefill attention by `wgmma` on Hopper, scheduled as in FlashAttention 3: as in prefill_attention.cu, but
// a block takes 128 query rows and iterates over KV blocks of 128 positions, or of 64 where heads are wide.
// Heads are multiplied as if they were DIM wide.
//
// Grid: (blocks of query rows, KV heads, blocks that share splits); 384 threads: two consumer warp groups,
// of 64 query rows each, and a producer group, of which two warps copy keys and two copy values to rings of
// two stages with full and empty mbarriers. A consumer issues Q K^T of a KV block and P V of the one before,
// then computes the softmax of the new scores while P V runs.
#include "mbarrier.cuh"
#include "prefill_attention.cuh"
#include "wgmma.cuh"

#define ROWS PREFILL_WGMMA_ROWS
#define GROUP_ROWS 64u // query rows of a consumer group
#define GROUP 128u     // threads of a warp group
#define STAGES 2u      // of the rings
// Of a thread. Bytes become halves in the producer's.
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
// Numbers of named barriers of a consumer group, and of the producers of keys and of values.
#define CONSUMER_BARRIER 2u
#define PRODUCER_BARRIER 4u
#define LINE 128u      // bytes of a row of a matrix in shared memory

template <u32 DIM> struct Shape {
    static const u32 POSITIONS = DIM > MAX_SPLIT_DIM ? 64 : 128, TILES = POSITIONS / TILE_POSITIONS;
    typedef PrefillBlock<DIM, ROWS, POSITIONS> Block;
};

#if __CUDA_ARCH__ >= 900

// The shared memory of a block: matrices as in wgmma.cuh, of columns of a line.
template <u32 DIM> struct SharedMemory {
    u8 queries[DIM / SLICE_DIM][ROWS][LINE];
    // Keys in columns of half a line, and values.
    u8 kv[2][STAGES][Shape<DIM>::POSITIONS * DIM * 2];
    u64 full[2][STAGES], empty[2][STAGES];
#ifdef KV_Q8
    // Tiles of keys and values as they are in pages, and barriers that count their bytes.
    u8 pages[2][Shape<DIM>::TILES][TILE_POSITIONS * (DIM + DIM / SLICE_DIM * 4)];
    u64 page_full[2][Shape<DIM>::TILES];
#else
    // The merged splits of the consumers' threads.
    float2 values[Shape<DIM>::Block::HAS_SPLITS ? DIM / 4 : 1][2 * GROUP], sums[ROWS];
#endif
};

#ifndef KV_Q8
// The merged splits of a consumer's thread.
template <u32 DIM> struct MergedSplits {
    SharedMemory<DIM> &shared;
    u32 first, c; // the lane's first row, and its pair of columns in eight

    __device__ __forceinline__ bool has(u32, u32) const { return true; }
    __device__ __forceinline__ float2 sums(u32 i) const { return shared.sums[first + 8 * i]; }
    __device__ __forceinline__ float2 values(u32 i, u32 n) const { return shared.values[2 * n + i][threadIdx.x]; }
    __device__ __forceinline__ void put_sums(u32 i, float2 x) const {
        if (c == 0) shared.sums[first + 8 * i] = x;
    }
    __device__ __forceinline__ void put_values(u32 i, u32 n, float2 x) const {
        shared.values[2 * n + i][threadIdx.x] = x;
    }
};
#endif

// A ring of KV blocks in shared memory, of keys (kind 0) or of values (kind 1).
template <u32 DIM> struct Ring {
    SharedMemory<DIM> &shared;
    u32 kind;
    RingPosition<STAGES> next;

    __device__ __forceinline__ Ring(SharedMemory<DIM> &shared, u32 kind) : shared(shared), kind(kind), next() {}

    __device__ __forceinline__ u32 full(u32 slot) const { return shared_address(&shared.full[kind][slot]); }
    __device__ __forceinline__ u32 empty() const { return shared_address(&shared.empty[kind][next.slot]); }
    __device__ __forceinline__ u32 stage() const { return shared_address(shared.kv[kind][next.slot]); }

    // A producer waits for a free slot, and says that a slot is full.
    __device__ __forceinline__ bool has_free_slot() const {
        return __all_sync(~0u, mbarrier_test(empty(), next.parity ^ 1));
    }
    __device__ __forceinline__ void producer_acquire() const { mbarrier_wait(empty(), next.parity ^ 1); }
    __device__ __forceinline__ void producer_commit(u32 slot) const {
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full(slot));
    }

    // A consumer waits for a KV block, and releases its slot.
    __device__ __forceinline__ void consumer_wait() const { mbarrier_wait(full(next.slot), next.parity); }
    __device__ __forceinline__ void consumer_release() {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
        next.advance();
    }
};

// The producer of keys, or of values: two warps.
template <u32 DIM, bool KEYS> struct Producer {
    static const u32 POSITIONS = Shape<DIM>::POSITIONS, SLICES = DIM / SLICE_DIM, THREADS = GROUP / 2;
    static const u32 TILES = Shape<DIM>::TILES;
    static const u32 COLUMN_BYTES = KEYS ? LINE / 2 : LINE; // of a position in a column
    const u32 *pages;
    const KvElement *elements;
    u32 kv_heads, kv_head, dim;
    PositionRange range; // visible positions

    __device__ __forceinline__ Producer(const Attention &a, const u32 *pages,
                                        const typename Shape<DIM>::Block &block)
        : pages(pages), elements(KEYS ? a.keys : a.values), kv_heads(a.kv_heads), kv_head(block.kv_head),
          dim(KEYS ? a.key_dim : a.value_dim), range(block.any) {}

    // The number of a head of a page among all.
    __device__ __forceinline__ u64 head(u32 position) const {
        return (u64)pages[position / PAGE_TOKENS] * kv_heads + kv_head;
    }

    // Where a piece goes in a stage in shared memory.
    static __device__ __forceinline__ u32 place(u32 position, u32 slice, u32 eight) {
        u32 column = KEYS ? 2 * slice + eight / 4 : slice, piece = KEYS ? eight % 4 : eight;
        return (column * POSITIONS + position) * COLUMN_BYTES
               + (piece ^ (KEYS ? key_swizzle(position) : value_swizzle(position))) * 16;
    }

#ifdef KV_Q8
    // Codes become halves on the way. A thread takes sixteen codes of a key, or eight codes of each of two
    // values, of each slice of each tile, with their scales.
    static const u32 KIND = KEYS ? 0 : 1, TILE_BYTES = TILE_POSITIONS * (DIM + DIM / SLICE_DIM * 4);
    struct Codes {
        uint4 codes;
        u32 scales[KEYS ? 1 : 2];
    };

    // A thread's first position in a tile, and its first eight in a slice.
    static __device__ __forceinline__ u32 position() {
        u32 t = threadIdx.x % THREADS;
        return KEYS ? t / 4 : t / 32 * 8 + t % 4 * 2;
    }
    static __device__ __forceinline__ u32 eight() { return KEYS ? threadIdx.x % 4 * 2 : threadIdx.x / 4 % 8; }

    // Stores codes in a stage: to two neighbours in a swizzle.
    static __device__ __forceinline__ void store(u32 stage, u32 tile, u32 slice, const Codes &x) {
        u32 select = threadIdx.x % (KEYS ? 4 : 32) < (KEYS ? 2 : 16) ? 0x1010 : 0x3232;
        u32 at = stage + place(position(), 0, eight())
                 + (slice * POSITIONS * SLICE_DIM * 2 + tile * TILE_POSITIONS * COLUMN_BYTES);
        u32 scale = __byte_perm(x.scales[0], 0, select);
        store_shared(at, q8_piece(x.codes.x, x.codes.y, scale));
        if (!KEYS) scale = __byte_perm(x.scales[KEYS ? 0 : 1], 0, select);
        store_shared(KEYS ? at ^ 16 : at + LINE ^ 16, q8_piece(x.codes.z, x.codes.w, scale));
    }

    // Begins to copy a tile of a KV block as it is in its page.
    __device__ __forceinline__ void copy_tile(u32 start, u32 tile, SharedMemory<DIM> &shared) const {
        u32 full = shared_address(&shared.page_full[KIND][tile]), at = start + tile * TILE_POSITIONS;
        const u8 *from = elements + q8_head(head(at), DIM) + at % PAGE_TOKENS / TILE_POSITIONS * TILE_BYTES;
        mbarrier_expect_tx(full, TILE_BYTES);
        bulk_copy(shared_address(shared.pages[KIND][tile]), from, TILE_BYTES, full);
    }

    // Stores a tile that has been copied, in a stage.
    __device__ __forceinline__ void store_tile(u32 stage, u32 tile, const SharedMemory<DIM> &shared) const {
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            const u8 *from = shared.pages[KIND][tile] + slice * Q8_SLICE_BYTES;
            const u32 *scales = (const u32 *)(from + TILE_POSITIONS * SLICE_DIM) + position();
            Codes x;
            x.codes = ((const uint4 *)from)[threadIdx.x % THREADS];
            x.scales[0] = scales[0];
            if (!KEYS) x.scales[KEYS ? 0 : 1] = scales[1];
            store(stage, tile, slice, x);
        }
    }

    // Loads and stores a tile of a KV block that is not whole. Scales of invisible positions, whose pages may
    // be gone, are zero, as they are beyond the head.
    __device__ __forceinline__ void load_tile(u32 start, u32 stage, u32 tile) const {
        u32 at = start + tile * TILE_POSITIONS + position(), token = at % PAGE_TOKENS;
        bool has_first = range.has(at), has_second = !KEYS && range.has(at + 1);
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            u32 column = slice * SLICE_DIM, i = column + 8 * eight();
            Codes x = {};
            if ((has_first || has_second) && i < dim) {
                const u8 *from = elements + q8_head(head(at), dim), *scales = from + q8_scale(token, dim, column);
                from += KEYS ? q8_key(token, dim, i) : q8_value(token, dim, i);
                x.codes = read_piece<true>((const uint4 *)from);
                if (KEYS) {
                    x.scales[0] = read_piece<true>((const u32 *)scales);
                } else {
                    uint2 two = read_piece<true>((const uint2 *)scales);
                    x.scales[0] = has_first ? two.x : 0;
                    x.scales[KEYS ? 0 : 1] = has_second ? two.y : 0;
                }
            }
            store(stage, tile, slice, x);
        }
    }

    // Fetches all KV blocks. Tiles of whole ones are copied a KV block ahead.
    __device__ __forceinline__ void run(const typename Shape<DIM>::Block &block, Ring<DIM> ring) const {
        SharedMemory<DIM> &shared = ring.shared;
        auto is_whole = [&](u32 kv_block) {
            return kv_block <= block.last && dim == DIM && range.has_block(kv_block * POSITIONS, POSITIONS);
        };
        bool copies = threadIdx.x % THREADS == 0;
        u32 kv_block = block.first_kv_block(), parity = 0;
        for (u32 tile = 0; copies && is_whole(kv_block) && tile < TILES; tile++) {
            copy_tile(kv_block * POSITIONS, tile, shared);
        }
        while (kv_block <= block.last) {
            u32 next = block.after(kv_block);
            ring.producer_acquire();
#pragma unroll 1
            for (u32 tile = 0; tile < TILES; tile++) {
                if (is_whole(kv_block)) {
                    mbarrier_wait(shared_address(&shared.page_full[KIND][tile]), parity);
                    store_tile(ring.stage(), tile, shared);
                } else {
                    load_tile(kv_block * POSITIONS, ring.stage(), tile);
                }
                // Both warps have read the tile.
                team_sync(PRODUCER_BARRIER + KIND, THREADS / 32);
                if (copies && is_whole(next)) copy_tile(next * POSITIONS, tile, shared);
            }
            if (is_whole(kv_block)) parity ^= 1;
            ring.producer_commit(ring.next.slot);
            ring.next.advance();
            kv_block = next;
        }
    }
#else
    // Copies a KV block whose positions are all visible, of heads without padding: pages have the order of
    // shared memory. Each warp copies a half.
    __device__ __forceinline__ void copy_whole(u32 start, const Ring<DIM> &ring) const {
        const u32 COLUMNS = 2 * DIM / COLUMN_BYTES, BYTES = TILE_POSITIONS * COLUMN_BYTES; // of a tile
        const u32 COPIES = TILES * COLUMNS / 2;
        static_assert(COPIES <= 32, "a lane copies once");
        u32 lane = threadIdx.x % 32, full = ring.full(ring.next.slot);
        if (lane == 0) mbarrier_expect_tx(full, COPIES * BYTES);
        __syncwarp();
        if (lane >= COPIES) return;
        u32 k = threadIdx.x % THREADS / 32 * COPIES + lane, tile = k / COLUMNS, column = k % COLUMNS;
        u32 position = start + tile * TILE_POSITIONS, token = position % PAGE_TOKENS;
        const KvElement *from = elements + (head(position) * PAGE_TOKENS + token) * DIM;
        bulk_copy(ring.stage() + (column * TILES + tile) * BYTES, (const u8 *)from + column * BYTES, BYTES, full);
    }

    // Begins to copy another KV block: zeros beyond the head and at invisible positions, whose pages may be
    // gone. A thread takes the same piece of every eight positions of every slice.
    __device__ __forceinline__ void copy_some(u32 start, u32 to) const {
        u32 pieces = round_up8(dim) / 8, t = threadIdx.x % THREADS;
        u32 row = KEYS ? t / 8 : t % 4 * 2 + t / 32, eight = KEYS ? t % 8 : t / 4 % 8;
#pragma unroll 1
        for (u32 first = 0; first < POSITIONS; first += 8) {
            u32 position = start + first + row, token = position % PAGE_TOKENS;
            bool is_visible = range.has(position);
            u64 of_head = is_visible ? head(position) * PAGE_TOKENS * pieces : 0;
#pragma unroll
            for (u32 slice = 0; slice < SLICES; slice++) {
                u32 i = 8 * slice + eight;
                bool is_valid = is_visible && i < pieces;
                u32 piece = KEYS ? key_piece(token, i, pieces) : value_piece(token, i, pieces);
                const KvElement *from = elements + (is_valid ? 8 * (of_head + piece) : 0);
                copy_or_clear(to + place(first + row, slice, eight), from, is_valid);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Fetches all KV blocks.
    __device__ __forceinline__ void run(const typename Shape<DIM>::Block &block, Ring<DIM> ring) const {
        bool has_copy = false; // of some pieces, in flight
        u32 slot = 0;          // where it goes
        for (u32 kv_block = block.first_kv_block(); kv_block <= block.last; kv_block = block.after(kv_block)) {
            u32 start = kv_block * POSITIONS;
            bool is_whole = dim == DIM && range.has_block(start, POSITIONS);
            // While there is no space, the copy in flight can end.
            if (has_copy && (is_whole || !ring.has_free_slot())) {
                asm volatile("cp.async.wait_group 0;" ::: "memory");
                ring.producer_commit(slot);
                has_copy = false;
            }
            ring.producer_acquire();
            if (is_whole) {
                copy_whole(start, ring);
            } else {
                copy_some(start, ring.stage());
                if (has_copy) {
                    asm volatile("cp.async.wait_group 1;" ::: "memory");
                    ring.producer_commit(slot);
                }
                has_copy = true, slot = ring.next.slot;
            }
            ring.next.advance();
        }
        if (!has_copy) return;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        ring.producer_commit(slot);
    }
#endif
};

// A consumer warp group's scores and results.
template <u32 DIM> struct Consumer {
    static const u32 POSITIONS = Shape<DIM>::POSITIONS, WIDTH = DIM < 128 ? DIM : 128;
    const Attention &a;
    const typename Shape<DIM>::Block &block;
    SharedMemory<DIM> &shared;
    u32 warp_group;
    u32 first_row, c;                   // a lane's first row, and its pair of columns in eight
    u64 queries;
    PositionRange visible[2];           // positions that a lane's rows attend to
    Ring<DIM> keys, values;
    float scores[POSITIONS / 8][4];
    Fragment probabilities[POSITIONS / 16];
    LaneSoftmax<DIM / 8> softmax;

    __device__ __forceinline__ Consumer(const Attention &a, const typename Shape<DIM>::Block &block,
                                        SharedMemory<DIM> &shared)
        : a(a), block(block), shared(shared), warp_group(threadIdx.x / GROUP), keys(shared, 0), values(shared, 1) {
        u32 t = threadIdx.x % GROUP, lane = t % 32;
        first_row = GROUP_ROWS * warp_group + t / 32 * 16 + lane / 4, c = lane % 4;
        queries = wgmma_matrix(shared_address(shared.queries[0][GROUP_ROWS * warp_group]));
        for (u32 i = 0; i < 2; i++) visible[i] = block.visible(a, first_row + 8 * i);
        softmax.clear();
    }

    // Loads the warp group's queries to shared memory.
    __device__ __forceinline__ void load_queries() const {
        const u32 EIGHTS = DIM / 8;
#pragma unroll 4
        for (u32 i = threadIdx.x % GROUP; i < GROUP_ROWS * EIGHTS; i += GROUP) {
            u32 r = GROUP_ROWS * warp_group + i / EIGHTS, eight = i % EIGHTS;
            *(uint4 *)(shared.queries[eight / 8][r] + (eight % 8 ^ r % 8) * 16) = block.query(a, r, 8 * eight);
        }
        fence_proxy_async();
        team_sync(CONSUMER_BARRIER + warp_group, GROUP / 32);
    }

    // Issues Q K^T of the next KV block.
    __device__ __forceinline__ void multiply_keys() {
        u64 matrix = wgmma_matrix<LINE / 2>(keys.stage());
        keys.consumer_wait();
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
            u64 query = queries + k / 4 * (ROWS * LINE / 16) + k % 4 * 2;
            wgmma(flat(scores), query, matrix + k / 2 * (POSITIONS * LINE / 2 / 16) + k % 2 * 2, k > 0);
        }
        wgmma_commit();
    }

    // Issues P V.
    __device__ __forceinline__ void multiply_values() {
        u64 matrix = wgmma_mn_major(values.stage(), POSITIONS * LINE);
        values.consumer_wait();
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < POSITIONS / 16; k++) {
#pragma unroll
            for (u32 i = 0; i < DIM / WIDTH; i++) {
                float(&out)[WIDTH / 2] = *(float(*)[WIDTH / 2]) softmax.out[i * WIDTH / 8];
                u32 slice = i * WIDTH / SLICE_DIM;
                wgmma<true>(out, probabilities[k], matrix + (slice * POSITIONS + 16 * k) * LINE / 16, true);
            }
        }
        wgmma_commit();
    }

    static __device__ __forceinline__ float (&flat(float (&x)[POSITIONS / 8][4]))[POSITIONS / 2] {
        return *(float(*)[POSITIONS / 2]) x;
    }

    // Takes the scores of a KV block, and releases its keys.
    __device__ __forceinline__ float2 add_scores(u32 kv_block) {
        wgmma_results(flat(scores));
        keys.consumer_release();
        u32 start = kv_block * POSITIONS;
        mask(a, visible, start, block.all.has_block(start, POSITIONS), scores);
        return softmax.add(scores);
    }

    // Takes the results of a KV block, and releases its values.
    __device__ __forceinline__ void add_results() {
        wgmma_wait<0>();
        wgmma_results(*(float(*)[DIM / 2]) softmax.out);
        values.consumer_release();
    }

    __device__ __forceinline__ void round_probabilities() {
#pragma unroll
        for (u32 k = 0; k < POSITIONS / 16; k++) {
            const float(&x)[4] = scores[2 * k], (&y)[4] = scores[2 * k + 1];
            probabilities[k] = {half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(y[0], y[1]),
                                half_pair(y[2], y[3])};
        }
    }

    // Main loop.
    __device__ __forceinline__ void run() {
        for (u32 kv_block = block.first_kv_block(); kv_block <= block.last; kv_block = block.after(kv_block)) {
            multiply_keys();
            wgmma_wait<0>();
            add_scores(kv_block);
            round_probabilities();
            while (!block.ends_split(kv_block)) {
                kv_block++;
                multiply_keys();
                multiply_values();
                wgmma_wait<1>();
                float2 factors = add_scores(kv_block);
                add_results();
                softmax.rescale(factors);
                round_probabilities();
            }
            multiply_values();
            add_results();
#ifdef KV_Q8
            LanePartials merged(a, block, first_row, c, 0);
#else
            MergedSplits<DIM> merged = {shared, first_row, c};
#endif
            end_split(a, block, kv_block, first_row, c, merged, softmax);
        }
    }
};

template <u32 DIM> DEVICE void prefill_attention(const Attention &a) {
    extern __shared__ __align__(1024) u8 bytes[];
    SharedMemory<DIM> &shared = *(SharedMemory<DIM> *)bytes;
    // As the host counts them (`prefill_wgmma_bytes`).
    const u32 POSITIONS = Shape<DIM>::POSITIONS, MERGED = Shape<DIM>::Block::HAS_SPLITS ? 4 * DIM : 16;
    static_assert(sizeof(shared) == 2 * (ROWS + 4 * POSITIONS) * DIM + 64
                  + (HAS_SCALES ? 2 * POSITIONS * (DIM + DIM / 16) + POSITIONS : ROWS * (MERGED + 8)));
    launch_dependents();
    grid_dependency_wait();
    StepMetadata metadata = {a.metadata};
    typename Shape<DIM>::Block block;
    if (!block.find(a, metadata)) return;
    // Without rows, the second consumer warp group has nothing to do.
    u32 consumers = block.rows.count > GROUP_ROWS ? 2 : 1, warp_group = threadIdx.x / GROUP;
    if (threadIdx.x < 2 * STAGES) {
        mbarrier_init(shared_address(&shared.full[0][threadIdx.x]), GROUP / 32 / 2);
        mbarrier_init(shared_address(&shared.empty[0][threadIdx.x]), consumers * GROUP / 32);
        fence_proxy_async();
    }
#ifdef KV_Q8
    const u32 TILES = Shape<DIM>::TILES;
    if (threadIdx.x < 2 * TILES) {
        mbarrier_init(shared_address(&shared.page_full[0][threadIdx.x]), 1);
        fence_proxy_async();
    }
#endif
    __syncthreads();
    if (warp_group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        const u32 *pages = metadata.pages(a.page_table, block.rows.span);
        if (threadIdx.x % GROUP < GROUP / 2) {
            Producer<DIM, true>(a, pages, block).run(block, Ring<DIM>(shared, 0));
        } else {
            Producer<DIM, false>(a, pages, block).run(block, Ring<DIM>(shared, 1));
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        Consumer<DIM> consumer(a, block, shared);
        if (warp_group < consumers) {
            consumer.load_queries();
            consumer.run();
        }
        u32 first = consumer.first_row, c = consumer.c;
        if (merge_splits<2 * GROUP>(a, block, first, c, consumer.softmax)) {
            store_outputs(a, block, first, c, consumer.softmax);
        }
    }
}

#endif

#if __CUDA_ARCH__ >= 900
#define ATTEND(DIM)                                                                                 \
    KERNEL __launch_bounds__(3 * GROUP, 1) prefill_attention_wgmma_##DIM(const __grid_constant__ Attention a) { \
        prefill_attention<DIM>(a);                                                                      \
    }
#else
#define ATTEND(DIM) KERNEL prefill_attention_wgmma_##DIM(const __grid_constant__ Attention) {}
#endif
ATTEND(64)
ATTEND(128)
ATTEND(256)
