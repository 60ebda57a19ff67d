// Attention of rows that are not a prompt's, for heads that `meet.cuh` can do: as `attend` otherwise, and
// with the bits of the persistent kernel.
#include "meet.cuh"
#include "segment.cuh"

#define WARPS 4u
#define BLOCK (32 * WARPS)
#define TURNS (SEGMENT_STEPS / WARPS)     // steps of a warp
#define JOINED (HEADS * MOST_DIM / BLOCK) // elements of a block's results for a thread to join, at most

// ALONE: as in `attend.cu`.
template <bool ALONE> DEVICE void attend_meet(const Attend &a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float mosts[SEGMENT_STEPS * HEADS], sums[SEGMENT_STEPS * HEADS];
    let_next_start();
    u32 t = threadIdx.x, warp = t / 32;
    Feed feed = {a.feed};
    if (a.skips_prompts && feed.is_prompt(feed.span(blockIdx.x))) return;
    Block block(a, HEADS);
    u32 row = block.row, kv_head = block.kv_head, last = block.last, first = block.first + blockIdx.z;
    if (first > last) return;
    u32 key_stride = up8(a.key_dim), stride = up8(a.value_dim), columns = columns_of_lane(a.value_dim);
    u32 q_row = query_row(a.key_dim), parts_row = part_row(a.value_dim);
    float *parts = shared;                                        // [SEGMENT_STEPS, HEADS, parts_row]
    float *total = parts + SEGMENT_STEPS * HEADS * parts_row;     // [HEADS, stride]
    u16 *q = (u16 *)(total + HEADS * stride);                     // [2, HEADS, q_row]
    u16 *weights = q + 2 * HEADS * q_row;                         // [2, HEADS, WEIGHT_ROW]
    Own own;
    own.keys = weights + 2 * HEADS * WEIGHT_ROW;
    own.values = own.keys + SEGMENT * key_stride;
    const u32 *pages = feed.pages(a.table, feed.span(row));
    if (ALONE) {
        u32 to = block.to(first) - (first == last);
        fetch_segment(a, kv_head, pages + first * (SEGMENT / PAGE_TOKENS), block.from(first), to, own);
    }
    for (u32 i = t; i < HEADS * stride; i += BLOCK) total[i] = 0.0f;
    wait_for_inputs();
    for (u32 i = t; i < HEADS * q_row; i += BLOCK) {
        u32 head = i / q_row, at = i % q_row;
        const float *from = a.q + (u64)row * a.q_stride + (block.first_head + head) * a.key_dim;
        float x = 0.0f;
        if (head < block.heads && at < a.key_dim) {
            x = ALONE ? rotated(from, at, a.angles + (u64)row * a.pairs, a.pairs, a.is_neox) : from[at];
        }
        put_halves(q + i, HEADS * q_row, x);
    }
    float most[HEADS], sum[HEADS];
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
        most[h] = -INFINITY_F;
        sum[h] = 0.0f;
    }
    for (u32 segment = first; segment <= last; segment += gridDim.z) {
        u32 from = block.from(segment), to = block.to(segment);
        const u32 *segment_pages = pages + segment * (SEGMENT / PAGE_TOKENS);
        bool has_own = ALONE && segment == last;
        // The first segment is on its way.
        if (!ALONE || segment != first) {
            fetch_segment(a, kv_head, segment_pages, from, has_own ? to - 1 : to, own);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (has_own) {
            store_own(a, row, kv_head, segment_pages[(to - 1) / PAGE_TOKENS], to - 1, block.is_first, own);
        }
        __syncthreads();
        Steps steps(from, to);
        float2 scores[TURNS];
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 step = warp + WARPS * turn, at = step * STEP_POSITIONS + t % 32 / 4;
            if (!steps.has(step)) continue;
            float2 &two = scores[turn];
            two = meet_keys(own.keys, q, a.key_dim, step);
            two.x = scaled(a, two.x, at >= from && at < to);
            two.y = scaled(a, two.y, at + 8 >= from && at + 8 < to);
            float largest = most_of_step(two);
            if (t % 32 < HEADS) mosts[step * HEADS + t % 4] = largest;
        }
        __syncthreads();
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 step = warp + WARPS * turn;
            if (!steps.has(step)) continue;
            float2 two = weigh(scores[turn], most_of(mosts, t % HEADS, steps), step, weights);
            float of_step = sum_of_step(two);
            if (t % 32 < HEADS) sums[step * HEADS + t % 4] = of_step;
        }
        __syncthreads();
        for (u32 i = warp; i < 2 * SEGMENT_STEPS; i += WARPS) {
            u32 step = i / 2, column = column_of_lane(i % 2, columns);
            if (!steps.has(step)) continue;
            uint4 v[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 at = step * STEP_POSITIONS + position_of_lane(j);
                bool is_there = at >= from && at < to && column < stride;
                const uint2 *two = (const uint2 *)(own.values + (is_there ? at * stride + column : 0));
                uint2 none = make_uint2(0, 0), low = is_there ? two[0] : none;
                uint2 high = is_there && columns == 8 ? two[1] : none;
                v[j] = make_uint4(low.x, low.y, high.x, high.y);
            }
            meet_values(v, columns, weights, step, i % 2, parts, parts_row);
        }
        __syncthreads();
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            float2 of_segment = {most_of(mosts, h, steps), sum_of(sums, h, steps)};
            add_segment(a, block, segment, h, of_segment, most[h], sum[h], total,
                        [&](u32 i) { return value_of(parts, parts_row, h, i, steps); });
        }
        __syncthreads();
    }
    end<HEADS, JOINED>(a, block, most, sum, total, shared);
}

KERNEL __launch_bounds__(BLOCK, 1) attend_meet(const __grid_constant__ Attend a) { attend_meet<false>(a); }
KERNEL __launch_bounds__(BLOCK, 1) attend_meet_alone(const __grid_constant__ Attend a) { attend_meet<true>(a); }
