// The gated delta rule; a workgroup has a value head of a span, a thread some columns of its state.

@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> decay: array<f32>;
@group(0) @binding(3) var<storage, read> beta: array<f32>;
@group(0) @binding(4) var<storage, read> a: array<f32>;
@group(0) @binding(5) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> state: array<f32>;
@group(0) @binding(7) var<storage, read_write> output: array<f32>;

const KEY_HEADS: u32 = 0u;
const VALUE_HEADS: u32 = 1u;
const DIM: u32 = 2u;
const IS_CYCLIC: u32 = 3u;
const IS_CHANNELWISE: u32 = 4u;
const EPS: u32 = 5u;

const THREADS: u32 = 64u;

var<workgroup> q: array<f32, 256>;
var<workgroup> k: array<f32, 256>;
var<workgroup> decays: array<f32, 256>;

// The inverse length of the head that begins at `at`.
fn inverse_length(at: u32, dim: u32) -> f32 {
    var square = 0.0;
    for (var i = 0u; i < dim; i++) {
        square += qkv[at + i] * qkv[at + i];
    }
    return 1.0 / sqrt(square + param_f32(EPS));
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = linear_id(id, groups);
    let heads = param(VALUE_HEADS);
    if head >= heads {
        return;
    }
    let dim = param(DIM);
    let key_heads = param(KEY_HEADS);
    let key_head = select(head / (heads / key_heads), head % key_heads, param(IS_CYCLIC) != 0u);
    let is_channelwise = param(IS_CHANNELWISE) != 0u;
    let at = (span_slot(id.x) * heads + head) * dim * dim;
    if span_position(id.x) == 0u {
        for (var column = thread; column < dim; column += THREADS) {
            for (var i = 0u; i < dim; i++) {
                state[at + i * dim + column] = 0.0;
            }
        }
    }
    for (var t = 0u; t < span_len(id.x); t++) {
        let row = span_row(id.x) + t;
        let row_at = row * (2u * key_heads + heads) * dim;
        let q_at = row_at + key_head * dim;
        let k_at = q_at + key_heads * dim;
        let v_at = row_at + (2u * key_heads + head) * dim;
        let q_scale = inverse_length(q_at, dim) / sqrt(f32(dim));
        let k_scale = inverse_length(k_at, dim);
        workgroupBarrier();
        for (var i = thread; i < dim; i += THREADS) {
            q[i] = qkv[q_at + i] * q_scale;
            k[i] = qkv[k_at + i] * k_scale;
            let j = select(head, head * dim + i, is_channelwise);
            let width = select(heads, heads * dim, is_channelwise);
            decays[i] = exp(softplus(decay[row * width + j] + dt_bias[j]) * a[head]);
        }
        workgroupBarrier();
        let gate = sigmoid(beta[row * heads + head]);
        for (var column = thread; column < dim; column += THREADS) {
            var seen = 0.0;
            for (var i = 0u; i < dim; i++) {
                seen += decays[i] * state[at + i * dim + column] * k[i];
            }
            let delta = gate * (qkv[v_at + column] - seen);
            var y = 0.0;
            for (var i = 0u; i < dim; i++) {
                let s = decays[i] * state[at + i * dim + column] + k[i] * delta;
                state[at + i * dim + column] = s;
                y += s * q[i];
            }
            output[(row * heads + head) * dim + column] = y;
        }
    }
}
