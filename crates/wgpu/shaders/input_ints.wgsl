// Columns of an input row that become bytes when they are read.

// Those that chunk `i` of the weight is multiplied with, of the row that begins at element `at`.
fn columns(at: u32, i: u32) -> Columns {
    return quantized(array<vec4<f32>, QUADS>(
        //@ for j QUADS
        input4(at, i * QUADS + {j}u),
        //@ end
    ));
}
