// Rows of a multiple of four columns, of which the weight has a multiple of 32.

@group(0) @binding(2) var<storage, read> input: array<vec4<f32>>;

fn input4(at: u32, i: u32) -> vec4<f32> {
    return input[(at >> 2u) + i];
}
