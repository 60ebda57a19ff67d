fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i);
}

// A word has four columns in the low halves of its bytes, and the next four in the high halves.
fn packed(c: Chunk, j: u32) -> u32 {
    return (c.codes[j >> 1u] >> (4u * (j & 1u))) & 0x0f0f0f0fu;
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(packed(c, j))) * c.scale.x + c.scale.y;
}

fn int_dot(c: Chunk, x: array<u32, QUADS>, sum: i32) -> f32 {
    var dot = 0;
    //@ for j 8
    dot += dot4I8Packed(packed(c, {j}u), x[{j}]);
    //@ end
    return fma(f32(sum), c.scale.y, f32(dot) * c.scale.x);
}
