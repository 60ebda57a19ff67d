// The compression of blocks of tokens; a thread has a column of a span. The state of a slot is
// maximum, denominator and numerator of each column, for the current block and for the next one.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

const DIM: u32 = 0u;
const RATIO: u32 = 1u;
const OVERLAPS: u32 = 2u;

struct Softmax {
    largest: f32,
    sum: f32,
    value: f32,
}

fn extended(s: Softmax, score: f32, x: f32) -> Softmax {
    let largest = max(s.largest, score);
    let keep = exp(s.largest - largest);
    let add = exp(score - largest);
    return Softmax(largest, s.sum * keep + add, s.value * keep + x * add);
}

fn load(at: u32) -> Softmax {
    return Softmax(state[at], state[at + 1u], state[at + 2u]);
}

fn keep(at: u32, s: Softmax) {
    state[at] = s.largest;
    state[at + 1u] = s.sum;
    state[at + 2u] = s.value;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let column = linear_id(id, groups) * 64u + thread;
    let dim = param(DIM);
    if column >= dim {
        return;
    }
    let overlaps = param(OVERLAPS) != 0u;
    let width = select(dim, 2u * dim, overlaps);
    let own = select(0u, dim, overlaps);
    let at = span_slot(id.x) * 3u * width + 3u * column;
    let empty = Softmax(-3.4028235e38, 0.0, 0.0);
    var current = empty;
    var next = empty;
    if span_position(id.x) > 0u {
        current = load(at);
        if overlaps {
            next = load(at + 3u * dim);
        }
    }
    for (var t = 0u; t < span_len(id.x); t++) {
        let row = span_row(id.x) + t;
        let position = span_position(id.x) + t;
        if position % param(RATIO) == 0u {
            current = empty;
            if overlaps && position > 0u {
                current = next;
            }
            next = empty;
        }
        let i = row * width + column;
        current = extended(current, scores[i + own], input[i + own]);
        if overlaps {
            next = extended(next, scores[i], input[i]);
        }
        var y = 0.0;
        if (position + 1u) % param(RATIO) == 0u {
            y = current.value / current.sum;
        }
        output[row * dim + column] = y;
    }
    keep(at, current);
    if overlaps {
        keep(at + 3u * dim, next);
    }
}
