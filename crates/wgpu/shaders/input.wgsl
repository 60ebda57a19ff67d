// Columns of an input row that a chunk of the weight is multiplied with; how they are read follows.

// Chunk `i` of the row that begins at element `at`.
fn columns(at: u32, i: u32) -> Columns {
    var sum = vec4<f32>();
    //@ for j QUADS
    let x{j} = input4(at, i * QUADS + {j}u);
    sum += x{j};
    //@ end
    let quads = array<vec4<f32>, QUADS>(
        //@ for j QUADS
        x{j},
        //@ end
    );
    return Columns(quads, sum4(sum));
}
