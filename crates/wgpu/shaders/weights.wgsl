// A weight: the parameters with which it is read, and the factor of a row. `weights8` of its layout
// gives eight columns of a row without the factor; rows are padded to 32 columns.

@group(0) @binding(1) var<storage, read> weight: array<u32>;

struct Octet {
    low: vec4<f32>,
    high: vec4<f32>,
}

// Groups of 32 columns of a row.
const GROUPS: u32 = 0u;
// Where scales and factors begin, in words.
const SCALES_AT: u32 = 1u;
const FACTORS_AT: u32 = 2u;
// Columns of a row, rows of this part of the weight, and the first of them.
const COLS: u32 = 3u;
const PART_ROWS: u32 = 4u;
const FIRST_ROW: u32 = 5u;
// Four words, as a vector.
const CODEBOOK: u32 = 2u;
// The first parameter of the shader's own.
const OWN: u32 = 12u;

fn factor(row: u32) -> f32 {
    return bitcast<f32>(weight[param(FACTORS_AT) + row]);
}
