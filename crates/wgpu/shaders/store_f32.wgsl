fn store_unit(at: u32, count: u32, to: u32, unit: u32) {
    kv[to + unit] = bitcast<u32>(head[at]);
}
