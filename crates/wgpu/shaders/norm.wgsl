// Normalises a part of a row, or gives it the length of another row, or cuts it off.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

// Columns of a part and parts of a row; root mean square, layer norm, length of `weight`'s row or
// cutoff; the columns of weight and bias, 0 for none; epsilon or deviations.
const COLS: u32 = 0u;
const PARTS: u32 = 1u;
const KIND: u32 = 2u;
const WEIGHT_COLS: u32 = 3u;
const BIAS_COLS: u32 = 4u;
const EPS: u32 = 5u;

const RMS: u32 = 0u;
const LAYER: u32 = 1u;
const RESCALE: u32 = 2u;
const CUTOFF: u32 = 3u;

// Columns `c`, and three more of the thread, of the part that begins at `at`; zero beyond the last.
// They are read together, so that the thread waits once.
fn four(at: u32, c: u32) -> vec4<f32> {
    let last = param(COLS) - 1u;
    //@ for j 4
    let x{j} = input[at + min(c + {j}u * THREADS, last)];
    //@ end
    let columns = vec4(c) + vec4(0u, THREADS, 2u * THREADS, 3u * THREADS);
    return select(vec4<f32>(), vec4(x0, x1, x2, x3), columns <= vec4(last));
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let part = linear_id(id, groups);
    let cols = param(COLS);
    if part >= param(PARTS) {
        return;
    }
    let at = (id.z * param(PARTS) + part) * cols;
    let kind = param(KIND);
    var mean = 0.0;
    if kind == LAYER || kind == CUTOFF {
        var sum = 0.0;
        for (var c = thread; c < cols; c += 4u * THREADS) {
            let x = four(at, c);
            sum = (((sum + x.x) + x.y) + x.z) + x.w;
        }
        mean = sum_of_all(thread, sum) / f32(cols);
    }
    var square = 0.0;
    for (var c = thread; c < cols; c += 4u * THREADS) {
        let x = four(at, c);
        //@ for j 4
        if c + {j}u * THREADS < cols {
            let distance{j} = x[{j}] - mean;
            square += distance{j} * distance{j};
        }
        //@ end
    }
    square = sum_of_all(thread, square);
    if kind == CUTOFF {
        let cutoff = mean + param_f32(EPS) * sqrt(square / f32(cols - 1u));
        for (var c = thread; c < cols; c += THREADS) {
            output[at + c] = max(input[at + c] - cutoff, 0.0);
        }
        return;
    }
    var scale = 0.0;
    if kind == RESCALE {
        var like = 0.0;
        for (var c = thread; c < cols; c += THREADS) {
            let x = weight[id.z * cols + c];
            like += x * x;
        }
        scale = sqrt(sum_of_all(thread, like)) / max(sqrt(square), 1.17549435e-38);
    } else {
        scale = 1.0 / sqrt(square / f32(cols) + param_f32(EPS));
    }
    let weight_cols = select(param(WEIGHT_COLS), 0u, kind == RESCALE);
    for (var first = thread; first < cols; first += 4u * THREADS) {
        let x = four(at, first);
        //@ for j 4
        let c{j} = first + {j}u * THREADS;
        if c{j} < cols {
            var y = (x[{j}] - mean) * scale;
            if weight_cols > 0u {
                y *= weight[(part * cols + c{j}) % weight_cols];
            }
            if param(BIAS_COLS) > 0u {
                y += bias[(part * cols + c{j}) % param(BIAS_COLS)];
            }
            output[at + c{j}] = y;
        }
        //@ end
    }
}
