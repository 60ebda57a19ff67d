fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i >> 1u);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(c.codes[j])) * c.scale.x + c.scale.y;
}

// Codes less 128 are signed.
fn int_dot(c: Chunk, x: array<u32, QUADS>, sum: i32) -> f32 {
    var dot = 128 * sum;
    //@ for j 4
    dot += dot4I8Packed(c.codes[{j}] ^ 0x80808080u, x[{j}]);
    //@ end
    return fma(f32(sum), c.scale.y, f32(dot) * c.scale.x);
}
