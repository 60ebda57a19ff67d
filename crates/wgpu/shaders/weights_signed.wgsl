fn weights8(row: u32, octet: u32) -> Octet {
    let at = row * param(GROUPS) * 8u + octet * 2u;
    let scales = unpack2x16float(weight[param(SCALES_AT) + row * param(GROUPS) + (octet >> 2u)]);
    let scale = select(scales.x, scales.y, (octet & 2u) != 0u);
    return Octet(
        (vec4<f32>(unpack4xU8(weight[at])) - 128.0) * scale,
        (vec4<f32>(unpack4xU8(weight[at + 1u])) - 128.0) * scale,
    );
}
