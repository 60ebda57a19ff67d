// The rows are those of several experts' gates, then of what each is multiplied with. A tile has the
// rows of one expert, both kinds in turn.

// The rows of an expert in tiles.
fn expert_rows() -> u32 {
    return 2u * param(OUTPUT_WIDTH);
}

fn weight_row(i: u32) -> u32 {
    let row = i % expert_rows();
    let gate = i / expert_rows() * param(OUTPUT_WIDTH) + (row >> 1u);
    return gate + (row & 1u) * (param(PART_ROWS) >> 1u);
}

fn finish_of(i: u32, out_row: u32) -> Finish {
    return with_biases(weight_row(i), weight_row(i + 1u));
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>, end: Finish) {
    let y = finished(sums, end);
    let at = out_row * param(OUTPUT_WIDTH) + ((i % expert_rows()) >> 1u);
    output[at] = glu(param(ACT), y.x, y.y, ACT + 1u);
}
