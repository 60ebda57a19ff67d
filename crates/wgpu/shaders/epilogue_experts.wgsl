// The rows are those of several experts' weights, of which a tile has one: of each token and expert
// a row of results.

fn weight_row(i: u32) -> u32 {
    return i;
}

fn finish_of(i: u32, out_row: u32) -> Finish {
    return with_biases(i, min(i + 1u, param(PART_ROWS) - 1u));
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>, end: Finish) {
    let y = finished(sums, end);
    let row = i % param(OUTPUT_WIDTH);
    let at = out_row * param(OUTPUT_WIDTH) + row;
    output[at] = y.x;
    if row + 1u < param(OUTPUT_WIDTH) {
        output[at + 1u] = y.y;
    }
}
