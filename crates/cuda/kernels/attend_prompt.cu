// Attention of a prompt's rows: tensor cores multiply, so that keys and values are read from shared
// memory once for sixteen rows. A block takes 64 rows of a sequence's queries, those of all heads of
// a key head side by side, and goes over positions 64 at a time, counted from position 0, with an online
// softmax. Queries and weights of positions are rounded to half precision, as keys and values are. What
// a row's result is does not depend on the rows beside it: positions that it does not see add nothing.
#include "attend.cuh"
#include "planes.cuh"

#define ROWS 64u
#define POSITIONS 64u
#define BLOCK 128u
#define LOG2_E 1.4426950408889634f

DEVICE uint4 load_transposed(u32 at) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w) : "r"(at) : "memory");
    return m;
}

// Asks for sixteen bytes to come to shared memory, or makes them zero.
DEVICE void copy_or_clear(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over the four lanes that have columns of the same row.
DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The rows of a block: some of a span's queries, of which row r is head r % group of token r / group.
struct Rows {
    u32 span, first, count, group, tokens;

    __device__ __forceinline__ u32 token(u32 r) const { return (first + min(r, count - 1)) / group; }
    __device__ __forceinline__ u32 head(u32 r) const { return (first + min(r, count - 1)) % group; }
};

// Whether there are rows for this block; blocks of the last rows, which see most, come first.
DEVICE bool find_rows(const Attend &a, const Feed &feed, Rows &rows) {
    u32 block = blockIdx.x, spans = feed.spans();
    rows.group = a.heads / a.kv_heads;
    for (rows.span = 0; rows.span < spans; rows.span++) {
        if (!feed.is_prompt(rows.span)) continue;
        rows.tokens = feed.len(rows.span);
        u32 all = rows.tokens * rows.group, blocks = (all + ROWS - 1) / ROWS;
        if (block < blocks) {
            rows.first = (blocks - 1 - block) * ROWS;
            rows.count = min(ROWS, all - rows.first);
            return true;
        }
        block -= blocks;
    }
    return false;
}

// Queries come to shared memory, `[ROWS, DIM]`; the eights of a row change places as the row says, so that
// no two rows of a matrix share a bank. Values do so too.
template <u32 DIM> DEVICE void load_queries(const Attend &a, const Rows &rows, u32 row, u32 kv_head, u8 *to) {
    const u32 EIGHTS = DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < ROWS * EIGHTS; i += BLOCK) {
        u32 r = i / EIGHTS, at = i % EIGHTS;
        const float *q = a.q + (u64)(row + rows.token(r)) * a.q_stride
                         + (kv_head * rows.group + rows.head(r)) * a.key_dim;
        float x[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) x[j] = 8 * at + j < a.key_dim ? within_half(q[8 * at + j]) : 0.0f;
        uint4 halves = make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
                                  half_pair(x[6], x[7]));
        *(uint4 *)(to + r * (2 * DIM) + (at ^ r % 8) * 16) = halves;
    }
}

// Where a position's key has an eight in shared memory: `[DIM / 8, POSITIONS]`, of which eights beside each other
// have positions in another order, so that they share no bank.
DEVICE u32 key_place(u32 eight, u32 position) { return eight * POSITIONS + (position ^ eight % 4 * 2); }

