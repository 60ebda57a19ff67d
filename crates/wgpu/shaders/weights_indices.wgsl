// Each half of a group has a scale.
fn chunk_scale(i: u32) -> vec2<f32> {
    return group_scales(i);
}

fn number(code: u32) -> u32 {
    return params[CODEBOOK][code >> 2u] >> (8u * (code & 3u)) & 0xffu;
}

// Four numbers. The codes are where those of nibbles are.
fn packed(c: Chunk, j: u32) -> u32 {
    let i = unpack4xU8((c.codes[j >> 1u] >> (4u * (j & 1u))) & 0x0f0f0f0fu);
    return number(i.x) | number(i.y) << 8u | number(i.z) << 16u | number(i.w) << 24u;
}

fn quad(c: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(packed(c, j))) * select(c.scale.x, c.scale.y, j >= 4u);
}

fn int_dot(c: Chunk, x: array<u32, QUADS>, sum: i32) -> f32 {
    var low = 0;
    var high = 0;
    //@ for j 4
    low += dot4I8Packed(packed(c, {j}u), x[{j}]);
    high += dot4I8Packed(packed(c, {j}u + 4u), x[{j} + 4]);
    //@ end
    return fma(f32(high), c.scale.y, f32(low) * c.scale.x);
}
