// Attention of rows that are not a prompt's, for heads that `meet.cuh` can do: as `attend` otherwise, and
// with the bits of the persistent kernel.
#include "meet.cuh"
#include "segment.cuh"

// The queries that a block meets segments with.
template <bool ROTATES> DEVICE void put_queries(const Attend &a, const Block &block, Room &room) {
    for (u32 i = threadIdx.x; i < HEADS * MOST_DIM; i += TEAM) {
        u32 head = i / MOST_DIM, at = i % MOST_DIM;
        const float *from = a.q + (u64)block.row * a.q_stride + (block.first_head + head) * a.key_dim;
        float x = 0.0f;
        if (head < block.heads && at < a.key_dim) {
            x = ROTATES ? rotated(from, at, a.cos_sin + (u64)block.row * a.rotary_pairs, a.rotary_pairs, a.is_neox) : from[at];
        }
        room.put_query(head, at, x);
    }
}

// A step's keys, or its values, in a page, from the first one's first element on.
DEVICE Slices slices_from(const u16 *first) { return {{(const uint4 *)first, (const uint4 *)first + SLICE_PIECES}}; }

// ALONE: as in `attend.cu`.
template <bool ALONE> DEVICE void attend_meet(const Attend &a) {
    extern __shared__ __align__(16) float shared[];
    let_next_start();
    u32 t = threadIdx.x, step = t / 32, h = t / HEAD_THREADS;
    Feed feed = {a.metadata};
    if (a.skips_prefill && feed.is_prompt(feed.span(blockIdx.x))) return;
    Block block(a, HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.first + blockIdx.z;
    if (first > last) return;
    u32 stride = up8(a.value_dim);
    Room &room = *(Room *)shared;
    const u32 *pages = feed.pages(a.page_table, feed.span(row));
    float most = -INFINITY_F, sum = 0.0f, total[MOST_ITEMS] = {};
    for (u32 segment = first; segment <= last; segment += gridDim.z) {
        // The results of the segment before it have been read.
        if (segment != first) __syncthreads();
        if (!ALONE && segment == first) wait_for_inputs();
        u32 start = step * STEP_POSITIONS, at = segment * SEGMENT + start;
        u32 from = block.from(segment), to = block.to(segment);
        Steps steps = Steps::between(from, to);
        Keys16 keys = {};
        Values16 values[MOST_SLICES] = {};
        if (steps.has(step)) {
            u64 head = (u64)pages[at / PAGE_TOKENS] * a.kv_heads + kv_head;
            u32 token = at % PAGE_TOKENS;
            keys.load<true>(slices_from(a.keys + key_at(head, token, a.key_dim, 0)), a.key_dim);
            Slices slices = slices_from(a.values + value_at(head, token, a.value_dim, 0));
            values[0].load<true>(slices, 0, a.value_dim);
            if (a.value_dim > SLICE_DIM) values[1].load<true>(slices, 1, a.value_dim);
        }
        if (segment == first) {
            if (ALONE) wait_for_inputs();
            put_queries<ALONE>(a, block, room);
        }
        bool has_own = ALONE && segment == last;
        if (has_own) {
            u32 page = pages[(block.range.y - 1) / PAGE_TOKENS], token = (to - 1) % PAGE_TOKENS;
            u64 head = (u64)page * a.kv_heads + kv_head;
            const float *k = a.k + (u64)row * a.k_stride + kv_head * a.key_dim;
            const float *v = a.v + (u64)row * a.v_stride + kv_head * a.value_dim;
            if (t < MOST_DIM) {
                const float2 *angles = a.cos_sin + (u64)row * a.rotary_pairs;
                u16 x = keep(t < a.key_dim ? rotated(k, t, angles, a.rotary_pairs, a.is_neox) : 0.0f);
                u16 y = keep(t < a.value_dim ? v[t] : 0.0f);
                room.own_key[t] = x;
                room.own_value[t] = y;
                if (block.is_first && t < up8(a.key_dim)) put_key(a.keys, head, token, a.key_dim, t, x);
                if (block.is_first && t < stride) put_value(a.values, head, token, a.value_dim, t, y);
            }
        }
        __syncthreads();
        if (steps.has(step)) {
            if (has_own && to <= start + STEP_POSITIONS) {
                keys.take_own(to - 1 - start, room);
                values[0].take_own(to - 1 - start, 0, room);
                values[1].take_own(to - 1 - start, 1, room);
            }
            float scores[4];
            keys.scores(a.key_dim, room, scores);
            from = max(from, start) - start, to = min(to, start + STEP_POSITIONS) - start;
            Fragment weights = weigh(a, scores, step, from, to, room);
            float *part = room.parts[step][t / 4 % HEADS];
            values[0].sum(weights, 0, part);
            if (a.value_dim > SLICE_DIM) values[1].sum(weights, 1, part);
        } else {
            room.skip(step);
        }
        __syncthreads();
        Joined joined(room, h, t % HEAD_THREADS, a.value_dim);
        float2 factors = make_float2(0.0f, 0.0f);
        if (!block.is_spread) factors = join(most, sum, joined.most, joined.sum);
        float *out = block.part(a, segment, h);
#pragma unroll
        for (u32 i = 0; i < MOST_ITEMS; i++) {
            u32 column = t % HEAD_THREADS + i * HEAD_THREADS;
            if (!block.is_spread) {
                total[i] = total[i] * factors.x + joined.values[i] * factors.y;
            } else if (h < block.heads && column < stride) {
                out[column] = joined.values[i];
            }
        }
        if (block.is_spread && h < block.heads && t % HEAD_THREADS == 0) {
            out[stride] = joined.most;
            out[stride + 1] = joined.sum;
        }
    }
    if (block.is_spread) {
        join_spread<HEADS, TEAM, MOST_ITEMS>(a, block, shared);
    } else if (h < block.heads) {
        Results results(a, row, block.first_head + h);
        float factor = results.factor(most, sum);
#pragma unroll
        for (u32 i = 0; i < MOST_ITEMS; i++) results.put(t % HEAD_THREADS + i * HEAD_THREADS, total[i] * factor);
    }
}

KERNEL __launch_bounds__(TEAM, 2) attend_meet(const __grid_constant__ Attend a) { attend_meet<false>(a); }
KERNEL __launch_bounds__(TEAM, 2) attend_meet_alone(const __grid_constant__ Attend a) { attend_meet<true>(a); }
