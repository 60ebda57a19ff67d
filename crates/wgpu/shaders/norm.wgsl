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

// Columns that are read together, eight by each thread, so that it waits once. Instead of one behind
// the last, the last is read.
const STEP: u32 = 8u * THREADS;

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
    let at = (id.x * param(PARTS) + part) * cols;
    let kind = param(KIND);
    var mean = 0.0;
    if kind == LAYER || kind == CUTOFF {
        var sum = 0.0;
        for (var first = thread; first < cols; first += STEP) {
            //@ for j 8
            let x{j} = input[at + min(first + {j}u * THREADS, cols - 1u)];
            //@ end
            //@ for j 8
            sum += select(0.0, x{j}, first + {j}u * THREADS < cols);
            //@ end
        }
        mean = sum_of_all(thread, sum) / f32(cols);
    }
    var square = 0.0;
    for (var first = thread; first < cols; first += STEP) {
        //@ for j 8
        let x{j} = input[at + min(first + {j}u * THREADS, cols - 1u)];
        //@ end
        //@ for j 8
        let distance{j} = select(0.0, x{j} - mean, first + {j}u * THREADS < cols);
        square += distance{j} * distance{j};
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
            let x = weight[id.x * cols + c];
            like += x * x;
        }
        scale = sqrt(sum_of_all(thread, like)) / max(sqrt(square), 1.17549435e-38);
    } else {
        scale = 1.0 / sqrt(square / f32(cols) + param_f32(EPS));
    }
    let bias_cols = param(BIAS_COLS);
    let weight_cols = select(param(WEIGHT_COLS), 0u, kind == RESCALE);
    // Both have the columns of one part, or of all parts.
    let weight_at = part * cols % max(weight_cols, 1u);
    let bias_at = part * cols % max(bias_cols, 1u);
    for (var base = 0u; base < cols; base += STEP) {
        let first = base + thread;
        //@ for j 8
        let c{j} = first + {j}u * THREADS;
        let read{j} = min(c{j}, cols - 1u);
        let x{j} = input[at + read{j}];
        let weight{j} = weight[select(0u, weight_at + read{j}, weight_cols > 0u)];
        let bias{j} = bias[select(0u, bias_at + read{j}, bias_cols > 0u)];
        //@ end
        //@ for j 8
        var y{j} = (x{j} - mean) * scale * select(1.0, weight{j}, weight_cols > 0u);
        y{j} += select(0.0, bias{j}, bias_cols > 0u);
        if c{j} < cols {
            output[at + c{j}] = y{j};
        }
        //@ end
        //@ for b AS_BYTES
        //@ for j 8
        stage_column({j}u * THREADS + thread, select(0.0, y{j}, c{j} < cols));
        //@ end
        workgroupBarrier();
        store_chunk(id.x, base, thread);
        workgroupBarrier();
        //@ end
    }
}
