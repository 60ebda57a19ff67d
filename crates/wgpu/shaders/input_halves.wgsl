// Rows of a list as `halves.wgsl` writes them: columns in half precision, padded to 32, and in a
// vector of its own the exponent of the power of two that they are divided by.

@group(0) @binding(2) var<storage, read> input: array<vec4<f16>>;

// Vectors of a row.
fn input_stride() -> u32 {
    return 8u * param(GROUPS) + 1u;
}

// What row `i` of the list is divided by.
fn input_factor(i: u32) -> f32 {
    let exponent = i32(input[i * input_stride() + 8u * param(GROUPS)].x);
    return bitcast<f32>(u32(127 + exponent) << 23u);
}
