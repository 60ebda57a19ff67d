fn weights8(row: u32, octet: u32) -> Octet {
    let at = row * param(GROUPS) * 32u + octet * 8u;
    return Octet(
        bitcast<vec4<f32>>(vec4(weight[at], weight[at + 1u], weight[at + 2u], weight[at + 3u])),
        bitcast<vec4<f32>>(vec4(weight[at + 4u], weight[at + 5u], weight[at + 6u], weight[at + 7u])),
    );
}
