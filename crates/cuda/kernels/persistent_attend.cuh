// Attention of a step of one row in the persistent kernel. Teams of half a block take segments that some query
// heads meet; the keys and values of a segment come through the slots that weights come through. Each head's segments
// are joined by one block, which waits for them as for any other numbers and makes them unwritten again.
#pragma once
#include "persistent.cuh"

#if __CUDA_ARCH__ >= 900

#define MOST_JOINED 96u // segments of a head that are joined at a time, at most

// The places of two elements of a query or key, and how they have to be rotated together.
struct Rotation {
    u32 first, second;
    bool is_rotated;
    float2 angle;

    __device__ __forceinline__ Rotation(const Attend &a, u32 i) : is_rotated(i < a.rotary_pairs), angle() {
        bool are_apart = is_rotated && a.is_neox;
        first = are_apart ? i : 2 * i;
        second = are_apart ? i + a.rotary_pairs : 2 * i + 1;
        if (is_rotated) angle = a.cos_sin[i];
    }

    __device__ __forceinline__ float2 operator()(const float2 &x) const {
        if (!is_rotated) return x;
        return make_float2(fmaf(-x.y, angle.y, x.x * angle.x), fmaf(x.x, angle.y, x.y * angle.x));
    }
};

// Two elements of a head that are waited for together; those beyond the last one are zero.
struct Pair {
    const float *at; // the first one, or none
    u32 apart;       // the second one from there, or 0
    u32 looked[2];

    __device__ __forceinline__ Pair(const float *head, u32 dim, u32 first, u32 second)
        : at(head && first < dim ? head + first : 0), apart(second < dim ? second - first : 0) {
        look();
    }

    // Looks whether they are there.
    __device__ __forceinline__ void look() {
        looked[0] = looked[1] = 0;
        if (!at) return;
        looked[0] = ::look(at);
        if (apart) looked[1] = ::look(at + apart);
    }

    __device__ __forceinline__ bool is_missing() const { return looked[0] == UNWRITTEN || looked[1] == UNWRITTEN; }

    // Once they are there.
    __device__ __forceinline__ float2 get() const {
        return make_float2(__uint_as_float(looked[0]), __uint_as_float(looked[1]));
    }
};

// What a team meets of a segment, and a warp of its step, in one register.
struct Extent {
    u32 bits;

    // Of the segment, the steps that are seen; of the step, the places that are, and the row's own one, or none.
    __device__ __forceinline__ Extent(const Seen &seen, u32 segment, u32 step) {
        u32 at = segment * SEGMENT + step * STEP_POSITIONS;
        Steps steps = seen.steps(segment);
        u32 from = min(max(seen.range.x, at) - at, STEP_POSITIONS);
        u32 to = min(max(seen.range.y, at) - at, STEP_POSITIONS), own_place = min(seen.range.y - 1 - at, 31);
        bits = steps.first | steps.end << 4 | from << 8 | to << 13 | own_place << 18;
    }

    __device__ __forceinline__ Steps steps() const { return {bits & 15, bits >> 4 & 15}; }
    __device__ __forceinline__ u32 from() const { return bits >> 8 & 31; }
    __device__ __forceinline__ u32 to() const { return bits >> 13 & 31; }
    __device__ __forceinline__ bool has_own() const { return own_place() < STEP_POSITIONS; }
    __device__ __forceinline__ u32 own_place() const { return bits >> 18; }
};

// Segments of a head on their way from the blocks that make them.
struct Awaited {
    uint4 *from, *to;
    u32 pieces; // of a segment

    __device__ __forceinline__ void take(u32 base, u32 n) const {
        u32 len = n * pieces;
        for (u32 first = threadIdx.x; first < len; first += 4 * THREADS) {
            uint4 x[4];
            wait_for_all<false>(from + base * pieces + first, THREADS, len - first, x);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 i = first + j * THREADS;
                if (i < len) to[i] = x[j];
            }
        }
    }

    // Makes them unwritten again, by some threads.
    __device__ __forceinline__ void clear(u32 base, u32 n, u32 thread, u32 threads) const {
        uint4 none = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
        for (u32 i = base * pieces + thread; i < (base + n) * pieces; i += threads) from[i] = none;
    }

    // Whoever has seen a result may write, or join, segments of a later layer.
    __device__ __forceinline__ void finish() const { __threadfence(); }
};

