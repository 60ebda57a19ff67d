// The rows are those of two or three weights, each with a result of its own.

@group(0) @binding(6) var<storage, read_write> second: array<f32>;
@group(0) @binding(7) var<storage, read_write> third: array<f32>;

fn weight_row(i: u32) -> u32 {
    return i;
}

fn finish_of(i: u32, out_row: u32) -> Finish {
    return with_biases(i, min(i + 1u, param(PART_ROWS) - 1u));
}

fn store(row: u32, out_row: u32, y: f32) {
    let widths = vec3(param(OUTPUT_WIDTH), param(OUTPUT_WIDTH + 1u), param(OUTPUT_WIDTH + 2u));
    if row < widths.x {
        output[out_row * widths.x + row] = y;
    } else if row < widths.x + widths.y {
        second[out_row * widths.y + row - widths.x] = y;
    } else {
        third[out_row * widths.z + row - widths.x - widths.y] = y;
    }
}

fn finish(i: u32, out_row: u32, sums: vec2<f32>, end: Finish) {
    let y = finished(sums, end);
    store(i, out_row, y.x);
    if i + 1u < param(PART_ROWS) {
        store(i + 1u, out_row, y.y);
    }
}
