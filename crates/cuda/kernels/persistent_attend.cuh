// Attention of a step of one row in the persistent kernel. Blocks take segments that some query heads
// meet, and while they compute with one, the next one's keys, values and queries are on their way.
// Each head's segments are joined by one block, which waits for them as for any other numbers and makes
// them unwritten again.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

#define MOST_JOINED 96u // segments of a head that are joined at a time, at most

// An element of a query, key or value that may have to be rotated by the row's angles.
struct Element {
    const float *head; // or none
    u32 first, second; // places of it and, if it is rotated, of the other one of its pair
    float2 angle;

    __device__ __forceinline__ void find(const Attend &a, const float *of, u32 i, bool rotates) {
        head = of;
        first = second = i;
        if (!rotates || i >= 2 * a.pairs) return;
        second = !a.is_neox ? i ^ 1 : i >= a.pairs ? i - a.pairs : i + a.pairs;
        angle = a.angles[a.is_neox ? min(first, second) : i / 2];
    }

    // Looks whether it is there; then waits for it.
    __device__ __forceinline__ void look(u32 (&looked)[2]) const {
        looked[0] = looked[1] = 0;
        if (head) looked[0] = ::look(head + first);
        if (second != first) looked[1] = ::look(head + second);
    }

    __device__ __forceinline__ float wait(u32 (&looked)[2]) const {
        while (looked[0] == UNWRITTEN || looked[1] == UNWRITTEN) look(looked);
        float x = __uint_as_float(looked[0]), y = __uint_as_float(looked[1]);
        return second == first ? x : fmaf(second < first ? y : -y, angle.y, x * angle.x);
    }
};

// One of four numbers, of which every thread may want another.
DEVICE u32 of_four(const u32 (&x)[4], u32 i) {
    u32 low = i % 2 ? x[1] : x[0], high = i % 2 ? x[3] : x[2];
    return i / 2 ? high : low;
}

// Four or eight columns of values, or none. Without branches, behind which it would be waited for.
DEVICE void load_columns(uint4 &v, const u16 *from, u32 columns) {
    asm volatile("{.reg .pred four, eight;\n"
                 "setp.eq.u32 four, %5, 4;\n"
                 "setp.eq.u32 eight, %5, 8;\n"
                 "@four ld.global.v2.u32 {%0, %1}, [%4];\n"
                 "@eight ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"(columns) : "memory");
}

// Some query heads of a key head that meet a segment.
struct Meeting {
    u32 segment, kv_head, first_head;
    u32 pages[SEGMENT / PAGE_TOKENS]; // where they begin, in heads of a page

    __device__ __forceinline__ void find(const Attend &a, const Seen &seen, u32 item, const u32 *all_pages) {
        Item place(a, seen, item);
        segment = place.segment;
        kv_head = place.kv_head;
        first_head = kv_head * a.group + place.part * HEADS;
        u32 first = from(seen) / PAGE_TOKENS, last = (to(seen) - 1) / PAGE_TOKENS;
#pragma unroll
        for (u32 i = 0; i < SEGMENT / PAGE_TOKENS; i++) {
            u32 page = i >= first && i <= last ? all_pages[segment * (SEGMENT / PAGE_TOKENS) + i] : 0;
            pages[i] = page * a.kv_heads + kv_head;
        }
    }

    // Heads.
    __device__ __forceinline__ u32 count(const Attend &a) const {
        return min(HEADS, (kv_head + 1) * a.group - first_head);
    }
    // Whether they are the first ones of their key head.
    __device__ __forceinline__ bool is_first(const Attend &a) const { return first_head == kv_head * a.group; }

    // The positions of the segment that are seen.
    __device__ __forceinline__ u32 from(const Seen &seen) const {
        return max(seen.range.x, segment * SEGMENT) - segment * SEGMENT;
    }
    __device__ __forceinline__ u32 to(const Seen &seen) const {
        return min(seen.range.y, (segment + 1) * SEGMENT) - segment * SEGMENT;
    }
    __device__ __forceinline__ bool is_seen(const Seen &seen, u32 at) const {
        u32 position = segment * SEGMENT + at;
        return position >= seen.range.x && position < seen.range.y;
    }

    // Whether a position is the row's own, which is not in memory yet.
    __device__ __forceinline__ bool is_own(const Seen &seen, u32 at) const {
        return segment * SEGMENT + at == seen.range.y - 1;
    }

