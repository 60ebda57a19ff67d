// Attention of a step of one row in the persistent kernel. Teams of half a block take segments that
// some query heads meet.
// Each head's segments are joined by one block, which waits for them as for any other numbers and makes
// them unwritten again.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

#define MOST_JOINED 96u // segments of a head that are joined at a time, at most

// Two elements of a query, key or value, which may have to be rotated together by the row's angles; the second one
// may be beyond the last.
struct Pair {
    const float *head; // or none
    u32 first, second;
    bool is_rotated;
    float2 angle;
    u32 looked[2];

    __device__ __forceinline__ void find(const Attend &a, const float *of, u32 dim, u32 i, bool may_rotate) {
        head = 2 * i < dim ? of : 0;
        is_rotated = may_rotate && i < a.pairs;
        first = is_rotated && a.is_neox ? i : 2 * i;
        second = is_rotated && a.is_neox ? i + a.pairs : 2 * i + 1;
        if (second >= dim) second = first;
        if (is_rotated) angle = a.angles[i];
        look();
    }

    // Looks whether they are there.
    __device__ __forceinline__ void look() {
        looked[0] = looked[1] = 0;
        if (!head) return;
        looked[0] = ::look(head + first);
        looked[1] = ::look(head + second);
    }

    __device__ __forceinline__ bool is_missing() const { return looked[0] == UNWRITTEN || looked[1] == UNWRITTEN; }

    // Once they are there.
    __device__ __forceinline__ float2 get() const {
        float x = __uint_as_float(looked[0]), y = second == first ? 0.0f : __uint_as_float(looked[1]);
        if (!is_rotated) return make_float2(x, y);
        return make_float2(fmaf(-y, angle.y, x * angle.x), fmaf(x, angle.y, y * angle.x));
    }
};

// Some query heads of a key head that meet a segment, and the steps of it.
struct Meeting {
    u32 segment, kv_head, first_head;

    __device__ __forceinline__ Meeting(const Attend &a, const Seen &seen, u32 item) {
        Item place(a, seen, item);
        segment = place.segment;
        kv_head = place.kv_head;
        first_head = kv_head * a.group + place.part * HEADS;
    }

    // Heads.
    __device__ __forceinline__ u32 count(const Attend &a) const {
        return min(HEADS, (kv_head + 1) * a.group - first_head);
    }
    // Whether they are the first ones of their key head.
    __device__ __forceinline__ bool is_first(const Attend &a) const { return first_head == kv_head * a.group; }

    // The positions of the segment that are seen.
    __device__ __forceinline__ Steps steps(const Seen &seen) const {
        u32 start = segment * SEGMENT;
        return Steps(max(seen.range.x, start) - start, min(seen.range.y, start + SEGMENT) - start);
    }

    // Where a step's keys and values in memory are, which the row's own are not yet.
    __device__ __forceinline__ Cells cells(const Attend &a, const Seen &seen, u32 step, const u32 *pages) const {
        u32 at = segment * SEGMENT + step * STEP_POSITIONS;
        u32 from = max(seen.range.x, at) - at, to = max(min(seen.range.y - 1, at + STEP_POSITIONS), at) - at;
        return Cells(pages, a.kv_heads, kv_head, at, from, to);
    }
};

// Keeps two elements of the row's own key, or value, for the team and, by one team of a key head, in their page.
DEVICE void keep_own(const Attend &a, const Seen &seen, const Meeting &now, const u32 *pages, bool is_key, u32 i,
                     const Pair &pair, const Room &room) {
    u32 dim = is_key ? a.key_dim : a.value_dim, at = seen.range.y - 1;
    if (2 * i >= up8(dim)) return;
    float2 x = pair.get();
    u32 places[2] = {2 * i, 2 * i + 1};
    if (pair.head) places[0] = pair.first;
    if (pair.head && pair.first != pair.second) places[1] = pair.second;
    u64 head = (u64)pages[at / PAGE_TOKENS] * a.kv_heads + now.kv_head;
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
        u16 half = to_half(j ? x.y : x.x);
        (is_key ? room.own_key : room.own_value)[places[j]] = half;
        if (!now.is_first(a)) continue;
        if (is_key) {
            put_key(a.keys, head, at % PAGE_TOKENS, dim, places[j], half);
        } else {
            put_value(a.values, head, at % PAGE_TOKENS, dim, places[j], half);
        }
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

// Waits for all of a team.
DEVICE void sync_team(u32 team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 2), "n"(TEAM) : "memory"); }

