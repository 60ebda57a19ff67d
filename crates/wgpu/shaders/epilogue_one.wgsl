fn weight_row(i: u32) -> u32 {
    return i;
}

fn store(row: u32, out_row: u32, sum: f32) {
    let at = out_row * param(OUTPUT_WIDTH) + param(FIRST_ROW) + row;
    var y = with_bias(row, sum);
    if param(HAS_ADDEND) != 0u {
        y += addend[at];
    }
    output[at] = y;
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>) {
    store(i, out_row, sums.x);
    if i + 1u < param(PART_ROWS) {
        store(i + 1u, out_row, sums.y);
    }
}
