// Each half of a group has a scale.
fn chunk_scale(i: u32) -> vec2<f32> {
    let scales = group_scales(i >> 1u);
    return vec2(select(scales.x, scales.y, (i & 1u) != 0u), 0.0);
}

fn codes(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(c.codes[j]));
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return codes(c, j) * c.scale.x;
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    var sum = codes(c, 0u) * x.quads[0];
    sum = fma(codes(c, 1u), x.quads[1], sum);
    sum = fma(codes(c, 2u), x.quads[2], sum);
    sum = fma(codes(c, 3u), x.quads[3], sum);
    return sum4(sum) * c.scale.x;
}
