// Each half of a group has a scale.
fn chunk_scale(i: u32) -> vec2<f32> {
    let scales = group_scales(i >> 1u);
    return vec2(select(scales.x, scales.y, (i & 1u) != 0u), 0.0);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(c.codes[j])) * c.scale.x;
}

fn int_dot(c: Chunk, x: array<u32, QUADS>, sum: i32) -> f32 {
    var dot = 0;
    //@ for j 4
    dot += dot4I8Packed(c.codes[{j}], x[{j}]);
    //@ end
    return f32(dot) * c.scale.x;
}
