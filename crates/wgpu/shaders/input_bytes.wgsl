// Rows that are bytes already: for each chunk of the weight its columns, scale and sum.

@group(0) @binding(2) var<storage, read> input: array<vec4<u32>>;

// Those that chunk `i` of the weight is multiplied with, of the row that begins at vector `at`.
fn columns(at: u32, i: u32) -> Columns {
    let first = at + i * COLUMNS_VECTORS;
    //@ for v WORD_VECTORS
    let words{v} = input[first + {v}u];
    //@ end
    let scale = input[first + WORD_VECTORS];
    return Columns(array<u32, QUADS>(
        //@ for v WORD_VECTORS
        words{v}.x, words{v}.y, words{v}.z, words{v}.w,
        //@ end
    ), bitcast<i32>(scale.y), bitcast<f32>(scale.x));
}