    // Asks for the keys that are in memory to come to shared memory: of a position, a thread asks for each
    // `step`th eight.
    __device__ __forceinline__ void ask_keys(const Attend &a, const Seen &seen, u32 token, u32 first, u32 step,
                                             u16 *keys) const {
        if (!is_seen(seen, token) || is_own(seen, token)) return;
        u32 eights = up8(a.key_dim) / 8;
        u64 page = of_four(pages, token / PAGE_TOKENS);
        const u16 *key = a.keys + (page * eights * PAGE_TOKENS + token % PAGE_TOKENS) * 8;
        for (u32 i = first; i < eights; i += step) {
            copy_async(shared_address(keys + (i * SEGMENT + token) * 8), key + i * PAGE_TOKENS * 8);
        }
    }

    // Reads a lane's columns of the values in memory of four positions; others are zero.
    __device__ __forceinline__ void ask_values(const Attend &a, const Seen &seen, u32 step, u32 column, u32 columns,
                                               uint4 (&v)[4]) const {
        u32 stride = up8(a.value_dim);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = step * STEP_POSITIONS + position_of_lane(i);
            bool is_there = is_seen(seen, at) && !is_own(seen, at) && column < stride;
            u64 page = of_four(pages, at / PAGE_TOKENS);
            v[i] = make_uint4(0, 0, 0, 0);
            const u16 *from = a.values + (page * PAGE_TOKENS + at % PAGE_TOKENS) * stride + column;
            load_columns(v[i], from, is_there ? columns : 0);
        }
    }
};

// Keeps the row's own key and value, for the block and, by one block of a key head, in their page: some
// threads an element of the key, others one of the value.
DEVICE void keep_own(const Attend &a, const Meeting &now, u32 own, u32 h, u32 i, u16 *keys, u16 *own_value) {
    bool is_key = h == 0;
    u32 dim = is_key ? a.key_dim : a.value_dim, stride = up8(dim);
    if (h > 1 || i >= stride) return;
    Element element = {};
    u32 looked[2];
    if (i < dim) element.find(a, (is_key ? a.k : a.v) + now.kv_head * dim, i, is_key);
    element.look(looked);
    u16 x = to_half(element.wait(looked));
    u32 place = own % PAGE_TOKENS;
    u64 page = of_four(now.pages, own / PAGE_TOKENS);
    if (is_key) {
        keys[(i / 8 * SEGMENT + own) * 8 + i % 8] = x;
        u64 eight = page * (stride / 8) + i / 8;
        if (now.is_first(a)) a.keys[(eight * PAGE_TOKENS + place) * 8 + i % 8] = x;
    } else {
        own_value[i] = x;
        if (now.is_first(a)) a.values[(page * PAGE_TOKENS + place) * stride + i] = x;
    }
}

// Segments of a head on their way from the blocks that make them.
struct Awaited {
    uint4 *from, *to;
    u32 pieces; // of a segment

    __device__ __forceinline__ void take(u32 base, u32 n) const {
        u32 len = n * pieces;
        uint4 *begin = from + base * pieces;
        for (u32 first = threadIdx.x; first < len; first += 4 * THREADS) {
            uint4 x[4];
            wait_for_all<false>(begin + first, THREADS, len - first, x);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 i = first + j * THREADS;
                if (i >= len) break;
                to[i] = x[j];
                begin[i] = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
            }
        }
    }

    // Whoever has seen a result may write, or join, segments of a later layer.
    __device__ __forceinline__ void finish() const { __threadfence(); }
};