// A team's room.
DEVICE Room &room_of_team() { return ((Room *)shared_memory().area)[own(threadIdx.x) / TEAM]; }

// Takes queries, and the row's own key and value where they are needed, to a team's room once they are there. The
// first two heads' threads look for the latter ones, too.
DEVICE void gather(const Attend &a, const Item &now) {
    u32 t = own(threadIdx.x) % TEAM, h = t / HEAD_THREADS, i = t % HEAD_THREADS, position = shared_memory().position;
    Rotation rotation(a, i);
    const float *head = h < now.head_count(a) ? a.q + (now.first_head(a) + h) * a.key_dim : 0;
    Pair query(head, a.key_dim, rotation.first, rotation.second);
    if (now.segment == position / SEGMENT && h < 2) {
        u32 dim = h == 0 ? a.key_dim : a.value_dim;
        u32 first = h == 0 ? rotation.first : 2 * i, second = h == 0 ? rotation.second : 2 * i + 1;
        Pair pair((h == 0 ? a.k : a.v) + now.kv_head * dim, dim, first, second);
        while (pair.is_missing()) {
            pair.look();
            query.look();
        }
        float2 x = pair.get();
        if (h == 0) x = rotation(x);
        u16 *own = h == 0 ? room_of_team().own_key : room_of_team().own_value;
        own[first] = to_half(x.x);
        own[second] = to_half(x.y);
    }
    while (query.is_missing()) query.look();
    float2 x = rotation(query.get());
    Room &room = room_of_team();
    room.put_query(h, rotation.first, x.x);
    room.put_query(h, rotation.second, x.y);
}

// Keeps the row's own key and value in their page: a thread eight elements.
DEVICE void keep_own(const Attend &a, const Item &now) {
    u32 position = shared_memory().position, t = own(threadIdx.x) % TEAM, i = t % HEAD_THREADS;
    bool is_key = t < HEAD_THREADS;
    u32 eights = up8(is_key ? a.key_dim : a.value_dim) / 8, token = position % PAGE_TOKENS;
    // By one team of a key head.
    if (now.segment != position / SEGMENT || now.block > 0 || t >= 2 * HEAD_THREADS || i >= eights) return;
    u64 head = (u64)shared_memory().pages[a.page_table][position / PAGE_TOKENS] * a.kv_heads + now.kv_head;
    const Room &room = room_of_team();
    if (is_key) {
        *(uint4 *)(a.keys + key_at(head, token, a.key_dim, 8 * i)) = ((const uint4 *)room.own_key)[i];
    } else {
        *(uint4 *)(a.values + value_at(head, token, a.value_dim, 8 * i)) = ((const uint4 *)room.own_value)[i];
    }
}

// Segments that the row sees, found anew each time, as there are no registers to keep them in.
DEVICE u32 segments_of(const Attend &a) { return Seen(a, shared_memory().position).segments(); }

// Tells what a team has made of a segment.
DEVICE void tell(const Attend &a, const Item &now) {
    u32 t = own(threadIdx.x) % TEAM, h = t / HEAD_THREADS, i = t % HEAD_THREADS, stride = up8(a.value_dim);
    u32 head = now.first_head(a) + h;
    bool is_alone = segments_of(a) == 1, is_head = h < now.head_count(a);
    Results results(a, 0, head);
    Joined joined(room_of_team(), h, i, a.value_dim);
    if (!is_head) return;
    if (is_alone) {
        // As if joined with nothing: a zero loses its sign.
        float factor = results.factor(joined.most, joined.sum);
#pragma unroll
        for (u32 k = 0; k < MOST_ITEMS; k++) results.put(i + k * HEAD_THREADS, (joined.values[k] + 0.0f) * factor);
        return;
    }
    u64 at = (u64)head * a.max_splits + now.segment - Seen(a, shared_memory().position).first;
    float *out = a.partials + at * (stride + PART_EXTRA);
#pragma unroll
    for (u32 k = 0; k < MOST_ITEMS; k++) {
        u32 column = i + k * HEAD_THREADS;
        if (column < stride) publish(out + column, joined.values[k]);
    }
    if (i < PART_EXTRA) publish(out + stride + i, i == 0 ? joined.most : i == 1 ? joined.sum : 0.0f);
}

