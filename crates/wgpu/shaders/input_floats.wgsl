// Columns of an input row as they are.

struct Columns {
    quads: array<vec4<f32>, QUADS>,
}

// Those that chunk `i` of the weight is multiplied with, of the row that begins at element `at`.
fn columns(at: u32, i: u32) -> Columns {
    return Columns(array<vec4<f32>, QUADS>(
        //@ for j QUADS
        input4(at, i * QUADS + {j}u),
        //@ end
    ));
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    var sum = vec4<f32>();
    //@ for j QUADS
    sum = fma(quad(c, {j}u), x.quads[{j}], sum);
    //@ end
    return (sum.x + sum.y) + (sum.z + sum.w);
}
