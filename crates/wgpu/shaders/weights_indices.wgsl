fn number(code: u32) -> f32 {
    return f32(extractBits(bitcast<i32>(params[CODEBOOK][code >> 2u]), 8u * (code & 3u), 8u));
}

fn weights8(row: u32, octet: u32) -> Octet {
    let codes = weight[row * param(GROUPS) * 4u + octet];
    let scales = unpack2x16float(weight[param(SCALES_AT) + row * param(GROUPS) + (octet >> 2u)]);
    let scale = select(scales.x, scales.y, (octet & 2u) != 0u);
    let low = (vec4(codes) >> vec4(0u, 4u, 8u, 12u)) & vec4(15u);
    let high = (vec4(codes) >> vec4(16u, 20u, 24u, 28u)) & vec4(15u);
    return Octet(
        vec4(number(low.x), number(low.y), number(low.z), number(low.w)) * scale,
        vec4(number(high.x), number(high.y), number(high.z), number(high.w)) * scale,
    );
}
