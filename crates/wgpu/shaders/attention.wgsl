// Attention of one head of one row, by a workgroup: the softmax goes on from each 64 entries to the
// next, in their order, so that a row's bits do not depend on other rows.

@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> kv: array<u32>;
// The cache of blocks, if there is one.
@group(0) @binding(3) var<storage, read> blocks: array<u32>;
// The numbers of selected entries of each row, up to the first negative one.
@group(0) @binding(4) var<storage, read> selected: array<f32>;
@group(0) @binding(5) var<storage, read> sinks: array<f32>;
@group(0) @binding(6) var<storage, read_write> output: array<f32>;

const THREADS: u32 = 64u;
const NONE: u32 = 0xffffffffu;

var<workgroup> query: array<f32, 1024>;
var<workgroup> scores: array<f32, 64>;
// The words at which the values of the entries begin, NONE for entries that are not seen.
var<workgroup> values: array<u32, 64>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = linear_id(id, groups);
    let heads = param(HEADS);
    if head >= heads {
        return;
    }
    let row = id.x;
    let span = row_span(row);
    let position = row_position(row);
    let key_dim = param(KEY_DIM);
    let value_dim = param(VALUE_DIM);
    for (var i = thread; i < key_dim; i += THREADS) {
        query[i] = q[(row * heads + head) * key_dim + i];
    }
    let scale = scale_at(position);
    let range = seen(row);
    let start = range.x;
    let to = range.y;
    // Entries: these tokens, or some of them; then blocks, all complete ones or some.
    var tokens = to - start;
    var count = tokens;
    var complete = 0u;
    if has(HAS_BLOCKS) {
        complete = (position + 1u) / param(BLOCK_TOKENS);
        count = tokens + select(complete, param(TOP_K), has(SELECTS));
    } else if has(SELECTS) {
        tokens = 0u;
        count = param(TOP_K);
    }

    let kv_head = head / (heads / param(KV_HEADS));
    let key_words = kv_head_words(key_dim);
    let value_words = kv_head_words(value_dim);
    var largest = -3.4028235e38;
    var sum = 0.0;
    if has(HAS_SINKS) {
        largest = sinks[head];
        sum = 1.0;
    }
    var result = array<f32, 16>();
    for (var first = 0u; first < count; first += THREADS) {
        workgroupBarrier();
        // Each thread scores one entry.
        let i = first + thread;
        var value = NONE;
        var score = -3.4028235e38;
        var entry = start + i;
        var is_seen = i < tokens;
        if i >= tokens && i < count {
            entry = i - tokens;
            is_seen = true;
            if has(SELECTS) {
                let number = selected[row * param(TOP_K) + i - tokens];
                is_seen = number >= 0.0;
                entry = u32(max(number, 0.0));
                if has(HAS_BLOCKS) {
                    is_seen = is_seen && entry < complete;
                } else {
                    is_seen = is_seen && entry >= start && entry < to;
                }
            }
        }
        if is_seen && i >= tokens && has(HAS_BLOCKS) {
            let last = (entry + 1u) * param(BLOCK_TOKENS) - 1u;
            let page = page_of(span, param(BLOCK_WINDOW_INDEX), last);
            let cell = page * param(BLOCK_PAGE_ENTRIES) + last % 32u / param(BLOCK_TOKENS);
            let at = cell * param(KV_HEADS) + kv_head;
            score = blocks_dot(at * key_words, key_dim);
            value = param(BLOCK_VALUES_AT) + at * value_words;
        } else if is_seen {
            let page = page_of(span, param(WINDOW_INDEX), entry);
            let at = (page * param(PAGE_ENTRIES) + entry % 32u) * param(KV_HEADS) + kv_head;
            score = kv_dot(at * key_words, key_dim);
            value = param(VALUES_AT) + at * value_words;
        }
        if value != NONE {
            score *= scale;
            let cap = param_f32(SOFTCAP);
            if cap > 0.0 {
                score = cap * tanh_of(score / cap);
            }
        }
        scores[thread] = score;
        values[thread] = value;
        workgroupBarrier();
        // All threads know the softmax; each sums some columns of the values.
        let here = min(THREADS, count - first);
        var new_largest = largest;
        for (var j = 0u; j < here; j++) {
            new_largest = max(new_largest, scores[j]);
        }
        let keep = exp(largest - new_largest);
        largest = new_largest;
        sum *= keep;
        for (var d = 0u; d < 16u; d++) {
            result[d] *= keep;
        }
        for (var j = 0u; j < here; j++) {
            let at = values[j];
            if at == NONE {
                continue;
            }
            let p = exp(scores[j] - largest);
            sum += p;
            let is_block = first + j >= tokens && has(HAS_BLOCKS);
            for (var d = 0u; d < 16u; d++) {
                let column = thread + THREADS * d;
                if column >= value_dim {
                    break;
                }
                if is_block {
                    result[d] += p * blocks_element(at, column);
                } else {
                    result[d] += p * kv_element(at, column);
                }
            }
        }
    }
    for (var d = 0u; d < 16u; d++) {
        let column = thread + THREADS * d;
        if column < value_dim {
            output[(row * heads + head) * value_dim + column] = result[d] / sum;
        }
    }
}