// Query heads of a key head meet segments: a warp for the scores of a step, then one for its values in half
// of the columns, then a thread for a column of a head. While half of the warps make weights of scores, the
// others ask for the next segment's keys.
DEVICE void attend(u32 stage, u32 area) {
    Shared &shared = shared_memory();
    const Attend &a = shared.stages[own(stage % 2)].attend;
    Seen seen(a, shared.position);
    u32 segments = seen.segments(), items = a.blocks * segments, item = first_item();
    u32 t = own(threadIdx.x), h = t / SEGMENT, token = t % SEGMENT;
    u32 step = t / 32 % SEGMENT_STEPS, half = t / 32 / SEGMENT_STEPS;
    u32 stride = up8(a.value_dim), columns = columns_of_lane(a.value_dim);
    u32 q_row = query_row(a.key_dim), row = part_row(a.value_dim), column = column_of_lane(half, columns);
    u16 *q = (u16 *)shared.area;                 // [2, HEADS, q_row]
    u16 *weights = q + 2 * HEADS * q_row;        // [2, HEADS, WEIGHT_ROW]
    float *parts = (float *)(weights + 2 * HEADS * WEIGHT_ROW); // [SEGMENT_STEPS, HEADS, row]
    u16 *own_value = (u16 *)(parts + SEGMENT_STEPS * HEADS * row); // [stride]
    u16 *keys = own_value + stride;              // [key_stride / 8, SEGMENT, 8]
    const u32 *all_pages = shared.pages[a.table];
    Meeting now = {};
    uint4 v[4];
    // A thread's element of its query.
    Element query = {};
    u32 looked[2] = {};
    if (item < items) {
        now.find(a, seen, item, all_pages);
        now.ask_keys(a, seen, token, h, 4, keys);
        now.ask_values(a, seen, step, column, columns, v);
        if (h < now.count(a) && token < a.key_dim) query.find(a, a.q + (now.first_head + h) * a.key_dim, token, true);
        query.look(looked);
        // All of the last segment are some block's first.
        if (now.segment == seen.last) keep_own(a, now, now.to(seen) - 1, h, token, keys, own_value);
    }
    // A block without segments that joins some (as below) must not take an earlier layer's for this one's. Those
    // are gone when there are queries, which need all results of earlier layers. Who joins none must not wait:
    // nobody waits for it.
    if (item - items < a.heads && segments > 1 && t == 0) {
        while (look(a.q) == UNWRITTEN) {}
    }
#pragma unroll 1
    while (item < items) {
        Meeting next = {};
        u32 next_item = item + gridDim.x;
        if (next_item < items) next.find(a, seen, next_item, all_pages);
        if (token < q_row) put_halves(q + h * q_row + token, HEADS * q_row, query.wait(looked));
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync<THREADS>();
        u32 to = now.to(seen);
        Steps steps(now.from(seen), to);
        float2 scores;
        if (half == 0 && steps.has(step)) {
            u32 at = step * STEP_POSITIONS + t % 32 / 4;
            scores = meet_keys(keys, q, a.key_dim, step);
            scores.x = scaled(a, scores.x, now.is_seen(seen, at));
            scores.y = scaled(a, scores.y, now.is_seen(seen, at + 8));
            float most = most_of_step(scores);
            if (t % 32 < HEADS) shared.mosts[step * HEADS + t % 4] = most;
        }
        sync<THREADS>();
        if (half == 1 && next_item < items) next.ask_keys(a, seen, token, h - 2, 2, keys);
        if (half == 0 && steps.has(step)) {
            float sum = sum_of_step(weigh(scores, most_of(shared.mosts, t % HEADS, steps), step, weights));
            if (t % 32 < HEADS) shared.sums[step * HEADS + t % 4] = sum;
        }
        sync<THREADS>();
        if (steps.has(step)) {
            if (now.segment == seen.last && (to - 1) / STEP_POSITIONS == step && column < stride) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    if (step * STEP_POSITIONS + position_of_lane(i) != to - 1) continue;
                    const uint2 *from = (const uint2 *)(own_value + column);
                    v[i].x = from[0].x;
                    v[i].y = from[0].y;
                    if (columns == 4) continue;
                    v[i].z = from[1].x;
                    v[i].w = from[1].y;
                }
            }
            meet_values(v, columns, weights, step, half, parts, row);
        }
        if (next_item < items) next.ask_values(a, seen, step, column, columns, v);
        query = {};
        if (next_item < items && h < next.count(a) && token < a.key_dim) {
            query.find(a, a.q + (next.first_head + h) * a.key_dim, token, true);
        }
        query.look(looked);
        sync<THREADS>();
        if (h < now.count(a) && token < stride) {
            float value = value_of(parts, row, h, token, steps);
            float most = most_of(shared.mosts, h, steps), sum = sum_of(shared.sums, h, steps);
            if (segments == 1) {
                // As if joined with nothing: a zero loses its sign.
                finish(a, 0, now.first_head + h, token, most, sum, value + 0.0f);
            } else {
                u64 at = (u64)(now.first_head + h) * a.segments + now.segment - seen.first;
                float *out = a.partials + at * (stride + PART_EXTRA);
                publish(out + token, value);
                if (token < PART_EXTRA) publish(out + stride + token, token == 0 ? most : token == 1 ? sum : 0.0f);
            }
        }
        item = next_item;
        now = next;
    }
    if (segments == 1) return;
    u32 floats = stride + PART_EXTRA, most_parts = min(MOST_JOINED, area / (4 * floats));
    // The blocks behind those with a segment more.
    u32 head = first_item() + gridDim.x - items % gridDim.x;
    head -= head >= gridDim.x ? gridDim.x : 0;
    for (; head < a.heads; head += gridDim.x) {
        Awaited awaited = {(uint4 *)(a.partials + (u64)head * a.segments * floats), (uint4 *)shared.area, floats / 4};
        join_segments<1, THREADS, 1, MOST_JOINED>(a, 0, head, 1, segments, (float *)shared.area, most_parts, awaited);
    }
}

#endif
