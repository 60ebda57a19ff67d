// Products for many rows of input on Hopper: warp groups multiply straight from shared memory, while
// others fill it. A block takes 128 weight rows, or 64 of a gate and 64 of what it gates, and WIDTH
// input rows; each of two groups of four warps half of the weights, in registers and in the order of
// `mma`. A third group brings the input rows, a chunk at a time, in the order in which the weights
// have their columns. The sums have the same bits as those of `mma`.
#include "product.cuh"

#define STAGES 6u // chunks of the input in shared memory
#define WAY 3u    // of them on their way, besides one
#define GROUP 128u // threads of a group
#define AHEAD 6u  // chunks between the one that a warp loads and the one that shall come near

#if __CUDA_ARCH__ >= 900

// d += w * inputs, of 16 columns: a warp's 16 rows of weights and all input rows.
DEVICE void wgmma(float (&d)[64], const Fragment &w, u64 inputs, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                   "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                   "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
                   "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                   "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),
                   "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
                   "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
                   "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),
                   "+f"(d[62]), "+f"(d[63])
                 : "r"(w.a[0]), "r"(w.a[1]), "r"(w.a[2]), "r"(w.a[3]), "l"(inputs), "r"((u32)adds));
}
DEVICE void wgmma(float (&d)[32], const Fragment &w, u64 inputs, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                   "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                   "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
                   "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(w.a[0]), "r"(w.a[1]), "r"(w.a[2]), "r"(w.a[3]), "l"(inputs), "r"((u32)adds));
}
// What products of a group wait for, and are waited for.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void send_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

DEVICE u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

DEVICE void arrive(const u64 *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until a barrier has left the phase of this parity.
DEVICE void wait_phase(const u64 *barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The shared memory of a block. Rows of an input's chunk are 128 bytes, whose pieces of 16 change
// places as the row says: so the tensor cores want it, and no two lanes of a warp share a bank.
template <u32 WIDTH> struct Shared {
    u8 inputs[STAGES][WIDTH * 128];
    u64 filled[STAGES], emptied[STAGES];
    __align__(16) u32 rows[WIDTH]; // where input rows begin, in pairs of columns
};

// Asks for four bytes of memory to come to shared memory.
DEVICE void copy_four(u32 to, const u8 *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Brings the input: each warp a quarter of the rows, each lane two columns of each.
template <u32 WIDTH> DEVICE void bring(const Product &p, Shared<WIDTH> &shared) {
    const u32 ROWS = WIDTH / 4;
    u32 lane = threadIdx.x % 32, first = threadIdx.x % GROUP / 32 * ROWS;
    for (u32 i = lane; i < ROWS; i += 32) {
        // Of rows that are not there nothing is written.
        u32 row = min(blockIdx.x * WIDTH + first + i, p.rows - 1);
        shared.rows[first + i] = input_row(p, row) * (p.input_stride / 2);
    }
    __syncwarp();
    const u32 *input = (const u32 *)p.input + lane;
    // The weights of step s of a chunk are, from lane c, of the columns 16 c + 4 s to 16 c + 4 s + 3.
    u32 to = first * 128 + lane % 8 * 16 + lane / 8 * 4, base = shared_address(shared.inputs);
    for (u32 chunk = 0; chunk < p.chunks + WAY; chunk++) {
        if (chunk < p.chunks) {
            u32 stage = chunk % STAGES;
            wait_phase(&shared.emptied[stage], (chunk / STAGES % 2) ^ 1);
#pragma unroll
            for (u32 i = 0; i < ROWS; i += 4) {
                uint4 rows = *(const uint4 *)(shared.rows + first + i);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    u32 place = base + stage * (WIDTH * 128) + ((to + (i + j) * 128) ^ (i + j) % 8 * 16);
                    copy_four(place, (const u8 *)(input + (u64)word(rows, j) + chunk * (CHUNK_COLS / 2)));
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (chunk < WAY) continue;
        asm volatile("cp.async.wait_group %0;" ::"n"(WAY) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        arrive(&shared.filled[(chunk - WAY) % STAGES]);
    }
}

// Where results of a warp's tile go.
struct Place {
    u32 matrix, row; // the first of this lane's two, which are 8 apart
    bool is_in;
};

// Asks for memory to come to the second-level cache.
DEVICE void bring_near(const u8 *at, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// What a group multiplies.
template <int KIND, u32 WIDTH> struct Sums {
    typedef Planes<KIND> Weights;
    static const int COUNT = WIDTH / 2;
    float sums[COUNT], totals[COUNT];
    const u8 *at; // the warp's tile, or none
    Weights next; // the chunk after the one that is multiplied

    __device__ __forceinline__ void load(const Product &p, u32 chunk) {
        u32 lane = threadIdx.x % 32;
        if (!at || chunk >= p.chunks) return;
        const u8 *from = at + (u64)chunk * Weights::BYTES;
        next.load(from, lane);
        if (lane == 0 && chunk + AHEAD < p.chunks) bring_near(from + AHEAD * Weights::BYTES, Weights::BYTES);
    }

    // Multiplies a chunk; meanwhile the next one's weights become fragments.
    __device__ __forceinline__ void multiply(const Product &p, u32 chunk, const u8 *inputs, const Fragment (&now)[4],
                                             Fragment (&then)[4]) {
        // Rows of 128 bytes, eight of which lie one behind the other, with places changed in them.
        u64 descriptor = (u64)1 << 62 | (u64)64 << 32 | 1 << 16 | shared_address(inputs) >> 4;
        bool is_first = chunk % p.part == 0;
        begin_products();
#pragma unroll
        for (int step = 0; step < 4; step++) wgmma(sums, now[step], descriptor + 2 * step, step > 0 || !is_first);
        send_products();
#pragma unroll
        for (int step = 0; step < 4; step++) then[step] = next.fragment(step);
        load(p, chunk + 2);
        wait_for_products();
        if ((chunk + 1) % p.part == 0 || chunk + 1 == p.chunks) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) totals[i] += sums[i];
        }
    }

    __device__ __forceinline__ void all(const Product &p, Shared<WIDTH> &shared) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++) sums[i] = totals[i] = 0.0f;
        Fragment fragments[2][4];
#pragma unroll
        for (int step = 0; step < 4; step++) fragments[0][step] = next.fragment(step);
        load(p, 1);
        u32 stage = 0, parity = 0;
        for (u32 chunk = 0; chunk < p.chunks; chunk += 2) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                if (chunk + i >= p.chunks) break;
                wait_phase(&shared.filled[stage], parity);
                multiply(p, chunk + i, shared.inputs[stage], fragments[i], fragments[1 - i]);
                if (lane == 0) arrive(&shared.emptied[stage]);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                if (stage == 0) parity ^= 1;
            }
        }
    }
};

// Results come through shared memory, so that the loop over them is a short one. Of a gate and what it
// gates each group makes half of the results.
template <bool GATED, u32 WIDTH, int COUNT>
DEVICE void emit_all(const Product &p, const Place &place, float *results, const float (&totals)[COUNT]) {
    u32 t = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    // All products have been made: the input's place is free.
    asm volatile("bar.sync 1, %0;" ::"n"(2 * GROUP) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; i++) results[(group * COUNT + i) * GROUP + t] = totals[i];
    asm volatile("bar.sync 1, %0;" ::"n"(2 * GROUP) : "memory");
    if (!place.is_in) return;
    float scales[2], up_scales[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        scales[half] = row_scale(p.matrices[GATED ? 0 : place.matrix], 0, place.row + 8 * half);
        up_scales[half] = GATED ? row_scale(p.matrices[1], 0, place.row + 8 * half) : 0.0f;
    }
    const float *own = results + (GATED ? 0 : group * COUNT) * GROUP + t, *up = own + COUNT * GROUP;
    u32 from = GATED ? group * COUNT / 2 : 0, to = GATED ? from + COUNT / 2 : COUNT;
    u32 start = blockIdx.x * WIDTH + t % 4 * 2;
#pragma unroll 1
    for (u32 first = from; first < to; first += 8) {
        float residuals[8] = {};
        if (!GATED && place.matrix == 0) {
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                u32 row = place.row + j % 4 / 2 * 8, at = start + (first + j) / 4 * 8 + j % 2;
                if (at < p.rows) residuals[j] = added(p, row, at);
            }
        }
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 half = j % 4 / 2, row = place.row + half * 8, at = start + (first + j) / 4 * 8 + j % 2;
            float sum = own[(first + j) * GROUP];
            if (at >= p.rows) continue;
            if (GATED) {
                emit_gated(p, 0, row, at, sum, up[(first + j) * GROUP], scales[half], up_scales[half]);
            } else {
                emit(p, place.matrix, 0, row, at, sum, scales[half], residuals[j]);
            }
        }
    }
}

