// The weights of hyper-connections; a thread computes a row.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> base: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

const WIDTH: u32 = 0u;
const STREAMS: u32 = 1u;
const ITERATIONS: u32 = 2u;
const EPS: u32 = 3u;

fn x_at(at: u32, i: u32, part: u32) -> f32 {
    return input[at + i] * scale[part] + base[i];
}

@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>) {
    let s = param(STREAMS);
    let at = id.x * param(WIDTH);
    let eps = param_f32(EPS);
    for (var i = 0u; i < s; i++) {
        output[at + i] = sigmoid(x_at(at, i, 0u)) + eps;
    }
    if param(WIDTH) == s {
        return;
    }
    for (var i = s; i < 2u * s; i++) {
        output[at + i] = 2.0 * sigmoid(x_at(at, i, 1u));
    }
    let m = at + 2u * s;
    for (var r = 0u; r < s; r++) {
        var largest = x_at(at, 2u * s + r * s, 2u);
        for (var c = 1u; c < s; c++) {
            largest = max(largest, x_at(at, 2u * s + r * s + c, 2u));
        }
        var sum = 0.0;
        for (var c = 0u; c < s; c++) {
            let e = exp(x_at(at, 2u * s + r * s + c, 2u) - largest);
            output[m + r * s + c] = e;
            sum += e;
        }
        for (var c = 0u; c < s; c++) {
            output[m + r * s + c] = output[m + r * s + c] / sum + eps;
        }
    }
    for (var n = 0u; n < param(ITERATIONS); n++) {
        if n > 0u {
            for (var r = 0u; r < s; r++) {
                var sum = eps;
                for (var c = 0u; c < s; c++) {
                    sum += output[m + r * s + c];
                }
                for (var c = 0u; c < s; c++) {
                    output[m + r * s + c] /= sum;
                }
            }
        }
        for (var c = 0u; c < s; c++) {
            var sum = eps;
            for (var r = 0u; r < s; r++) {
                sum += output[m + r * s + c];
            }
            for (var r = 0u; r < s; r++) {
                output[m + r * s + c] /= sum;
            }
        }
    }
}
