fn chunk_scale(i: u32) -> vec2<f32> {
    return vec2(1.0, 0.0);
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return vec4(unpack2x16float(c.codes[2u * j]), unpack2x16float(c.codes[2u * j + 1u]));
}
