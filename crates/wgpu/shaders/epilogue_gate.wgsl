// The first half of the rows are gates, the second what they are multiplied with.

fn weight_row(i: u32) -> u32 {
    return (i >> 1u) + (i & 1u) * (param(PART_ROWS) >> 1u);
}

fn finish_of(i: u32, out_row: u32) -> Finish {
    return with_biases(weight_row(i), weight_row(i + 1u));
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>, end: Finish) {
    let y = finished(sums, end);
    output[out_row * param(OUTPUT_WIDTH) + (i >> 1u)] = glu(param(ACT), y.x, y.y, ACT + 1u);
}
