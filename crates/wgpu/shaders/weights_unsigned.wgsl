fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i >> 1u);
}

fn codes(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(c.codes[j]));
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return codes(c, j) * c.scale.x + c.scale.y;
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    var sum = codes(c, 0u) * x.quads[0];
    sum = fma(codes(c, 1u), x.quads[1], sum);
    sum = fma(codes(c, 2u), x.quads[2], sum);
    sum = fma(codes(c, 3u), x.quads[3], sum);
    return fma(x.sum, c.scale.y, sum4(sum) * c.scale.x);
}
