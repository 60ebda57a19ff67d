// Input rows of a list as bytes, for matmuls of several rows: a thread has a chunk.

@group(0) @binding(1) var<storage, read_write> rows_as_bytes: array<u32>;

// From one input row to the next, and the list of rows.
const INPUT_STRIDE: u32 = 12u;
const LIST: u32 = 13u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = linear_id(id, groups) * 64u + thread;
    let chunks = param(GROUPS) * 8u / QUADS;
    if i >= chunks {
        return;
    }
    let row = batch[batch[LISTS + 4u * param(LIST)] + 2u * id.x];
    let x = columns(row * param(INPUT_STRIDE), i);
    store_columns(row, chunks, i, x);
}