// Asks for the keys (`key_place`) and values `[POSITIONS, DIM]` of a block of positions, those first that pages have
// first; zeros stand for those that no row sees, whose pages may be gone.
template <u32 DIM>
DEVICE void fetch(const Attend &a, u32 kv_head, const u32 *pages, u32 start, u32 from, u32 to, u32 keys, u32 values) {
    const u32 PAGES = POSITIONS / PAGE_TOKENS, STEPS = POSITIONS / STEP_POSITIONS;
    static_assert(BLOCK == 8 * STEP_POSITIONS, "a thread takes the same piece of each step");
    u32 t = threadIdx.x, key_pieces = up8(a.key_dim) / 8, value_pieces = up8(a.value_dim) / 8;
    u64 heads[PAGES];
#pragma unroll
    for (u32 i = 0; i < PAGES; i++) {
        u32 first = start + i * PAGE_TOKENS;
        bool is_there = first < to && first + PAGE_TOKENS > from;
        heads[i] = is_there ? ((u64)pages[first / PAGE_TOKENS] * a.kv_heads + kv_head) * PAGE_TOKENS : 0;
    }
    // Of two steps at a time a position's key, whose neighbours are four pieces.
    u32 at = t / 4, c = t % 4;
#pragma unroll
    for (u32 k = 0; k < DIM / 32 * PAGES; k++) {
        u32 first = 4 * (k / PAGES), page = k % PAGES, token = page * PAGE_TOKENS + at, position = start + token;
        u32 piece = key_piece(at, first + c, key_pieces);
        bool is_there = position >= from && position < to && first + c < key_pieces;
        const u16 *key = a.keys + (heads[page] * key_pieces + piece) * 8;
        copy_or_clear(keys + 16 * key_place(first + c, token), is_there ? key : a.keys, is_there);
    }
    // Of a step a position's value, whose neighbours are those that a lane has together with it.
    u32 place = t % 4 * 2 + t / 32 % 2 + t / 64 * 8, g = t / 4 % 8;
#pragma unroll
    for (u32 k = 0; k < DIM / 64 * STEPS; k++) {
        u32 eight = 8 * (k / STEPS) + g, step = k % STEPS, page = step * STEP_POSITIONS / PAGE_TOKENS;
        u32 token = step * STEP_POSITIONS + place, position = start + token;
        u32 piece = value_piece(step * STEP_POSITIONS % PAGE_TOKENS + place, eight, value_pieces);
        bool is_there = position >= from && position < to && eight < value_pieces;
        const u16 *value = a.values + (heads[page] * value_pieces + piece) * 8;
        copy_or_clear(values + token * (2 * DIM) + (eight ^ place % 8) * 16, is_there ? value : a.values, is_there);
    }
}

