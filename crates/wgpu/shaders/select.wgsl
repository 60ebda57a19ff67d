// Selects the cached entries with the highest scores of each row, whose keys are in single
// precision. A workgroup has a row: it scores all entries, finds the score of the last that is
// selected bit by bit, then writes the numbers in order.

@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<f32>;
@group(0) @binding(3) var<storage, read> kv: array<u32>;
@group(0) @binding(4) var<storage, read_write> keys_of_scores: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

const HEADS: u32 = 0u;
const DIM: u32 = 1u;
const TOP_K: u32 = 2u;
const RATIO: u32 = 3u;
const PAGE_ENTRIES: u32 = 4u;
const WINDOW_INDEX: u32 = 5u;
// Scores of a row of the scratch memory.
const SCRATCH_WIDTH: u32 = 6u;

const THREADS: u32 = 64u;

var<workgroup> sums: array<u32, 64>;

fn sum_of_all(thread: u32, value: u32) -> u32 {
    sums[thread] = value;
    workgroupBarrier();
    var sum = 0u;
    for (var i = 0u; i < THREADS; i++) {
        sum += sums[i];
    }
    workgroupBarrier();
    return sum;
}

// The sum over the threads before this one.
fn sum_before(thread: u32, value: u32) -> u32 {
    sums[thread] = value;
    workgroupBarrier();
    var sum = 0u;
    for (var i = 0u; i < thread; i++) {
        sum += sums[i];
    }
    workgroupBarrier();
    return sum;
}

// A number that orders as the float does.
fn ordered(x: f32) -> u32 {
    // Both zeros are the same.
    let bits = select(bitcast<u32>(x), 0u, x == 0.0);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = id.x;
    let span = row_span(row);
    let ratio = param(RATIO);
    let heads = param(HEADS);
    let dim = param(DIM);
    let top_k = param(TOP_K);
    let entries = (row_position(row) + 1u) / ratio;
    let at = row * param(SCRATCH_WIDTH);
    for (var e = thread; e < entries; e += THREADS) {
        let last = (e + 1u) * ratio - 1u;
        let page = page_of(span, param(WINDOW_INDEX), last);
        let key = (page * param(PAGE_ENTRIES) + last % 32u / ratio) * dim;
        var score = 0.0;
        for (var h = 0u; h < heads; h++) {
            var product = 0.0;
            for (var i = 0u; i < dim; i++) {
                product += q[(row * heads + h) * dim + i] * bitcast<f32>(kv[key + i]);
            }
            score += weights[row * heads + h] * max(product, 0.0);
        }
        keys_of_scores[at + e] = ordered(score);
    }
    storageBarrier();
    // The largest number that at least top_k scores reach.
    var least = 0u;
    if entries > top_k {
        for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
            var count = 0u;
            for (var e = thread; e < entries; e += THREADS) {
                count += u32(keys_of_scores[at + e] >= (least | bit));
            }
            if sum_of_all(thread, count) >= top_k {
                least |= bit;
            }
        }
    }
    // Each thread has consecutive entries. Of those that reach the number exactly, the first are
    // selected.
    let share = (entries + THREADS - 1u) / THREADS;
    let start = min(thread * share, entries);
    let to = min(start + share, entries);
    var above = 0u;
    var equal = 0u;
    for (var e = start; e < to; e++) {
        above += u32(keys_of_scores[at + e] > least);
        equal += u32(keys_of_scores[at + e] == least);
    }
    let room = select(top_k - min(sum_of_all(thread, above), top_k), entries, entries <= top_k);
    let equal_before = sum_before(thread, equal);
    let above_before = sum_before(thread, above);
    var equals = equal_before;
    var place = above_before + min(equal_before, room);
    for (var e = start; e < to; e++) {
        let score = keys_of_scores[at + e];
        if score > least || (score == least && equals < room) {
            output[row * top_k + place] = f32(e);
            place++;
        }
        equals += u32(score == least);
    }
    for (var i = min(entries, top_k) + thread; i < top_k; i += THREADS) {
        output[row * top_k + i] = -1.0;
    }
}
