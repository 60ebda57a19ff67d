// Rounds as Q8_0 does: the scale is a half, and codes are of the rounded scale.
fn store_unit(at: u32, count: u32, to: u32, unit: u32) {
    var largest = 0.0;
    for (var i = 0u; i < count; i++) {
        largest = max(largest, abs(head[at + i]));
    }
    let d = unpack2x16float(pack2x16float(vec2(largest / 127.0, 0.0))).x;
    let inverse = select(0.0, 1.0 / d, d != 0.0);
    let word = to + 9u * unit;
    kv[word] = bitcast<u32>(d);
    for (var i = 0u; i < 8u; i++) {
        var codes = vec4<i32>();
        for (var j = 0u; j < 4u; j++) {
            if 4u * i + j < count {
                codes[j] = i32(clamp(round(head[at + 4u * i + j] * inverse), -127.0, 127.0));
            }
        }
        kv[word + 1u + i] = pack4xI8(codes);
    }
}