template <u32 DIM> DEVICE void attend_prompt(const Attend &a) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 EIGHTS = DIM / 8, STAGE = DIM * POSITIONS * 2;
    let_next_start();
    wait_for_inputs();
    Feed feed = {a.feed};
    Rows rows;
    if (!find_rows(a, feed, rows)) return;
    u32 kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    u32 start = feed.start(rows.span), row = feed.first(rows.span);
    const u32 *pages = feed.pages(a.table, rows.span);
    u32 low = start + rows.token(0), high = start + rows.token(rows.count - 1);
    u32 from = a.is_causal && a.window && low + 1 > a.window ? low + 1 - a.window : 0;
    u32 to = a.is_causal ? high + 1 : start + rows.tokens;
    u32 base = (u32)__cvta_generic_to_shared(shared);
    u32 keys = base + ROWS * DIM * 2, values = keys + 2 * STAGE;
    u32 block = from / POSITIONS, last = (to - 1) / POSITIONS;
    fetch<DIM>(a, kv_head, pages, block * POSITIONS, from, to, keys, values);
    asm volatile("cp.async.commit_group;" ::: "memory");
    load_queries<DIM>(a, rows, row, kv_head, shared);

    // Of a lane's two rows: what they see, their largest score, and the sum of weights in this lane.
    u32 seen_from[2], seen_to[2];
    float most[2], sum[2] = {};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 position = start + rows.token(16 * warp + g + 8 * i);
        seen_to[i] = a.is_causal ? position + 1 : to;
        seen_from[i] = a.is_causal && a.window && position + 1 > a.window ? position + 1 - a.window : 0;
        most[i] = -INFINITY_F;
    }
    float out[EIGHTS][4] = {};
    float factor = a.softcap > 0.0f ? a.scale / a.softcap : a.scale * LOG2_E;
    u32 query = base + (16 * warp + lane % 16) * (2 * DIM);
    for (u32 stage = 0; block <= last; block++, stage ^= 1) {
        if (block < last) {
            fetch<DIM>(a, kv_head, pages, (block + 1) * POSITIONS, from, to, keys + (stage ^ 1) * STAGE,
                       values + (stage ^ 1) * STAGE);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        float scores[POSITIONS / 8][4] = {};
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
            if (16 * k >= a.key_dim) break;
            uint4 q = load_matrices(query + ((2 * k + lane / 16) ^ lane % 8) * 16);
            Fragment f = {q.x, q.y, q.z, q.w};
            u32 at = keys + stage * STAGE + key_place(2 * k + lane / 8 % 2, lane / 16 * 8 + lane % 8) * 16;
#pragma unroll
            for (u32 n = 0; n < POSITIONS / 16; n++) {
                uint4 b = load_matrices(at + n * 256);
                mma(scores[2 * n], f, b.x, b.y);
                mma(scores[2 * n + 1], f, b.z, b.w);
            }
        }
        float now[2] = {-INFINITY_F, -INFINITY_F};
#pragma unroll
        for (u32 n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 position = block * POSITIONS + 8 * n + 2 * c + j % 2;
                float s = scores[n][j] * factor;
                if (a.softcap > 0.0f) s = tanhf(s) * (a.softcap * LOG2_E);
                bool is_seen = position >= seen_from[j / 2] && position < seen_to[j / 2];
                scores[n][j] = is_seen ? s : -INFINITY_F;
                now[j / 2] = fmaxf(now[j / 2], scores[n][j]);
            }
        }
        float old_factor[2], reference[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float m = fmaxf(most[i], row_max(now[i]));
            // Of a row that has seen nothing yet, nothing is to be no number.
            reference[i] = m == -INFINITY_F ? 0.0f : m;
            old_factor[i] = power_of_two(most[i] - reference[i]);
            most[i] = m;
            sum[i] *= old_factor[i];
        }
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) out[n][j] *= old_factor[j / 2];
        }
#pragma unroll
        for (u32 n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                scores[n][j] = power_of_two(scores[n][j] - reference[j / 2]);
                sum[j / 2] += scores[n][j];
            }
        }
#pragma unroll
        for (u32 k = 0; k < POSITIONS / 16; k++) {
            const float(&x)[4] = scores[2 * k], (&y)[4] = scores[2 * k + 1];
            Fragment f = {half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(y[0], y[1]), half_pair(y[2], y[3])};
            u32 token = 16 * k + lane % 16, at = values + stage * STAGE + token * (2 * DIM);
#pragma unroll
            for (u32 n = 0; n < EIGHTS / 2; n++) {
                if (16 * n >= a.value_dim) break;
                uint4 b = load_transposed(at + ((2 * n + lane / 16) ^ token % 8) * 16);
                mma(out[2 * n], f, b.x, b.y);
                mma(out[2 * n + 1], f, b.z, b.w);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 r = 16 * warp + g + 8 * i, head = kv_head * rows.group + rows.head(r);
        float all = row_sum(sum[i]), scale = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head] * LOG2_E, m = fmaxf(most[i], sink);
            scale = power_of_two(most[i] - m);
            all = all * scale + power_of_two(sink - m);
        }
        if (r >= rows.count) continue;
        u64 at = row + rows.token(r);
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 column = 8 * n + 2 * c + j;
                if (column >= a.value_dim) continue;
                float y = out[n][2 * i + j] * scale / all;
                u64 to_column = head * a.value_dim + column;
                if (a.out) publish(a.out + at * a.out_stride + to_column, y);
                if (a.half_out) publish(a.half_out + at * a.half_stride + to_column, to_input(y));
            }
        }
    }
}

#define ATTEND(DIM)                                                                                \
    KERNEL __launch_bounds__(BLOCK, 1) attend_prompt_##DIM(const __grid_constant__ Attend a) {     \
        attend_prompt<DIM>(a);                                                                     \
    }
ATTEND(64)
ATTEND(128)
ATTEND(256)
