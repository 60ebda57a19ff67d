// Operations that compute each element of a row alone.

@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

// The operation, columns of a result row, of `a` and of `b`, and what the operation has beside.
const OP: u32 = 0u;
const WIDTH: u32 = 1u;
const A_WIDTH: u32 = 2u;
const B_WIDTH: u32 = 3u;
const FIRST: u32 = 4u;
const SECOND: u32 = 5u;
const THIRD: u32 = 6u;

// Numbered as `Elementwise` in program.rs.
const ACT: u32 = 0u;
const GLU: u32 = 1u;
const ADD: u32 = 2u;
const SCALE: u32 = 3u;
const SCALE_BY: u32 = 4u;
const SOFTCAP: u32 = 5u;
const CLAMP: u32 = 6u;
const SLICE: u32 = 7u;
const CONCAT: u32 = 8u;
const MIX: u32 = 9u;
const SCALE_EXPERTS: u32 = 10u;

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
    let row = id.x;
    let a_at = row * param(A_WIDTH);
    let b_at = row * param(B_WIDTH);
    var y = 0.0;
    switch param(OP) {
        case ACT: { y = activate(param(FIRST), a[a_at + column], SECOND); }
        case GLU: {
            // One gate for each element, or for each of equal parts of a row.
            let gate = a[a_at + column / (width / param(A_WIDTH))];
            let up = b[b_at + column];
            y = glu(param(FIRST), gate, up, SECOND);
        }
        case ADD: { y = a[a_at + column] + b[b_at + column]; }
        case SCALE: { y = a[a_at + column] * param_f32(FIRST); }
        case SCALE_BY: { y = a[a_at + column] * b[column % param(FIRST)]; }
        case SOFTCAP: { y = tanh_of(a[a_at + column] / param_f32(FIRST)) * param_f32(FIRST); }
        case CLAMP: { y = min(max(a[a_at + column], param_f32(FIRST)), param_f32(SECOND)); }
        case SLICE: {
            // Columns FIRST to FIRST + THIRD of each part of SECOND columns.
            let part = column / param(THIRD);
            y = a[a_at + part * param(SECOND) + param(FIRST) + column % param(THIRD)];
        }
        case CONCAT: {
            // Parts of FIRST columns of `a` and SECOND of `b`, which all parts may share.
            let part_width = param(FIRST) + param(SECOND);
            let part = column / part_width;
            let i = column % part_width;
            if i < param(FIRST) {
                y = a[a_at + part * param(FIRST) + i];
            } else {
                y = b[b_at + part * param(SECOND) % param(B_WIDTH) + i - param(FIRST)];
            }
        }
        case MIX: {
            // SECOND parts of FIRST columns to THIRD results.
            let result = column / param(FIRST);
            for (var i = 0u; i < param(SECOND); i++) {
                let x = a[a_at + i * param(FIRST) + column % param(FIRST)];
                y += b[b_at + i * param(THIRD) + result] * x;
            }
        }
        case SCALE_EXPERTS: {
            y = a[a_at + column];
            if column < width / 2u {
                y *= b[u32(a[a_at + width / 2u + column])];
            }
        }
        default: {}
    }
    output[row * width + column] = y;
}
