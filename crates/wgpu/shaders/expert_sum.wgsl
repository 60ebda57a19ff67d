// Sums the results of a token's experts, each times the expert's weight, and maybe adds a residual.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> route: array<f32>;
@group(0) @binding(3) var<storage, read> addend: array<f32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

// Columns of a result row, experts of a token, and whether something is added.
const WIDTH: u32 = 0u;
const USED: u32 = 1u;
const HAS_ADDEND: u32 = 2u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let column = linear_id(id, groups) * 64u + thread;
    let width = param(WIDTH);
    let used = param(USED);
    if column >= width {
        return;
    }
    var y = 0.0;
    for (var i = 0u; i < used; i++) {
        y += input[(id.x * used + i) * width + column] * route[id.x * 2u * used + i];
    }
    if param(HAS_ADDEND) != 0u {
        y += addend[id.x * width + column];
    }
    output[id.x * width + column] = y;
}
