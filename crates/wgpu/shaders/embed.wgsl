// Rows of a table, for each token of the step.

@group(0) @binding(2) var<storage, read_write> output: array<f32>;

// Which row: that of the token, of the position, of the position modulo the rows, or the first; and
// the rows of all parts of the table.
const BY: u32 = 12u;
const TABLE_ROWS: u32 = 13u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = id.x;
    var table_row = 0u;
    switch param(BY) {
        case 0u: { table_row = row_token(row); }
        case 1u: { table_row = row_position(row); }
        case 2u: { table_row = row_position(row) % param(TABLE_ROWS); }
        default: {}
    }
    let cols = param(COLS);
    let i = linear_id(id, groups) * 64u + thread;
    let is_here = table_row >= param(FIRST_ROW) && table_row - param(FIRST_ROW) < param(PART_ROWS);
    if !is_here || 4u * i >= cols {
        return;
    }
    let part_row = table_row - param(FIRST_ROW);
    let x = quad(chunk(part_row * row_chunks() + i / QUADS), i % QUADS) * factor(part_row);
    for (var j = 0u; j < 4u; j++) {
        if 4u * i + j < cols {
            output[row * cols + 4u * i + j] = x[j];
        }
    }
}
