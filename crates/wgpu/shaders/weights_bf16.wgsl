fn bf16x4(a: u32, b: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

fn weights8(row: u32, octet: u32) -> Octet {
    let at = row * param(GROUPS) * 16u + octet * 4u;
    return Octet(bf16x4(weight[at], weight[at + 1u]), bf16x4(weight[at + 2u], weight[at + 3u]));
}
