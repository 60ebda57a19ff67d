fn chunk_scale(i: u32) -> vec2<f32> {
    return vec2(1.0, 0.0);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(c.codes);
}
