// Attention of rows that are not a prompt's, for heads that `meet.cuh` can do: as `attend` otherwise, and
// with the bits of the persistent kernel.
#include "meet.cuh"
#include "segment.cuh"

#define WARPS 4u
#define BLOCK (32 * WARPS)
#define TURNS (SEGMENT_STEPS / WARPS)       // steps of a warp
#define JOINED (HEADS * MOST_DIM / BLOCK)   // elements of a block's results for a thread to join, at most

// Blocks are a row, some query heads of a key head, and one of the shares of segments. ALONE: no row's
// sequence has another row in the step.
template <bool ALONE> DEVICE void attend_meet(const Attend &a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float mosts[SEGMENT_STEPS * HEADS], sums[SEGMENT_STEPS * HEADS];
    let_next_start();
    u32 t = threadIdx.x, warp = t / 32, row = blockIdx.x;
    if (a.skips_prompts && Feed{a.feed}.is_prompt(Feed{a.feed}.span(row))) return;
    uint2 range = seen(a, row);
    u32 first = range.x / SEGMENT, last = (range.y - 1) / SEGMENT;
    if (first + blockIdx.z > last) return;
    u32 group = a.heads / a.kv_heads, per_kv = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.y / per_kv, first_head = kv_head * group + blockIdx.y % per_kv * HEADS;
    u32 count = min(HEADS, (kv_head + 1) * group - first_head);
    u32 key_stride = up8(a.key_dim), stride = up8(a.value_dim), columns = columns_of_lane(a.value_dim);
    u32 q_row = query_row(a.key_dim), parts_row = part_row(a.value_dim);
    // Of a single segment nothing is left to join.
    bool is_spread = a.is_spread && first < last;
    float *parts = shared;                                        // [SEGMENT_STEPS, HEADS, parts_row]
    float *total = parts + SEGMENT_STEPS * HEADS * parts_row;     // [HEADS, stride]
    u16 *q = (u16 *)(total + HEADS * stride);                     // [2, HEADS, q_row]
    u16 *weights = q + 2 * HEADS * q_row;                         // [2, HEADS, WEIGHT_ROW]
    Own own;
    own.keys = weights + 2 * HEADS * WEIGHT_ROW;
    own.values = own.keys + SEGMENT * key_stride;
    Feed feed = {a.feed};
    const u32 *pages = feed.pages(a.table, feed.span(row));
    if (ALONE) {
        u32 start = (first + blockIdx.z) * SEGMENT;
        u32 from = max(range.x, start) - start, to = min(range.y - 1, start + SEGMENT) - start;
        fetch_segment(a, kv_head, pages + start / PAGE_TOKENS, from, to, own);
    }
    for (u32 i = t; i < HEADS * stride; i += BLOCK) total[i] = 0.0f;
    wait_for_inputs();
    for (u32 i = t; i < HEADS * q_row; i += BLOCK) {
        u32 head = i / q_row, at = i % q_row;
        const float *from = a.q + (u64)row * a.q_stride + (first_head + head) * a.key_dim;
        float x = 0.0f;
        if (head < count && at < a.key_dim) {
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
    for (u32 segment = first + blockIdx.z; segment <= last; segment += gridDim.z) {
        u32 start = segment * SEGMENT, from = max(range.x, start) - start, to = min(range.y, start + SEGMENT) - start;
        const u32 *segment_pages = pages + segment * (SEGMENT / PAGE_TOKENS);
        bool has_own = ALONE && segment == last;
        // The first segment is on its way.
        if (!ALONE || segment != first + blockIdx.z) {
            fetch_segment(a, kv_head, segment_pages, from, has_own ? to - 1 : to, own);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (has_own) {
            store_own(a, row, kv_head, segment_pages[(to - 1) / PAGE_TOKENS], to - 1, blockIdx.y % per_kv == 0, own);
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
            float segment_most = most_of(mosts, h, steps), segment_sum = sum_of(sums, h, steps);
            float2 factors = make_float2(0.0f, 0.0f);
            if (!is_spread) factors = join(most[h], sum[h], segment_most, segment_sum);
            u64 at = ((u64)row * a.heads + first_head + h) * a.segments + segment - first;
            float *out = a.partials + at * (stride + PART_EXTRA);
            if (is_spread && h < count && t == 0) {
                out[stride] = segment_most;
                out[stride + 1] = segment_sum;
            }
            for (u32 i = t; i < stride; i += BLOCK) {
                float v = value_of(parts, parts_row, h, i, steps);
                if (!is_spread) {
                    float &x = total[h * stride + i];
                    x = x * factors.x + v * factors.y;
                } else if (h < count) {
                    out[i] = v;
                }
            }
        }
        __syncthreads();
    }
    if (is_spread) {
        u32 shares = min(gridDim.z, last - first + 1), bytes;
        if (!is_last<BLOCK>(a.arrivals + row * gridDim.y + blockIdx.y, shares)) return;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        join_copied<HEADS, JOINED>(a, row, first_head, count, last - first + 1, shared, bytes);
        return;
    }
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
        if (h >= count) continue;
        for (u32 i = t; i < stride; i += BLOCK) {
            finish(a, row, first_head + h, i, most[h], sum[h], total[h * stride + i]);
        }
    }
}

KERNEL __launch_bounds__(BLOCK, 1) attend_meet(const __grid_constant__ Attend a) { attend_meet<false>(a); }
KERNEL __launch_bounds__(BLOCK, 1) attend_meet_alone(const __grid_constant__ Attend a) { attend_meet<true>(a); }
