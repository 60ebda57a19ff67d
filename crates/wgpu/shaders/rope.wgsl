// Rotates each head by its token's position.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

// Columns of a row and of a head; pairs that are rotated; whether pairs are neighbours.
const WIDTH: u32 = 0u;
const HEAD_DIM: u32 = 1u;
const PAIRS: u32 = 2u;
const IS_NORM: u32 = 3u;

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
    let pairs = param(PAIRS);
    let at = id.x * width + column;
    let i = column % param(HEAD_DIM);
    if i >= 2u * pairs {
        output[at] = input[at];
        return;
    }
    let pair = pair_of(i, pairs);
    let other = input[at - i + pair.other];
    output[at] = rotate(input[at], other, angles[id.x * pairs + pair.number], pair.is_second);
}
