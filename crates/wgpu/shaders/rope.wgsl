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
    let at = id.z * width + column;
    let i = column % param(HEAD_DIM);
    if i >= 2u * pairs {
        output[at] = input[at];
        return;
    }
    // Cosine and sine of the pair, whose first element turns one way and whose second the other.
    var pair = i % pairs;
    var is_second = i >= pairs;
    var other = select(at + pairs, at - pairs, is_second);
    if param(IS_NORM) != 0u {
        pair = i / 2u;
        is_second = (i & 1u) == 1u;
        other = select(at + 1u, at - 1u, is_second);
    }
    let angle = angles[id.z * pairs + pair];
    let x = input[at];
    let y = input[other];
    output[at] = x * angle.x + select(-y, y, is_second) * angle.y;
}
