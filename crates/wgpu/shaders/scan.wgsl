// The scan of a state-space layer; a thread has an element of x of a span, with its row of the
// state. The state of a slot is `[state, heads * head_dim]`.

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read> c: array<f32>;
@group(0) @binding(4) var<storage, read> dt: array<f32>;
// `a`, then `d`, then the bias of dt.
@group(0) @binding(5) var<storage, read> weights: array<f32>;
@group(0) @binding(6) var<storage, read_write> state: array<f32>;
@group(0) @binding(7) var<storage, read_write> output: array<f32>;

const HEADS: u32 = 0u;
const HEAD_DIM: u32 = 1u;
const GROUPS: u32 = 2u;
const STATE: u32 = 3u;
const IS_CHANNELWISE: u32 = 4u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = linear_id(id, groups) * 64u + thread;
    let width = param(HEADS) * param(HEAD_DIM);
    if i >= width {
        return;
    }
    let n = param(STATE);
    let head = i / param(HEAD_DIM);
    let group = head / (param(HEADS) / param(GROUPS));
    let is_channelwise = param(IS_CHANNELWISE) != 0u;
    let j = select(head, i, is_channelwise);
    let dt_width = select(param(HEADS), width, is_channelwise);
    let a_len = select(dt_width, dt_width * n, is_channelwise);
    let d = weights[a_len + j];
    let dt_bias = weights[a_len + dt_width + j];
    let at = span_slot(id.x) * n * width + i;
    if span_position(id.x) == 0u {
        for (var k = 0u; k < n; k++) {
            state[at + k * width] = 0.0;
        }
    }
    for (var t = 0u; t < span_len(id.x); t++) {
        let row = span_row(id.x) + t;
        let bc_at = (row * param(GROUPS) + group) * n;
        let value = x[row * width + i];
        let step_size = softplus(dt[row * dt_width + j] + dt_bias);
        var decay = exp(step_size * weights[j]);
        var y = d * value;
        for (var k = 0u; k < n; k++) {
            if is_channelwise {
                decay = exp(step_size * weights[j * n + k]);
            }
            let h = decay * state[at + k * width] + step_size * value * b[bc_at + k];
            state[at + k * width] = h;
            y += h * c[bc_at + k];
        }
        output[row * width + i] = y;
    }
}
