fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i);
}

// A word has four columns in the low halves of its bytes, and the next four in the high halves.
fn codes(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8((c.codes[j >> 1u] >> (4u * (j & 1u))) & 0x0f0f0f0fu));
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return codes(c, j) * c.scale.x + c.scale.y;
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    var sum = codes(c, 0u) * x.quads[0];
    sum = fma(codes(c, 1u), x.quads[1], sum);
    sum = fma(codes(c, 2u), x.quads[2], sum);
    sum = fma(codes(c, 3u), x.quads[3], sum);
    sum = fma(codes(c, 4u), x.quads[4], sum);
    sum = fma(codes(c, 5u), x.quads[5], sum);
    sum = fma(codes(c, 6u), x.quads[6], sum);
    sum = fma(codes(c, 7u), x.quads[7], sum);
    return fma(x.sum, c.scale.y, sum4(sum) * c.scale.x);
}
