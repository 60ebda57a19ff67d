fn weights8(row: u32, octet: u32) -> Octet {
    let codes = weight[row * param(GROUPS) * 4u + octet];
    let scale = unpack2x16float(weight[param(SCALES_AT) + row * param(GROUPS) + (octet >> 2u)]);
    let low = (vec4(codes) >> vec4(0u, 4u, 8u, 12u)) & vec4(15u);
    let high = (vec4(codes) >> vec4(16u, 20u, 24u, 28u)) & vec4(15u);
    return Octet(vec4<f32>(low) * scale.x + scale.y, vec4<f32>(high) * scale.x + scale.y);
}