// Slots that have a step's keys, or its values.
DEVICE u32 slots_of(u32 dim) { return dim > SLICE_DIM ? 2 : 1; }
static_assert(SLICE_BYTES <= SLOT, "a slice has a slot");

// Waits for the next ones.
DEVICE Slices take_slices(Shared &shared, Ring &ring, u32 dim) {
    const uint4 *first = (const uint4 *)ring.take(shared);
    return {{first, slots_of(dim) > 1 ? (const uint4 *)ring.take(shared) : first}};
}

// Query heads of a key head meet segments, each of a block's two teams others: a warp a step, whose keys and values
// are in its slots, then a thread some columns of a head. Gives the slots that the warp has then taken.
DEVICE u32 attend(u32 stage, u32 taken, u32 area) {
    Shared &shared = shared_memory();
    const Attend &a = shared.stages[own(stage % 2)].attention;
    u32 items = a.head_blocks * segments_of(a);
    // A block without segments that joins some (as below) must not take an earlier layer's for this one's. Those
    // are gone when there are queries, which need all results of earlier layers. Who joins none must not wait:
    // nobody waits for it.
    if (first_item() - items < a.heads && items > a.head_blocks && own(threadIdx.x) == 0) {
        while (look(a.q) == UNWRITTEN) {}
    }
    u32 t = own(threadIdx.x), team = t / TEAM, step = t / 32 % SEGMENT_STEPS;
    Ring ring = {t / 32, t % 32, taken};
#pragma unroll 1
    for (u32 item = first_item() + team * gridDim.x; item < a.head_blocks * segments_of(a); item += TEAMS * gridDim.x) {
        Seen seen(a, shared.position);
        Item now(a, seen, item);
        Extent extent(seen, now.segment, step);
        Room &room = room_of_team();
        Keys16 keys = {};
        // As `fetch_kept` asks for them.
        if (extent.steps().has(step)) {
            keys.load<false>(take_slices(shared, ring, a.key_dim), a.key_dim);
            ring.release(shared, slots_of(a.key_dim));
        }
        gather(a, now);
        team_sync(team, SEGMENT_STEPS);
        if (extent.steps().has(step)) {
            if (extent.has_own()) keys.take_own(extent.own_place(), room);
            float scores[4];
            keys.scores(a.key_dim, room, scores);
            Slices slices = take_slices(shared, ring, a.value_dim);
            Values16 values;
            values.load<false>(slices, 0, a.value_dim);
            Fragment weights = weigh(a, scores, step, extent.from(), extent.to(), room);
            float *out = room.parts[step][t / 4 % HEADS];
            if (extent.has_own()) values.take_own(extent.own_place(), 0, room);
            values.sum(weights, 0, out);
            if (a.value_dim > SLICE_DIM) {
                values.load<false>(slices, 1, a.value_dim);
                if (extent.has_own()) values.take_own(extent.own_place(), 1, room);
                values.sum(weights, 1, out);
            }
            ring.release(shared, slots_of(a.value_dim));
        } else {
            room.skip(step);
        }
        team_sync(team, SEGMENT_STEPS);
        tell(a, now);
        keep_own(a, now);
        team_sync(team, SEGMENT_STEPS);
    }
    u32 segments = segments_of(a);
    if (segments == 1) return ring.taken;
    u32 floats = up8(a.value_dim) + PART_EXTRA, most_parts = min(MOST_JOINED, area / (4 * floats));
    // The blocks behind those with a segment more.
    u32 head = first_item() + gridDim.x - a.head_blocks * segments % gridDim.x;
    head -= head >= gridDim.x ? gridDim.x : 0;
    for (; head < a.heads; head += gridDim.x) {
        Awaited awaited = {(uint4 *)(a.partials + (u64)head * a.max_splits * floats), (uint4 *)shared.area, floats / 4};
        join_segments<1, THREADS, 1, MOST_JOINED>(a, 0, head, 1, segments, (float *)shared.area, most_parts, awaited);
    }
    return ring.taken;
}

#endif
