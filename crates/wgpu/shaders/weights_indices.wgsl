// Each half of a group has a scale.
fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i);
}

fn number(code: u32) -> f32 {
    return f32(extractBits(bitcast<i32>(params[CODEBOOK][code >> 2u]), 8u * (code & 3u), 8u));
}

// The codes are where those of nibbles are.
fn codes(c: Chunk, j: u32) -> vec4<f32> {
    let i = unpack4xU8((c.codes[j >> 1u] >> (4u * (j & 1u))) & 0x0f0f0f0fu);
    return vec4(number(i.x), number(i.y), number(i.z), number(i.w));
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return codes(c, j) * select(c.scale.x, c.scale.y, j >= 4u);
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    var low = codes(c, 0u) * x.quads[0];
    low = fma(codes(c, 1u), x.quads[1], low);
    low = fma(codes(c, 2u), x.quads[2], low);
    low = fma(codes(c, 3u), x.quads[3], low);
    var high = codes(c, 4u) * x.quads[4];
    high = fma(codes(c, 5u), x.quads[5], high);
    high = fma(codes(c, 6u), x.quads[6], high);
    high = fma(codes(c, 7u), x.quads[7], high);
    return fma(sum4(high), c.scale.y, sum4(low) * c.scale.x);
}
