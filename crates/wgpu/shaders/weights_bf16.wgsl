fn chunk_scale(i: u32) -> vec2<f32> {
    return vec2(1.0, 0.0);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    let a = c.codes[2u * j];
    let b = c.codes[2u * j + 1u];
    return bitcast<vec4<f32>>(vec4(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}
