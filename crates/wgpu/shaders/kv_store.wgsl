// Stores the keys and values of the tokens of a step in their pages. Where that is fused, keys are
// normalised and rotated before, and queries too. A workgroup has a head of a row.

@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
@group(0) @binding(4) var<storage, read> angles: array<vec2<f32>>;
// The weights of a query's norm, then those of a key's.
@group(0) @binding(5) var<storage, read> norms: array<f32>;
@group(0) @binding(6) var<storage, read_write> rotated_q: array<f32>;
@group(0) @binding(7) var<storage, read_write> kv: array<u32>;

// Heads of queries, which may be none; heads of keys and of values; their widths, 0 where there are
// no such heads; words of a head of them.
const Q_HEADS: u32 = 0u;
const KV_HEADS: u32 = 1u;
const KEY_DIM: u32 = 2u;
const VALUE_DIM: u32 = 3u;
const KEY_WORDS: u32 = 4u;
const VALUE_WORDS: u32 = 5u;
// Where values begin; tokens of an entry, entries of a page, and the window.
const VALUES_AT: u32 = 6u;
const RATIO: u32 = 7u;
const PAGE_ENTRIES: u32 = 8u;
const WINDOW: u32 = 9u;
// Pairs that are rotated; whether pairs are neighbours; whether there are norms; their epsilons.
const PAIRS: u32 = 10u;
const IS_NORM: u32 = 11u;
const HAS_NORMS: u32 = 12u;
const Q_EPS: u32 = 13u;
const K_EPS: u32 = 14u;
// Elements of a unit that a thread stores.
const UNIT: u32 = {unit}u;

var<workgroup> loaded: array<f32, 1024>;
var<workgroup> head: array<f32, 1024>;

// As norm.wgsl does.
fn normalise(thread: u32, dim: u32, weights_at: u32, eps: f32) {
    var square = 0.0;
    for (var c = thread; c < dim; c += THREADS) {
        square += loaded[c] * loaded[c];
    }
    let scale = 1.0 / sqrt(sum_of_all(thread, square) / f32(dim) + eps);
    for (var c = thread; c < dim; c += THREADS) {
        loaded[c] = loaded[c] * scale * norms[weights_at + c];
    }
}

fn rotated(row: u32, i: u32) -> f32 {
    let pairs = param(PAIRS);
    if i >= 2u * pairs {
        return loaded[i];
    }
    let pair = pair_of(i, pairs);
    return rotate(loaded[i], loaded[pair.other], angles[row * pairs + pair.number], pair.is_second);
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = id.x;
    let kv_heads = param(KV_HEADS);
    let key_dim = param(KEY_DIM);
    let value_dim = param(VALUE_DIM);
    let first_key = param(Q_HEADS);
    let first_value = first_key + select(kv_heads, 0u, key_dim == 0u);
    let i = linear_id(id, groups);
    if i < first_value {
        let is_key = i >= first_key;
        for (var c = thread; c < key_dim; c += THREADS) {
            if is_key {
                loaded[c] = k[(row * kv_heads + i - first_key) * key_dim + c];
            } else {
                loaded[c] = q[(row * first_key + i) * key_dim + c];
            }
        }
        if param(HAS_NORMS) != 0u {
            let eps = select(param_f32(Q_EPS), param_f32(K_EPS), is_key);
            normalise(thread, key_dim, select(0u, key_dim, is_key), eps);
        }
        workgroupBarrier();
        for (var c = thread; c < key_dim; c += THREADS) {
            if is_key {
                head[c] = rotated(row, c);
            } else {
                rotated_q[(row * first_key + i) * key_dim + c] = rotated(row, c);
            }
        }
        if !is_key {
            return;
        }
    } else if i < first_value + select(kv_heads, 0u, value_dim == 0u) {
        for (var c = thread; c < value_dim; c += THREADS) {
            head[c] = v[(row * kv_heads + i - first_value) * value_dim + c];
        }
    } else {
        return;
    }
    workgroupBarrier();
    let position = row_position(row);
    if (position + 1u) % param(RATIO) != 0u {
        return;
    }
    let page = page_of(row_span(row), param(WINDOW), position);
    let entry = (page * param(PAGE_ENTRIES) + position % 32u / param(RATIO)) * kv_heads;
    var dim = key_dim;
    var to = (entry + i - first_key) * param(KEY_WORDS);
    if i >= first_value {
        dim = value_dim;
        to = param(VALUES_AT) + (entry + i - first_value) * param(VALUE_WORDS);
    }
    for (var unit = thread; unit * UNIT < dim; unit += THREADS) {
        store_unit(unit * UNIT, min(UNIT, dim - unit * UNIT), to, unit);
    }
}
