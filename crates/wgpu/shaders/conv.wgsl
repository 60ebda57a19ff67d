// A causal convolution of each column along its sequence; a thread has a column of a span.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

const WIDTH: u32 = 0u;
const KERNEL: u32 = 1u;
const HAS_BIAS: u32 = 2u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let column = linear_id(id, groups) * 64u + thread;
    let width = param(WIDTH);
    if column >= width {
        return;
    }
    let before = param(KERNEL) - 1u;
    let first = span_row(id.x);
    let len = span_len(id.x);
    let state_at = span_slot(id.x) * before * width + column;
    let is_new = span_position(id.x) == 0u;
    var y = 0.0;
    for (var row = 0u; row < len; row++) {
        y = 0.0;
        for (var tap = 0u; tap <= before; tap++) {
            let i = row + tap;
            var x = 0.0;
            if i >= before {
                x = input[(first + i - before) * width + column];
            } else if !is_new {
                x = state[state_at + i * width];
            }
            y += x * weight[column * (before + 1u) + tap];
        }
        if param(HAS_BIAS) != 0u {
            y += bias[column];
        }
        output[(first + row) * width + column] = y;
    }
    // The last inputs, of which some may be the state's own, further back.
    for (var s = 0u; s < before; s++) {
        let i = len + s;
        var x = 0.0;
        if i >= before {
            x = input[(first + i - before) * width + column];
        } else if !is_new {
            x = state[state_at + i * width];
        }
        state[state_at + s * width] = x;
    }
}
