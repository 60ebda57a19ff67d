fn weight_row(i: u32) -> u32 {
    return i;
}

// Where a result is.
fn place(row: u32, out_row: u32) -> u32 {
    return out_row * param(OUTPUT_WIDTH) + param(FIRST_ROW) + row;
}

fn finish_of(i: u32, out_row: u32) -> Finish {
    let second = min(i + 1u, param(PART_ROWS) - 1u);
    var end = with_biases(i, second);
    if param(HAS_ADDEND) != 0u {
        end.addends = vec2(addend[place(i, out_row)], addend[place(second, out_row)]);
    }
    return end;
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>, end: Finish) {
    var y = finished(sums, end);
    if param(HAS_ADDEND) != 0u {
        y += end.addends;
    }
    output[place(i, out_row)] = y.x;
    if i + 1u < param(PART_ROWS) {
        output[place(i + 1u, out_row)] = y.y;
    }
}
