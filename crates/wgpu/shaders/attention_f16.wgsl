// Attention of a head of a row over one of its splits, or over all entries if there are no splits,
// by a workgroup: keys and values are halves, eight in four words, and entries are tokens. The
// softmax goes on from each 64 entries to the next.

@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> kv: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> sinks: array<f32>;
// The results, or for each split its maximum, its sum and its part of the result.
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

const THREADS: u32 = 128u;
const BLOCK: u32 = 64u;
const NONE: u32 = 0xffffffffu;
const LEAST: f32 = -3.4028235e38;

var<workgroup> query: array<vec4<f32>, 64>;
// Where the entries of a block are in the cache, NONE for those behind the last.
var<workgroup> cells: array<u32, 64>;
// Of each entry, eight parts of its score.
var<workgroup> dots: array<f32, 576>;
var<workgroup> scores: array<vec4<f32>, 16>;
var<workgroup> results: array<vec4<f32>, 256>;
var<workgroup> sums: array<f32, 128>;

fn low(x: vec4<u32>) -> vec4<f32> {
    return vec4(unpack2x16float(x.x), unpack2x16float(x.y));
}

fn high(x: vec4<u32>) -> vec4<f32> {
    return vec4(unpack2x16float(x.z), unpack2x16float(x.w));
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let heads = param(HEADS);
    let splits = param(SPLITS);
    let i = linear_id(id, groups);
    let head = i / splits;
    let split = i % splits;
    let row = batch[batch[LISTS + 4u * param(LIST)] + 2u * id.x];
    let span = row_span(row);
    let range = seen(row);
    let len = split_len(range.y - range.x);
    let start = range.x + split * len;
    let to = min(range.y, start + len);
    if head >= heads || (start >= to && split > 0u) {
        return;
    }
    // In vectors of eight halves.
    let key_words = param(KEY_DIM) / 8u;
    let value_words = param(VALUE_DIM) / 8u;
    for (var c = thread; c < 2u * key_words; c += THREADS) {
        query[c] = q[(row * heads + head) * 2u * key_words + c];
    }
    let scale = scale_at(row_position(row));
    let cap = param_f32(SOFTCAP);
    let kv_head = head / (heads / param(KV_HEADS));
    let values_at = param(VALUES_AT) / 4u;
    // Teams of threads have the columns of a value, and take turns with the entries.
    let teams = THREADS / value_words;
    let team = thread / value_words;
    let column = thread % value_words;
    var largest = LEAST;
    var sum = 0.0;
    if splits == 1u && has(HAS_SINKS) {
        largest = sinks[head];
        sum = select(0.0, 1.0, team == 0u);
    }
    var result_low = vec4<f32>();
    var result_high = vec4<f32>();
    for (var first = start; first < to; first += BLOCK) {
        workgroupBarrier();
        if thread < BLOCK {
            var cell = NONE;
            let entry = first + thread;
            if entry < to {
                let page = page_of(span, param(WINDOW_INDEX), entry);
                cell = (page * param(PAGE_ENTRIES) + entry % 32u) * param(KV_HEADS) + kv_head;
            }
            cells[thread] = cell;
        }
        workgroupBarrier();
        // Eight threads have an entry; each has a column of four of them, read together. Those
        // that are not seen read the first entry, which is.
        let lane = thread % 8u;
        //@ for j 4
        let entry{j} = {j}u * 16u + thread / 8u;
        let key{j} = select(cells[entry{j}], cells[0], cells[entry{j}] == NONE) * key_words;
        var dot{j} = vec4<f32>();
        //@ end
        for (var c = lane; c < key_words; c += 8u) {
            let q_low = query[2u * c];
            let q_high = query[2u * c + 1u];
            //@ for j 4
            let k{j} = kv[key{j} + c];
            //@ end
            //@ for j 4
            dot{j} = fma(high(k{j}), q_high, fma(low(k{j}), q_low, dot{j}));
            //@ end
        }
        //@ for j 4
        dots[9u * entry{j} + lane] = (dot{j}.x + dot{j}.y) + (dot{j}.z + dot{j}.w);
        //@ end
        workgroupBarrier();
        if thread < BLOCK {
            var score = LEAST;
            if cells[thread] != NONE {
                score = 0.0;
                for (var j = 0u; j < 8u; j++) {
                    score += dots[9u * thread + j];
                }
                score *= scale;
                if cap > 0.0 {
                    score = cap * tanh_of(score / cap);
                }
            }
            scores[thread / 4u][thread % 4u] = score;
        }
        workgroupBarrier();
        var most = scores[0];
        for (var j = 1u; j < 16u; j++) {
            most = max(most, scores[j]);
        }
        let new_largest = max(largest, max(max(most.x, most.y), max(most.z, most.w)));
        let keep = exp(largest - new_largest);
        largest = new_largest;
        sum *= keep;
        result_low *= keep;
        result_high *= keep;
        if team < teams {
            for (var e = team; e < BLOCK; e += 4u * teams) {
                //@ for j 4
                let place{j} = min(e + {j}u * teams, BLOCK - 1u);
                let is_seen{j} = e + {j}u * teams < BLOCK && cells[place{j}] != NONE;
                let cell{j} = select(cells[0], cells[place{j}], is_seen{j});
                let v{j} = kv[values_at + cell{j} * value_words + column];
                //@ end
                //@ for j 4
                if is_seen{j} {
                    let p = exp(scores[place{j} / 4u][place{j} % 4u] - largest);
                    sum += p;
                    result_low = fma(vec4(p), low(v{j}), result_low);
                    result_high = fma(vec4(p), high(v{j}), result_high);
                }
                //@ end
            }
        }
    }
    results[2u * thread] = result_low;
    results[2u * thread + 1u] = result_high;
    sums[thread] = sum;
    workgroupBarrier();
    var total = 0.0;
    for (var t = 0u; t < teams; t++) {
        total += sums[t * value_words];
    }
    // Vectors of four columns.
    let width = 2u * value_words;
    for (var c = thread; c < width; c += THREADS) {
        var y = vec4<f32>();
        for (var t = 0u; t < teams; t++) {
            y += results[t * width + c];
        }
        if splits == 1u {
            y /= total;
            let at = (row * heads + head) * 4u * width + 4u * c;
            output[at] = y.x;
            output[at + 1u] = y.y;
            output[at + 2u] = y.z;
            output[at + 3u] = y.w;
        } else {
            let at = ((id.x * heads + head) * splits + split) * (4u * width + 2u) + 2u + 4u * c;
            output[at] = y.x;
            output[at + 1u] = y.y;
            output[at + 2u] = y.z;
            output[at + 3u] = y.w;
        }
    }
    if splits > 1u && thread == 0u {
        let at = ((id.x * heads + head) * splits + split) * (4u * width + 2u);
        output[at] = largest;
        output[at + 1u] = total;
    }
}
