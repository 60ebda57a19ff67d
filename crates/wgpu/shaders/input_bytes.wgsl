// Rows that are bytes already, as `columns.wgsl` says.

@group(0) @binding(2) var<storage, read> input: array<vec4<u32>>;

// Those that chunk `i` of the weight is multiplied with, of the row that begins at vector `at`.
fn columns(at: u32, i: u32) -> Columns {
    let chunks = row_chunks();
    //@ for v WORD_VECTORS
    let words{v} = input[at + {v}u * chunks + i];
    //@ end
    let scale_at = at + WORD_VECTORS * chunks + (i >> 1u);
    let first = 2u * (i & 1u);
    return Columns(array<u32, QUADS>(
        //@ for v WORD_VECTORS
        words{v}.x, words{v}.y, words{v}.z, words{v}.w,
        //@ end
    ), bitcast<i32>(input[scale_at][first + 1u]), bitcast<f32>(input[scale_at][first]));
}
