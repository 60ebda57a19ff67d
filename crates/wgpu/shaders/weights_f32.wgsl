fn chunk_scale(i: u32) -> vec2<f32> {
    return vec2(1.0, 0.0);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(c.codes);
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    return sum4(quad(c, 0u) * x.quads[0]);
}
