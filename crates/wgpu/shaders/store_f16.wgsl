fn store_unit(at: u32, count: u32, to: u32, unit: u32) {
    var x = vec2(head[at], 0.0);
    if count > 1u {
        x.y = head[at + 1u];
    }
    kv[to + unit] = pack2x16float(x);
}
