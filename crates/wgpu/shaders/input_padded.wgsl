// Rows of any width: zero beyond the weight's last column.

@group(0) @binding(2) var<storage, read> input: array<f32>;

fn input4(at: u32, i: u32) -> vec4<f32> {
    let c = 4u * i;
    let left = param(COLS) - min(c, param(COLS));
    var x = vec4<f32>();
    if left > 0u { x.x = input[at + c]; }
    if left > 1u { x.y = input[at + c + 1u]; }
    if left > 2u { x.z = input[at + c + 2u]; }
    if left > 3u { x.w = input[at + c + 3u]; }
    return x;
}