template <int KIND, bool GATED, u32 WIDTH> DEVICE void wide(const Product &p) {
    extern __shared__ __align__(1024) u8 bytes[];
    Shared<WIDTH> &shared = *(Shared<WIDTH> *)bytes;
    if (threadIdx.x < STAGES) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                     ::"r"(shared_address(&shared.filled[threadIdx.x])), "n"(GROUP));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                     ::"r"(shared_address(&shared.emptied[threadIdx.x])), "n"(2 * GROUP / 32));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    let_next_start();
    __syncthreads();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        wait_for_inputs();
        bring<WIDTH>(p, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Place place;
        u32 tile = GATED ? blockIdx.y * 4 + warp % 4 : blockIdx.y * 8 + warp;
        place.is_in = tile < p.tiles;
        place.matrix = GATED ? warp / 4 : place.is_in ? matrix_of(p, tile) : 0;
        const Matrix &m = p.matrices[place.matrix];
        if (!GATED) tile -= m.first_tile;
        place.row = tile * TILE_ROWS + lane / 4;
        Sums<KIND, WIDTH> results;
        results.next = {};
        results.at = place.is_in ? m.planes + (u64)tile * p.chunks * Planes<KIND>::BYTES : 0;
        if (results.at && lane == 0) bring_near(results.at, min(AHEAD, p.chunks) * Planes<KIND>::BYTES);
        results.load(p, 0);
        wait_for_inputs();
        results.all(p, shared);
        emit_all<GATED, WIDTH>(p, place, (float *)shared.inputs, results.totals);
    }
}

#endif

#if __CUDA_ARCH__ >= 900
#define WIDE(NAME, KIND, GATED, WIDTH)                                                             \
    KERNEL __launch_bounds__(3 * GROUP, 1) NAME(const __grid_constant__ Product p) {               \
        wide<KIND, GATED, WIDTH>(p);                                                               \
    }
#else
#define WIDE(NAME, KIND, GATED, WIDTH) KERNEL NAME(const __grid_constant__ Product) {}
#endif
#define WIDES(NAME, KIND)                                                                          \
    WIDE(wide_##NAME##_64, KIND, false, 64)                                                        \
    WIDE(wide_##NAME##_128, KIND, false, 128)                                                      \
    WIDE(wide_##NAME##_64_gated, KIND, true, 64)                                                   \
    WIDE(wide_##NAME##_128_gated, KIND, true, 128)
WIDES(f16, F16)
WIDES(s8, S8)
WIDES(s8x16, S8X16)
WIDES(u8, U8)
WIDES(u4, U4)
