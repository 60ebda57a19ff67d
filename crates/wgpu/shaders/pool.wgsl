// One row for each output, of the rows of its sequence.

@group(0) @binding(1) var<storage, read> input: array<f32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;

const WIDTH: u32 = 0u;
const KIND: u32 = 1u;

const MEAN: u32 = 0u;
const FIRST: u32 = 1u;
const SUM: u32 = 3u;

// The list of all output rows.
const ALL_OUTPUTS: u32 = 4u;

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
    let row = batch[batch[LISTS + 4u * ALL_OUTPUTS] + 2u * id.x];
    let span = row_span(row);
    let start = span_row(span);
    let len = span_len(span);
    var y = 0.0;
    switch param(KIND) {
        case MEAN: {
            for (var i = 0u; i < len; i++) {
                y += input[(start + i) * width + column];
            }
            y /= f32(len);
        }
        case SUM: {
            // Behind a prefix whose sum the caller has, the row itself.
            let first = select(row, start, span_position(span) == 0u);
            for (var i = first; i <= row; i++) {
                y += input[i * width + column];
            }
        }
        case FIRST: { y = input[start * width + column]; }
        default: { y = input[(start + len - 1u) * width + column]; }
    }
    output[id.x * width + column] = y;
}
