fn weights8(row: u32, octet: u32) -> Octet {
    let at = row * param(GROUPS) * 8u + octet * 2u;
    let scale = unpack2x16float(weight[param(SCALES_AT) + row * param(GROUPS) + (octet >> 2u)]);
    return Octet(
        vec4<f32>(unpack4xU8(weight[at])) * scale.x + scale.y,
        vec4<f32>(unpack4xU8(weight[at + 1u])) * scale.x + scale.y,
    );
}