// Query heads of a key head meet segments, each of a block's two teams others: a warp a step, then a thread some
// columns of a head. Behind its step a warp asks for what it is going to meet next.
DEVICE void attend(u32 stage, u32 area) {
    Shared &shared = shared_memory();
    const Attend &a = shared.stages[own(stage % 2)].attend;
    Seen seen(a, shared.position);
    u32 segments = seen.segments(), items = a.blocks * segments;
    u32 t = own(threadIdx.x) % TEAM, team = own(threadIdx.x) / TEAM, step = t / 32;
    u32 h = t / HEAD_THREADS, in_head = t % HEAD_THREADS, stride = up8(a.value_dim);
    u32 item = first_item() + team * gridDim.x;
    Room room(a, shared.area, team);
    const u32 *pages = shared.pages[a.table];
    // A block without segments that joins some (as below) must not take an earlier layer's for this one's. Those
    // are gone when there are queries, which need all results of earlier layers. Who joins none must not wait:
    // nobody waits for it.
    if (first_item() - items < a.heads && segments > 1 && t == 0) {
        while (look(a.q) == UNWRITTEN) {}
    }
#pragma unroll 1
    for (; item < items; item += TEAMS * gridDim.x) {
        Meeting now(a, seen, item);
        Kept16 kept;
        {
            Cells cells = now.cells(a, seen, step, pages);
            kept.ask(a, cells);
            kept.ask_rest(a, cells, room.part(step, 0));
        }
        Pair query = {};
        if (h < now.count(a)) query.find(a, a.q + (now.first_head + h) * a.key_dim, a.key_dim, in_head, true);
        if (now.segment == seen.last && h < 2) {
            Pair pair = {};
            u32 dim = h == 0 ? a.key_dim : a.value_dim;
            pair.find(a, (h == 0 ? a.k : a.v) + now.kv_head * dim, dim, in_head, h == 0);
            while (pair.is_missing()) {
                pair.look();
                query.look();
            }
            keep_own(a, seen, now, pages, h == 0, in_head, pair, room);
        }
        while (query.is_missing()) query.look();
        float2 x = query.get();
        if (2 * in_head < room.q_row) {
            room.put_query(h, query.head ? query.first : 2 * in_head, x.x);
            room.put_query(h, query.head && query.first != query.second ? query.second : 2 * in_head + 1, x.y);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync_team(team);
        Steps steps = now.steps(seen);
        if (steps.has(step)) {
            u32 at = now.segment * SEGMENT + step * STEP_POSITIONS;
            if (seen.range.y <= at + STEP_POSITIONS) kept.take_own(a, seen.range.y - 1 - at, room, room.part(step, 0));
            meet(a, kept, step, max(seen.range.x, at) - at, min(seen.range.y - at, STEP_POSITIONS), room);
        }
        sync_team(team);
        Joined joined(room, h, steps);
        u64 at = (u64)(now.first_head + h) * a.segments + now.segment - seen.first;
        float *out = a.partials + at * (stride + PART_EXTRA);
#pragma unroll 1
        for (u32 column = in_head; column < room.columns; column += HEAD_THREADS) {
            float value = joined.value(room, h, column, steps);
            if (h >= now.count(a) || column >= stride) continue;
            if (segments == 1) {
                // As if joined with nothing: a zero loses its sign.
                finish(a, 0, now.first_head + h, column, joined.most, joined.sum, value + 0.0f);
            } else {
                publish(out + column, value);
            }
        }
        if (segments > 1 && h < now.count(a) && in_head < PART_EXTRA) {
            publish(out + stride + in_head, in_head == 0 ? joined.most : in_head == 1 ? joined.sum : 0.0f);
        }
        sync_team(team);
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
