fn weights8(row: u32, octet: u32) -> Octet {
    let at = row * param(GROUPS) * 16u + octet * 4u;
    return Octet(
        vec4(unpack2x16float(weight[at]), unpack2x16float(weight[at + 1u])),
        vec4(unpack2x16float(weight[at + 2u]), unpack2x16float(weight[at + 3u])),
    );
}
